"""What a module in `datasets/` that reads text returns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class TextSplits:
    """Each split is a `datasets.Dataset` with a column for each text, and perhaps one of labels."""

    train: Any
    eval: Any | None
    identity: Mapping[str, Any] = field(default_factory=dict)
    """What identifies the data; goes into the run's environment.json, compared on resume."""


ROW = "__row__"
"""Column of rows that are a part of a file or split: the number of each in the whole."""


def numbers(rows: Any) -> Sequence[int]:
    """Of the rows, for messages."""
    found: Sequence[int] = rows[ROW][:] if ROW in rows.column_names else range(len(rows))
    return found


def column(rows: Any, name: str, split: str, key: str) -> list[Any]:
    """The values of a column of a split. Raises ValueError if the split has no such column; `key`
    sets its name."""
    if name in rows.column_names:
        values: list[Any] = rows[name][:]
        return values
    raise no_column(name, split, rows.column_names, key)


def no_column(name: str, split: str, names: Iterable[str], key: str) -> ValueError:
    other = "" if split == "train" else ", or evaluate on a split that has it, or on none"
    return ValueError(
        f"split {split!r} has no column {name!r}; set {key} to one of: {listed(names)}{other}"
    )


def listed(names: Iterable[str]) -> str:
    """The columns of the data by name, for messages."""
    return ", ".join(name for name in names if name != ROW)
