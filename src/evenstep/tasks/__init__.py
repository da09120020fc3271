"""Tasks: one file each, found by file name. See `evenstep.task`."""
