"""Labels to class numbers, and splits made from a seed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

IGNORED = -100
"""The label of a sample that no loss and no metric counts; PyTorch's own `ignore_index`."""


@dataclass(frozen=True)
class LabelMap:
    """Class number i stands for `names[i]`; comes from the training split alone."""

    numbers: dict[Any, int]

    @classmethod
    def of(cls, labels: Sequence[Any], split: str) -> LabelMap:
        """The sorted distinct labels: text, whole numbers or true/false. Raises ValueError for a
        label of another kind (with its row), and for fewer than two classes."""
        for row, label in enumerate(labels):
            if not isinstance(label, str | int):
                raise ValueError(_unusable(label, row, split))
        return cls.declared(sorted(set(labels)), split)

    @classmethod
    def declared(cls, labels: Sequence[Any], split: str) -> LabelMap:
        """Classes in the order that the data itself declares."""
        if len(labels) < 2:
            raise ValueError(
                f"split {split!r} has {len(labels)} class(es) {list(labels)}; "
                "classification needs at least two"
            )
        return cls({label: number for number, label in enumerate(labels)})

    @property
    def names(self) -> list[str]:
        return [str(label) for label in self.numbers]

    def encode(
        self, labels: Sequence[Any], split: str, rows: Iterable[int] | None = None
    ) -> list[int]:
        """Class numbers. Raises ValueError naming the first label that training never saw, and its
        row; `rows` are the numbers of the rows where these are not 0, 1, 2, ..."""
        for row, label in zip(count() if rows is None else rows, labels, strict=False):
            if label is None:
                raise ValueError(_unusable(label, row, split))
            if isinstance(label, list | dict) or label not in self.numbers:
                some = ", ".join(map(repr, list(self.numbers)[:10]))
                raise ValueError(
                    f"row {row} of split {split!r} has the label {label!r}, which the training "
                    f"split does not have; its {len(self.numbers)} classes: {some}"
                    + ", ..."
                    * (len(self.numbers) > 10)
                )
        return [self.numbers[label] for label in labels]


def _unusable(label: Any, row: int, split: str) -> str:
    if label is None:
        return f"row {row} of split {split!r} has no label; remove the row or give it one"
    kind = type(label).__name__
    return (
        f"row {row} of split {split!r} has the label {label!r} ({kind}); "
        "a label is text, a whole number or true/false"
    )


def declared_labels(values: list[Any], feature: Any) -> tuple[list[Any], list[str] | None]:
    """The labels of a column, and the names of the classes where its feature declares them."""
    names = getattr(getattr(feature, "feature", feature), "names", None)
    if names is None:
        return values, None
    known = dict(enumerate(names))  # not the -1 by which hub datasets write "no label"
    if any(isinstance(value, list) for value in values):
        return [value and [known.get(label) for label in value] for value in values], names
    return [known.get(value) for value in values], names


def seeded_split(
    labels: Sequence[int], eval_fraction: float, seed: int
) -> tuple[list[int], list[int], str]:
    """Row numbers for training and for evaluation, each ascending, and a sentence that says how.

    Stratified where every class has at least two rows and both parts have room for every class.
    A pure function of the arguments. Raises ValueError for a single row.
    """
    import numpy as np
    from sklearn.model_selection import train_test_split

    n = len(labels)
    if n < 2:
        raise ValueError("one sample cannot be split into training and evaluation")
    num_eval = min(max(1, round(n * eval_fraction)), n - 1)
    counts = np.unique(labels, return_counts=True)[1]
    stratified = counts.min() >= 2 and len(counts) <= min(num_eval, n - num_eval)
    train, held_out = train_test_split(
        np.arange(n),
        test_size=num_eval,
        random_state=seed,
        stratify=labels if stratified else None,
    )
    how = "stratified" if stratified else "not stratified: too few samples of some class"
    said = f"{num_eval} of {n} training samples are held out, split_seed {seed}, {how}"
    return np.sort(train).tolist(), np.sort(held_out).tolist(), said


def name_outputs(model: Any, classes: Sequence[str]) -> None:
    """Tell a transformers model what its outputs stand for; other models keep no such thing."""
    model_config: Any = getattr(model, "config", None)
    if hasattr(model_config, "id2label"):
        model_config.id2label = dict(enumerate(classes))
        model_config.label2id = {name: number for number, name in enumerate(classes)}
