"""Tests see train.py and reach no hub."""

import os
import random
import signal
import sys
import tempfile
from pathlib import Path

import pytest

if "PYTEST_XDIST_WORKER" not in os.environ:  # workers share those of the process that starts them
    # Caches of these tests alone: of tokenizers, and of what `datasets` reads.
    CACHE = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    os.environ["XDG_CACHE_HOME"] = CACHE.name
    os.environ["HF_DATASETS_CACHE"] = f"{CACHE.name}/datasets"

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["WANDB_MODE"] = "offline"
# A shell's background job ignores SIGINT, and so would all that the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path.insert(0, str(Path(__file__).parent.parent))


@pytest.fixture(scope="session")
def binary(tmp_path_factory):
    """A folder of 40 short texts of two classes, 9 of them for evaluation as well."""
    from text_files import sentence, written

    draw = random.Random(0)
    rows = [{"text": sentence(draw), "label": n % 2} for n in range(40)]
    return written(tmp_path_factory.mktemp("binary"), rows, rows[:9])
