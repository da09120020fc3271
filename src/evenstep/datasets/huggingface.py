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
from typing import Any, cast

from evenstep.datasets import _image_folder
from evenstep.images import ImageSplits, decode, fingerprint, spread
from evenstep.labels import LabelMap, seeded_split
from evenstep.sections import Section

import numpy as np
import PIL.Image
from pydantic import Field

logger = logging.getLogger(__name__)

Tables = Mapping[str, Any]  # split -> datasets.Dataset with at least one row

EVAL_SPLITS = ("validation", "valid", "val", "dev", "test")


class Config(Section):
    name: str
    """A hub id ("zalando-datasets/fashion_mnist") or a local path."""

    config: str | None = None
    """Configuration of a hub dataset that has several."""

    revision: str | None = None
    """Commit, tag or branch of a hub dataset; a commit makes the run repeatable."""

    image_column: str | None = None
    """Column of the images (encoded bytes or paths); null: image or img."""

    label_column: str | None = None
    """Column of the labels (class labels, text, whole numbers or true/false); null: label."""

    train_split: str = "train"
    """Split to train on."""

    eval_split: str = "auto"
    """Split to evaluate on. auto: validation, valid, val, dev or test, whichever comes first,
    otherwise a part of the training split; none: no evaluation."""

    eval_fraction: float = Field(default=0.2, gt=0, lt=1)
    """Share of the training split held out where there is no evaluation split."""

    split_seed: int = 0
    """Picks the held-out samples; independent of the seed of the run."""


@dataclass(frozen=True)
class Rows:
    """A source: rows of a split, each image decoded when it is read."""

    images: Any  # datasets.Dataset of one column, undecoded
    labels: Sequence[int]  # of the whole split
    rows: Sequence[int]
    split: str

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[PIL.Image.Image, int]:
        row = self.rows[index]
        image = decode(self.encoded(row), f"row {row} of split {self.split!r}")
        return image, self.labels[row]

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
    table = _table(config, tables, config.train_split)
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
    split: str | None = config.eval_split
    if split == "none":
        return train, None, "no evaluation (eval_split is none)"
    if split == "auto":
        found = (s for s in EVAL_SPLITS if s in tables and s != config.train_split)
        split = next(found, None)
    if split:
        held_out = _rows(config, _table(config, tables, split), split, label_map)
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
    builder = _builder(config, path)
    builder.download_and_prepare()
    # Not load_dataset: it fails as soon as any split is empty.
    sizes = {name: split.num_examples for name, split in builder.info.splits.items()}
    return {name: builder.as_dataset(split=name) for name, size in sizes.items() if size}


def _builder(config: Config, path: Path) -> Any:
    from datasets import load_dataset_builder

    if path.is_file():
        return load_dataset_builder("parquet", data_files={config.train_split: str(path)})
    try:
        if path.is_dir():  # with the default batch size, an empty parquet file is an error
            return load_dataset_builder(str(path), config.config, batch_size=1000)
        return load_dataset_builder(config.name, config.config, revision=config.revision)
    except (ConnectionError, FileNotFoundError) as error:
        raise ValueError(
            f"{config.name!r} is no local path, and on the hub: {error} "
            "The same run config works on a local copy: task.data.name=/path"
        ) from error


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
    names = getattr(table.features[column], "names", None)
    if names is None:
        return values, None
    known = dict(enumerate(names))  # not the -1 by which hub datasets write "no label"
    return [known.get(value) for value in values], names


def _column(config: Config, table: Any, key: str, usual: Sequence[str]) -> str:
    wanted = [getattr(config, key)] if getattr(config, key) else usual
    for column in wanted:
        if column in table.column_names:
            return column
    raise ValueError(
        f"{config.name} has no column {' or '.join(wanted)}; set task.data.{key} to one of: "
        f"{', '.join(table.column_names)}"
    )


def _table(config: Config, tables: Tables, split: str) -> Any:
    if split in tables:
        return tables[split]
    raise ValueError(
        f"{config.name} has no split {split!r} with samples; it has: "
        f"{', '.join(tables) or 'none, neither parquet files nor class folders'}"
    )


def _content(image: Mapping[str, Any]) -> bytes:
    data, path = image.get("bytes"), image.get("path")
    if data is None and path and Path(path).is_file():
        return Path(path).read_bytes()
    return data or b""
