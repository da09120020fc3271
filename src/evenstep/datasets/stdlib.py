"""The source files of Python's own standard library: text that every Python comes with.

Which files there are depends on the Python version, and `identity` says which they were. Left out
are packages installed on top, and the library's tests, which some systems do not install.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from evenstep.plan import seed_of
from evenstep.sections import Section
from evenstep.texts import TextSplits

from pydantic import Field

LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


class Config(Section):
    name: str
    """stdlib."""

    eval_fraction: float = Field(default=0.05, gt=0, lt=1)
    """Share of the files held out for evaluation."""

    split_seed: int = 0
    """Picks the held-out files; independent of the seed of the run."""


def build(config: Config) -> TextSplits:
    """Rows of `path` and `text`. Whether a file is held out depends on its path alone, so that one
    Python version holds out what another one does."""
    from datasets import Dataset

    files = read(Path(sysconfig.get_path("stdlib")))
    held_out = {p for p in files if seed_of(p, config.split_seed) < config.eval_fraction * 2**63}
    train, evaluation = (
        Dataset.from_list(
            [
                {"path": path, "text": text}
                for path, text in files.items()
                if (path in held_out) == wanted
            ]
        )
        for wanted in (False, True)
    )
    digest = hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest()
    return TextSplits(
        train=train,
        eval=evaluation,
        identity={
            "fingerprint": digest[:16],
            "split": f"{len(held_out)} of {len(files)} files, split_seed {config.split_seed}",
        },
    )


def read(root: Path) -> Mapping[str, str]:
    """Relative path -> text of every Python file in UTF-8 that is not empty, sorted by path."""
    files = {}
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if not LEFT_OUT & set(relative.parts) and (text := _text(path)):
            files[relative.as_posix()] = text
    return files


def _text(path: Path) -> str | None:
    try:
        return path.read_bytes().decode()  # read_text would change line ends
    except UnicodeDecodeError:
        return None
