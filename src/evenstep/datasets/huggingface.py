"""Images from the Hugging Face hub, or the same on the local disk.

`name` is a hub id, a folder of parquet files (a copy of a hub repository works as it is), one
parquet file, or a folder of class folders. So a run config moves to a local copy with
`task.data.name=/path`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, cast

from evenstep.datasets import _image_folder, _tables
from evenstep.datasets._tables import EVAL_SPLITS, Tables, TablesConfig
from evenstep.images import ImageSplits, decode, fingerprint, spread
from evenstep.labels import LabelMap, declared_labels, seeded_split

import numpy as np
import PIL.Image

logger = logging.getLogger(__name__)


class Config(TablesConfig):
    name: str
    """A hub id ("zalando-datasets/fashion_mnist") or a local path."""

    image_column: str | None = None
    """Column of the images (encoded bytes or paths); null: image or img."""

    label_column: str | None = None
    """Column of the labels (class labels, text, whole numbers or true/false); null: label."""


@dataclass(frozen=True)
class Rows:
    """A source: rows of a split, each image decoded when it is read."""

    images: Any  # datasets.Dataset of one column, undecoded
    labels: Sequence[int]  # of the whole split
    rows: Sequence[int]
    split: str
    pure: ClassVar[bool] = True  # a row is the same image each time

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[PIL.Image.Image, int]:
        row = self.rows[index]
        image = decode(self.encoded(row), f"row {row} of split {self.split!r}")
        return image, self.labels[row]

    @property
    def targets(self) -> list[int]:
        """Class numbers of its rows, for what needs them without reading an image."""
        return [self.labels[row] for row in self.rows]

    def encoded(self, row: int) -> dict[str, Any] | None:
        (image,) = self.images[row].values()
        return cast("dict[str, Any] | None", image)

    def fingerprint(self) -> str:
        """Of all labels and of the files of up to 256 images: the same wherever the data lies."""
        images = (self.encoded(row) or {} for row in spread(len(self.images), 256))
        labels = np.asarray(self.labels, dtype="<i8").tobytes()
        return fingerprint(labels, *map(_content, images))


def build(config: Config) -> ImageSplits:
    """Raises ValueError for missing splits and columns, and for labels that cannot be used."""
    tables = _load(config)
    table = _tables.table(config, tables, config.train_split)
    labels, declared = _labels(config, table)
    label_map = (
        LabelMap.declared(declared, config.train_split)
        if declared
        else LabelMap.of(labels, config.train_split)
    )
    train = _rows(config, table, config.train_split, label_map)
    train, held_out, said = _evaluation(config, tables, label_map, train)
    logger.info("%s: %s", config.name, said)
    parts = dict.fromkeys(rows.fingerprint() for rows in (train, held_out) if rows)
    return ImageSplits(
        train=train,
        eval=held_out,
        classes=label_map.names,
        identity={"fingerprint": "-".join(parts), "revision": config.revision, "split": said},
    )


def _evaluation(
    config: Config, tables: Tables, label_map: LabelMap, train: Rows
) -> tuple[Rows, Rows | None, str]:
    """The rows to train on, those to evaluate on, and a sentence that says which these are."""
    if config.eval_split == "none":
        return train, None, "no evaluation (eval_split is none)"
    if split := _tables.evaluation_split(config, tables):
        held_out = _rows(config, _tables.table(config, tables, split), split, label_map)
        return train, held_out, f"evaluation on the split {split!r}"
    if len(train) == 1:
        return train, None, "no evaluation: a single sample and no evaluation split"
    first, second, said = seeded_split(train.labels, config.eval_fraction, config.split_seed)
    said = f"no evaluation split has samples; {said}"
    return replace(train, rows=first), replace(train, rows=second), said


def _load(config: Config) -> Tables:
    """The splits that have samples. Several processes may call this at once: files are locked."""
    path = Path(config.name).expanduser()
    if path.is_dir() and not any(path.glob("*.parquet")) and not any(path.glob("*/*.parquet")):
        known = [config.train_split, config.eval_split, *EVAL_SPLITS]
        columns = (config.image_column or "image", config.label_column or "label")
        tables = _image_folder.load(path, known, columns)
        return {split: table for split, table in tables.items() if len(table)}
    return _tables.prepared(_tables.builder(config))


def _rows(config: Config, table: Any, split: str, label_map: LabelMap) -> Rows:
    from datasets import Image

    column = _column(config, table, "image_column", ("image", "img"))
    return Rows(
        images=table.select_columns([column]).cast_column(column, Image(decode=False)),
        labels=label_map.encode(_labels(config, table)[0], split),
        rows=range(len(table)),
        split=split,
    )


def _labels(config: Config, table: Any) -> tuple[list[Any], list[str] | None]:
    """The labels of a split, and the names of the classes where its features declare them."""
    column = _column(config, table, "label_column", ("label",))
    values = table.select_columns([column]).with_format("arrow")[:].column(column).to_pylist()
    return declared_labels(values, table.features[column])


def _column(config: Config, table: Any, key: str, usual: Sequence[str]) -> str:
    wanted = [getattr(config, key)] if getattr(config, key) else usual
    for column in wanted:
        if column in table.column_names:
            return column
    raise ValueError(
        f"{config.name} has no column {' or '.join(wanted)}; set task.data.{key} to one of: "
        f"{', '.join(table.column_names)}"
    )


def _content(image: Mapping[str, Any]) -> bytes:
    data, path = image.get("bytes"), image.get("path")
    if data is None and path and Path(path).is_file():
        return Path(path).read_bytes()
    return data or b""
