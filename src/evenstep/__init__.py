"""evenstep: a run is a pure function of its run config; the hardware only changes its speed."""
