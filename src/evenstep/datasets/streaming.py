"""Rows read as they come, from data larger than memory and disk: docs/streaming.md has an example.

A source is on the hub or local, and has rows of any kind; several are mixed by weight.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evenstep.datasets import _lines, _tables
from evenstep.sections import Section
from evenstep.streams import Streams
from evenstep.texts import TextSplits

from pydantic import Field

READERS = {
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".json": "json",
    ".jsonl.gz": "json",
    ".jsonl.zst": "json",
    ".txt.gz": "text",
}
"""How a name ends to the reader of `datasets`; .jsonl and .txt are read by `_lines`."""


class Location(Section):
    name: str
    """A hub id; or local: a folder as on the hub, a file, or a pattern of files (/data/*.jsonl).
    Files end in .parquet, .arrow, .jsonl, .json, .txt, .jsonl.gz, .jsonl.zst or .txt.gz."""

    config: str | None = None
    """Configuration of a hub dataset that has several."""

    split: str = "train"
    """Split of a hub dataset or folder."""

    revision: str | None = None
    """Commit, tag or branch of a hub dataset; a commit makes the run repeatable."""


class Source(Location):
    weight: float = Field(default=1.0, gt=0)
    """Share of the samples that come from here, in proportion to the other sources."""


class Config(Section):
    name: str
    """streaming."""

    sources: tuple[Source, ...] = Field(min_length=1)
    """Where training rows come from."""

    shuffle_buffer: int = Field(default=1000, ge=1)
    """Rows that are shuffled together, in each stream, besides the shards; 1 for none."""

    eval: Location | None = None
    """Where evaluation rows come from; null for no evaluation."""

    eval_rows: int = Field(default=1000, ge=1)
    """The first so many rows of it are evaluated, and kept in memory."""


def build(config: Config) -> TextSplits:
    """Raises ValueError for a source that cannot be found."""
    sources, files = zip(*map(rows_of, config.sources), strict=True)
    weights = [source.weight for source in config.sources]
    held_out = config.eval and first_rows(config.eval, config.eval_rows)
    return TextSplits(
        train=Streams(sources, weights, shuffle_buffer=config.shuffle_buffer),
        eval=held_out,
        identity={
            "revisions": [source.revision for source in config.sources],
            "files": [_tables.digest(described(names)) for names in files],
            "shards": [source.num_shards for source in sources],
            "eval": held_out and _tables.fingerprint(held_out),
        },
    )


def first_rows(location: Location, count: int) -> Any:
    """A `datasets.Dataset` of up to `count` rows."""
    import pyarrow as pa
    from datasets import Dataset

    rows = list(rows_of(location)[0].take(count))
    if not rows:
        raise ValueError(f"{location.name}: no rows to evaluate on; eval=null switches it off")
    names = dict.fromkeys(name for row in rows for name in row)  # a row may lack some
    try:
        return Dataset.from_dict({name: [row.get(name) for row in rows] for name in names})
    except (pa.ArrowException, OverflowError, UnicodeEncodeError) as error:
        raise ValueError(
            f"{location.name}: a column has values of several kinds or that no table holds: {error}"
        ) from error


def described(files: Sequence[str]) -> list[Any]:
    """Local files by name and size, wherever they lie; those on the hub by their addresses, which
    hold the commit."""
    if not all(map(os.path.isfile, files)):
        return list(files)
    root = os.path.commonpath(map(os.path.dirname, files))
    return [(os.path.relpath(name, root), Path(name).stat().st_size) for name in files]


def rows_of(location: Location) -> tuple[Any, Sequence[str]]:
    """The `datasets.IterableDataset` of a location, and the files that it reads."""
    from datasets import load_dataset_builder

    path = Path(location.name).expanduser().absolute()
    files = sorted(Path(path.anchor).glob(str(path.relative_to(path.anchor))))
    if files and not path.is_dir():
        return _from_files(location, files)
    name, options = (str(path), _tables.reader_options(path)) if files else (location.name, {})
    try:
        builder = load_dataset_builder(name, location.config, revision=location.revision, **options)
    except (ConnectionError, FileNotFoundError) as error:
        raise ValueError(
            f"{location.name!r} is no local file, folder or pattern, and on the hub: {error}"
        ) from error
    names = {str(split): found for split, found in builder.config.data_files.items()}
    if location.split not in names:
        raise ValueError(
            f"{location.name} has no split {location.split!r}; it has: {', '.join(names)}"
        )
    return builder.as_streaming_dataset(location.split), names[location.split]


def _from_files(location: Location, files: list[Path]) -> tuple[Any, Sequence[str]]:
    from datasets import load_dataset

    endings = {_ending(path) for path in files}
    if len(endings) > 1 or not endings <= {*READERS, ".jsonl", ".txt"}:
        raise ValueError(
            f"{location.name}: cannot stream files that end in {', '.join(sorted(endings))}; give "
            f"files of one kind: .jsonl, .txt, {', '.join(READERS)}"
        )
    (ending,) = endings
    # An empty one would be a shard of nothing, for a stream that may have no other.
    if not (files := [path for path in files if path.stat().st_size]):
        raise ValueError(f"{location.name}: nothing but empty files")
    paths = [str(path) for path in files]
    if ending in (".jsonl", ".txt"):
        return _lines.dataset(files, as_json=ending == ".jsonl"), paths
    reader = READERS[ending]
    options = _tables.reader_options(files[0])
    try:
        rows = load_dataset(reader, data_files=paths, split="train", streaming=True, **options)
    except Exception as error:  # whatever a library says of a broken file
        kind = type(error).__name__
        raise ValueError(f"{location.name} cannot be read: {kind}: {error}") from error
    return rows, paths


def _ending(path: Path) -> str:
    compressed = path.suffix in (".gz", ".zst")
    return "".join(path.suffixes[-2:]) if compressed else path.suffix
