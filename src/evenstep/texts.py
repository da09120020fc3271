"""What a module in `datasets/` that reads text returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class TextSplits:
    """Each split is a `datasets.Dataset` with a column for each text, and perhaps one of labels."""

    train: Any
    eval: Any | None
    identity: Mapping[str, Any] = field(default_factory=dict)
    """What identifies the data; goes into the run's environment.json, compared on resume."""
