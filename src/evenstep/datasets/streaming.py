"""Rows read as they come, from data larger than memory and disk: docs/streaming.md has an example.

A source is on the hub or local, and has rows of any kind; several are mixed by weight.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from evenstep.datasets import _lines
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
    sources = [rows_of(source) for source in config.sources]
    weights = [source.weight for source in config.sources]
    held_out = config.eval and first_rows(config.eval, config.eval_rows)
    return TextSplits(
        train=Streams(sources, weights, shuffle_buffer=config.shuffle_buffer),
        eval=held_out,
        identity={
            "revisions": [source.revision for source in config.sources],
            "shards": [source.num_shards for source in sources],
            "eval_rows": len(held_out or ()),
        },
    )


def first_rows(location: Location, count: int) -> Any:
    """A `datasets.Dataset` of up to `count` rows."""
    from datasets import Dataset

    rows = list(rows_of(location).take(count))
    if not rows:
        raise ValueError(f"{location.name}: no rows to evaluate on; eval=null switches it off")
    return Dataset.from_list(rows)


def rows_of(location: Location) -> Any:
    """The `datasets.IterableDataset` of a location."""
    from datasets import load_dataset

    path = Path(location.name).expanduser().absolute()
    files = sorted(Path(path.anchor).glob(str(path.relative_to(path.anchor))))
    if files and not path.is_dir():
        return _from_files(location, files)
    name = str(path) if files else location.name
    try:
        return load_dataset(
            name, location.config, split=location.split, revision=location.revision, streaming=True
        )
    except (ConnectionError, FileNotFoundError) as error:
        raise ValueError(
            f"{location.name!r} is no local file, folder or pattern, and on the hub: {error}"
        ) from error


def _from_files(location: Location, files: list[Path]) -> Any:
    from datasets import load_dataset

    endings = {_ending(path) for path in files}
    if len(endings) > 1 or not endings <= {*READERS, ".jsonl", ".txt"}:
        raise ValueError(
            f"{location.name}: cannot stream files that end in {', '.join(sorted(endings))}; give "
            f"files of one kind: .jsonl, .txt, {', '.join(READERS)}"
        )
    (ending,) = endings
    if ending in (".jsonl", ".txt"):
        return _lines.dataset(files, as_json=ending == ".jsonl")
    paths = [str(path) for path in files]
    return load_dataset(READERS[ending], data_files=paths, split="train", streaming=True)


def _ending(path: Path) -> str:
    compressed = path.suffix in (".gz", ".zst")
    return "".join(path.suffixes[-2:]) if compressed else path.suffix
