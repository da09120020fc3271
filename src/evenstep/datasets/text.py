"""Tables of text from the Hugging Face hub, or from csv, tsv, json, parquet and txt files.

`name` is a hub id, a file, or a folder whose files are named for their splits (train.tsv, dev.tsv;
data/train-00000-of-00001.parquet; train/part1.txt). A copy of a hub repository works as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evenstep.datasets import _tables, _text_files
from evenstep.labels import seeded_split
from evenstep.texts import ROW, TextSplits

import numpy as np

logger = logging.getLogger(__name__)

Files = Mapping[str, Sequence[str]]  # split -> paths or addresses of its files


class Config(_tables.TablesConfig, _text_files.TextFilesConfig):
    name: str
    """A hub id ("nyu-mll/glue"), a folder or a file."""

    stratify_by: str | None = "label"
    """Column of whose values a held-out part of the training split has the same shares as the
    rest, where there is such a column."""


def build(config: Config) -> TextSplits:
    """Raises ValueError for files that cannot be read and for missing splits."""
    tables = _tables_of(config)
    train, held_out, said = _evaluation(config, tables)
    logger.info("%s: %s", config.name, said)
    parts = [_tables.fingerprint(table) for table in (train, held_out) if table is not None]
    return TextSplits(
        train=train,
        eval=held_out,
        identity={"fingerprint": "-".join(parts), "revision": config.revision, "split": said},
    )


def _evaluation(config: Config, tables: _tables.Tables) -> tuple[Any, Any | None, str]:
    """The rows to train on, those to evaluate on, and a sentence that says which these are."""
    train = _tables.table(config, tables, config.train_split)
    if config.eval_split == "none":
        return train, None, "no evaluation (eval_split is none)"
    if split := _tables.evaluation_split(config, tables):
        return train, _tables.table(config, tables, split), f"evaluation on the split {split!r}"
    if len(train) == 1:
        return train, None, "no evaluation: a single row and no evaluation split"
    first, second, said = seeded_split(
        _strata(config, train), config.eval_fraction, config.split_seed
    )
    if config.stratify_by not in train.column_names:
        said = said.removesuffix(", stratified")
        said += f", no column {config.stratify_by!r} to stratify by" * bool(config.stratify_by)
    numbered = train.add_column(ROW, list(range(len(train))))
    return numbered.select(first), numbered.select(second), f"no evaluation split has rows; {said}"


def _strata(config: Config, table: Any) -> list[int]:
    """A number for each row: the same for rows of the same kind."""
    if config.stratify_by not in table.column_names:
        return [0] * len(table)
    values = list(map(str, table[config.stratify_by]))
    numbers: list[int] = np.unique(values, return_inverse=True)[1].tolist()
    return numbers


def _tables_of(config: Config) -> _tables.Tables:
    """The splits that are needed and have rows."""
    path = Path(config.name).expanduser()
    if path.is_file() and path.suffix != ".parquet":
        return _read(config, {config.train_split: [str(path)]})
    builder = _tables.builder(config)
    files = {str(split): list(found) for split, found in builder.config.data_files.items()}
    if path.is_dir():
        _tell_left_out(path, {Path(name).suffix for found in files.values() for name in found})
    if all(_text_files.suffix_of(name) for found in files.values() for name in found):
        return _read(config, files)
    return _tables.prepared(builder)


def _tell_left_out(folder: Path, read: set[str]) -> None:
    """`datasets` reads the files of one kind, that of most of them: those with the suffixes
    `read`."""
    kinds = {".txt", ".csv", ".tsv", ".jsonl", ".parquet"} - read
    if left_out := sorted(str(path) for path in folder.rglob("*") if path.suffix in kinds):
        some = ", ".join(left_out[:3]) + ", ..." * (len(left_out) > 3)
        logger.warning(
            "left out: %d file(s) of another kind than the rest: %s", len(left_out), some
        )


def _read(config: Config, files: Files) -> _tables.Tables:
    """Only what is needed: nobody minds a test.tsv in another format than train.tsv."""
    given = [config.train_split, *{config.eval_split}.difference(("auto", "none"))]
    for split in given:
        if split not in files:
            raise ValueError(f"{config.name} has no split {split!r}; it has: {', '.join(files)}")
    if config.sample_by != "document" and any(
        _text_files.suffix_of(name) == ".txt" for name in files[config.train_split]
    ):
        row = config.sample_by
        logger.info("a %s of a txt file is a row; with task.data.sample_by=document a file is", row)
    tables: dict[str, Any] = {}
    for split in given if config.eval_split != "auto" else (*given, *_tables.EVAL_SPLITS):
        if split in files and len(tables) < 2 and len(table := _rows(config, files[split])):
            tables.setdefault(split, table)
    return tables


def _rows(config: Config, names: Sequence[str]) -> Any:
    from datasets import DownloadManager

    paths = DownloadManager().download_and_extract(list(names))  # local files stay where they are
    return _text_files.read(config, list(zip(names, map(Path, paths), strict=True)))
