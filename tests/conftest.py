"""Tests see train.py and reach no hub."""

import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["WANDB_MODE"] = "offline"
sys.path.insert(0, str(Path(__file__).parent.parent))
