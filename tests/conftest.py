"""Tests see train.py and reach no hub."""

import os
import signal
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["WANDB_MODE"] = "offline"
# A shell's background job ignores SIGINT, and so would all that the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path.insert(0, str(Path(__file__).parent.parent))
