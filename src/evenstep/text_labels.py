"""The labels of rows of text: one class of several, several at once, or a number."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from evenstep import texts
from evenstep.labels import LabelMap, declared_labels

Kind = Literal["single_label", "multi_label", "regression"]
Label = int | float | list[float]  # class number, number, or 0 or 1 for each class


@dataclass(frozen=True)
class Labels:
    """How labels are read; comes from the training split alone."""

    kind: Kind
    names: Sequence[str]
    """Of the classes, or of what a regression predicts."""
    encode: Callable[[Any, str], list[Label | None]]
    """(rows, name of the split) to a label a row, None where it has none. Raises ValueError for
    labels that cannot be used."""


def labels_of(kind: Kind | None, column: str | Sequence[str], rows: Any, split: str) -> Labels:
    """`rows` are the training split; several columns are a class each, with 0 or 1. Raises
    ValueError for labels that cannot be used, and where None leaves the kind to labels that do not
    tell it."""
    if not isinstance(column, str):
        if kind not in (None, "multi_label"):
            raise ValueError(f"label_column {list(column)} is for multi_label, and kind is {kind}")
        return Labels("multi_label", list(column), partial(_from_columns, column))
    values, declared = _values(rows, column, split)
    found = kind or _kind(values, declared)
    if found == "regression":
        return Labels(found, [column], partial(_each, column, _number))
    classes = declared or _classes(found, values, split)
    label_map = LabelMap.declared(classes, split)
    encode = _one if found == "single_label" else _several
    return Labels(found, label_map.names, partial(encode, column, label_map))


def _kind(values: Sequence[Any], declared: Sequence[str] | None) -> Kind:
    known = [value for value in values if not _missing(value)]
    if any(isinstance(value, list) for value in known):
        return "multi_label"
    if any(isinstance(value, float) for value in known):
        if len(known) < len(values) and all(float(v).is_integer() for v in known):
            raise ValueError(
                f"labels such as {known[0]} with some missing may be numbers or classes, which "
                "pandas then writes so: set task.kind=regression or task.kind=single_label"
            )
        return "regression"
    if known and not declared and all(isinstance(value, str) for value in known):
        _refuse_fractions(known)
    return "single_label"


def _refuse_fractions(values: Sequence[str]) -> None:
    try:
        fraction = next((v for v in values if not float(v).is_integer()), None)
    except (ValueError, OverflowError):  # words, or nan and inf
        return
    if fraction is not None:
        raise ValueError(
            f"labels such as {fraction!r} may be numbers or classes: set task.kind=regression or "
            "task.kind=single_label"
        )


def _classes(kind: Kind, values: Sequence[Any], split: str) -> list[Any]:
    """The sorted distinct labels."""
    known = [_whole(_first(values) if _missing(value) else value) for value in values]
    if kind == "multi_label":
        known = [label for value in known for label in _listed(value)]
    return list(LabelMap.of(known, split).numbers)


def _whole(label: Any) -> Any:
    return int(label) if isinstance(label, float) and label.is_integer() else label


def _values(rows: Any, column: str, split: str) -> tuple[list[Any], list[str] | None]:
    """The labels of a split, and the names of the classes where its features declare them."""
    values = texts.column(rows, column, split, "task.label_column")
    features = getattr(rows, "features", None) or {}
    return declared_labels(values, features.get(column))


def _one(column: str, label_map: LabelMap, rows: Any, split: str) -> list[Label | None]:
    values = _values(rows, column, split)[0]
    # All of them, so that an error names the row.
    filled = [next(iter(label_map.numbers)) if _missing(v) else _whole(v) for v in values]
    numbers = label_map.encode(filled, split, texts.numbers(rows))
    return [None if _missing(v) else n for v, n in zip(values, numbers, strict=True)]


def _several(column: str, label_map: LabelMap, rows: Any, split: str) -> list[Label | None]:
    labels: list[Label | None] = []
    for row, value in zip(texts.numbers(rows), _values(rows, column, split)[0], strict=True):
        own = None if _missing(value) else _listed(value)
        if unknown := set(own or ()) - set(label_map.numbers):
            raise ValueError(
                f"row {row} of split {split!r} has the label(s) {sorted(map(str, unknown))}, which "
                f"the training split does not have; its classes: {', '.join(label_map.names)}"
            )
        labels.append(None if own is None else [float(c in own) for c in label_map.numbers])
    return labels


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _each(column: str, read: Callable[[Any], float], rows: Any, split: str) -> list[Label | None]:
    labels: list[Label | None] = []
    for row, value in zip(texts.numbers(rows), _values(rows, column, split)[0], strict=True):
        try:
            labels.append(None if _missing(value) else read(value))
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"row {row} of split {split!r} has {value!r} in column {column!r}: {error}"
            ) from error
    return labels


def _number(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError("a number to predict has to be finite")
    return number


def _flag(value: Any) -> float:
    word = str(value).lower()
    if word in ("0", "0.0", "false"):  # 0.0 is how pandas writes it beside a missing value
        return 0.0
    if word in ("1", "1.0", "true"):
        return 1.0
    raise ValueError("a column of its own for each class holds 0 or 1, or true or false")


def _from_columns(columns: Sequence[str], rows: Any, split: str) -> list[Label | None]:
    by_column = [_each(column, _flag, rows, split) for column in columns]
    return [None if None in labels else list(labels) for labels in zip(*by_column, strict=True)]


def _missing(value: Any) -> bool:
    return value is None or value == "" or value != value  # NaN, as pandas writes it


def _first(values: Sequence[Any]) -> Any:
    return next((value for value in values if not _missing(value)), None)
