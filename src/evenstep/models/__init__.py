"""Models: one file each, found by file name."""
