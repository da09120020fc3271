"""evenstep: a run is a pure function of its run config; the hardware only changes its speed."""

import os

# Read when torch is imported. DDP is told to look for unused parameters, so that every model gives
# the same result, and would warn of that on every process of every run.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
