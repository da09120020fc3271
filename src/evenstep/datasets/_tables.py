"""What tables on the hub and on the local disk share: their keys, their splits, reading them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from evenstep.sections import Section

from pydantic import Field

Tables = Mapping[str, Any]  # split -> datasets.Dataset with at least one row

EVAL_SPLITS = ("validation", "valid", "val", "dev", "test")


class TablesConfig(Section):
    name: str
    """A hub id ("zalando-datasets/fashion_mnist") or a local path."""

    config: str | None = None
    """Configuration of a hub dataset that has several, or its folder in a local copy."""

    revision: str | None = None
    """Commit, tag or branch of a hub dataset; a commit makes the run repeatable."""

    train_split: str = "train"
    """Split to train on."""

    eval_split: str = "auto"
    """Split to evaluate on. auto: validation, valid, val, dev or test, whichever comes first,
    otherwise a part of the training split; none: no evaluation."""

    eval_fraction: float = Field(default=0.2, gt=0, lt=1)
    """Share of the training split held out where there is no evaluation split."""

    split_seed: int = 0
    """Picks the held-out samples; independent of the seed of the run."""


def builder(config: TablesConfig) -> Any:
    """The `datasets.DatasetBuilder` of a hub id, a local folder or a parquet file. Raises
    ValueError if there is no such thing."""
    path = Path(config.name).expanduser()
    try:
        return _local(config, path) if path.exists() else _remote(config)
    except (ConnectionError, FileNotFoundError) as error:
        where = "is a folder, but" if path.exists() else "is no local path, and on the hub"
        raise ValueError(
            f"{config.name!r} {where}: {error} "
            "The same run config works on a local copy: task.data.name=/path"
        ) from error


def _local(config: TablesConfig, path: Path) -> Any:
    from datasets import load_dataset_builder

    if path.is_file():
        return load_dataset_builder("parquet", data_files={config.train_split: str(path)})
    name = config.config
    if name and (path / name).is_dir():
        path, name = path / name, None
    return load_dataset_builder(str(path), name, **reader_options(path))


def reader_options(path: Path) -> dict[str, Any]:
    """Of the reader of a local file or folder: by its own batch size, an empty Parquet file is an
    error."""
    is_parquet = path.suffix == ".parquet" or any(path.rglob("*.parquet"))
    return {"batch_size": 1000} if is_parquet else {}


def _remote(config: TablesConfig) -> Any:
    from datasets import load_dataset_builder

    return load_dataset_builder(config.name, config.config, revision=config.revision)


def prepared(builder: Any) -> Tables:
    """The splits that have samples. Several processes may call this at once: files are locked."""
    import pyarrow as pa
    from datasets.exceptions import DatasetBuildError

    try:
        builder.download_and_prepare()
    except (DatasetBuildError, pa.ArrowException) as error:  # the second: of a file that is cut off
        raise ValueError(
            "a file of the data cannot be read, or its columns are of another kind than those of "
            f"the other files, of whichever split: {error.__cause__ or error}"
        ) from error
    # Not load_dataset: it fails as soon as any split is empty.
    sizes = {name: split.num_examples for name, split in builder.info.splits.items()}
    return {name: builder.as_dataset(split=name) for name, size in sizes.items() if size}


def evaluation_split(config: TablesConfig, splits: Iterable[str]) -> str | None:
    """The split that `eval_split` asks for; None if that is none, or auto and there is none."""
    if config.eval_split != "auto":
        return None if config.eval_split == "none" else config.eval_split
    named = set(splits) - {config.train_split}
    return next((split for split in EVAL_SPLITS if split in named), None)


def table(config: TablesConfig, tables: Tables, split: str) -> Any:
    """Raises ValueError if there is no such split."""
    if split in tables:
        return tables[split]
    raise ValueError(
        f"{config.name} has no split {split!r} with samples; it has: "
        f"{', '.join(tables) or 'none, neither parquet files nor class folders'}"
    )


def fingerprint(table: Any) -> str:
    """Of the size and of up to 1024 rows: the same wherever the data lies."""
    some = table.select(range(0, len(table), max(1, len(table) // 1024)))
    return digest((len(table), some.to_list()))


def digest(value: Any) -> str:
    """A hash of numbers and text in lists, tuples and dicts."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]
