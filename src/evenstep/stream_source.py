"""One source of rows as one stream reads it: which rows, in which order, and where it stands.

Rows come in *blocks*. A block is transformed (tokenised, packed), what comes out is permuted by a
key, and handed out. The state is where the block begins and how much of it has been handed out: a
resume opens the shard, of a Parquet file the row group, in which the block begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from math import gcd
from typing import Any

from evenstep.plan import permute, seed_of

import torch

Row = dict[str, Any]
Transform = Callable[[list[Row]], Sequence[Any]]

ENOUGH_SHARDS = 10  # for each stream: from here on, one more or less counts as even
READ_ROWS = 1000  # at a time, at most


@dataclass(frozen=True)
class Piece:
    """Of the rows of a shard, those whose number is `part` modulo `parts`."""

    shard: int
    part: int = 0
    parts: int = 1


def pieces(num_shards: int, number: int, num_streams: int) -> list[Piece]:
    """What stream `number` reads in an epoch; all streams together read each row once.

    As many shards as come out even are read whole, by one stream each. If there are few, those
    left over are split by row number: several streams read such a shard, and each keeps its part.
    """
    left_over = num_shards % num_streams if few(num_shards, num_streams) else 0
    whole = num_shards - left_over
    parts = num_streams // gcd(left_over, num_streams)
    split = range(number, left_over * parts, num_streams)
    return [
        *(Piece(shard) for shard in range(number, whole, num_streams)),
        *(Piece(whole + part // parts, part % parts, parts) for part in split),
    ]


def few(num_shards: int, num_streams: int) -> bool:
    """Whether streams that differ by a shard would be uneven."""
    return num_shards < ENOUGH_SHARDS * num_streams


def divisible(source: Any, num_streams: int) -> Any:
    """`source` in more shards where that helps to share them evenly: Parquet files then have their
    row groups for shards, for which each file is opened once."""
    uneven = source.num_shards % num_streams and few(source.num_shards, num_streams)
    return source.reshard() if uneven else source


@dataclass(frozen=True)
class Place:
    """A place between two rows."""

    epoch: int = 0
    block: int = 0  # of the epoch
    piece: int = 0  # of the order of the epoch
    group: int = 0  # row group of a whole Parquet file; others have one
    row: int = 0  # of the group


class Rows:
    """The rows of a source that one stream reads, in the order of each epoch."""

    def __init__(self, source: Any, pieces: Sequence[Piece], key: Sequence[int]) -> None:
        self._source, self._pieces, self._key = source, pieces, key

    def after(self, place: Place, size: int) -> Iterator[tuple[list[Row], Place]]:
        """The blocks of `size` rows from `place` to the end of its epoch, each with its end."""
        rows = self._rows(place, min(size, READ_ROWS))
        while block := list(islice(rows, size)):
            place = Place(place.epoch, place.block + 1, *block[-1][1])
            yield [row for row, _ in block], place

    def progress(self, place: Place) -> float:
        """Epochs that are through at `place`, as far as whole pieces tell."""
        return place.epoch + place.piece / max(1, len(self._pieces))

    def _rows(self, place: Place, batch: int) -> Iterator[tuple[Row, tuple[int, int, int]]]:
        """Each with the (piece, group, row) behind it."""
        count = len(self._pieces)
        key = seed_of("pieces", *self._key, place.epoch)
        order = permute(torch.arange(count), count, key).tolist()
        group, row = place.group, place.row
        for position in range(place.piece, count):
            piece = self._pieces[order[position]]
            for values, behind in self._piece(piece, group, row, batch):
                yield values, (position, *behind)
            group = row = 0

    def _piece(
        self, piece: Piece, group: int, row: int, batch: int
    ) -> Iterator[tuple[Row, tuple[int, int]]]:
        shard = self._source.shard(self._source.num_shards, piece.shard)
        groups = shard.reshard() if piece.parts == 1 else shard  # opens this file only
        for index in range(group, groups.num_shards):
            for values in _read(groups.shard(groups.num_shards, index).skip(row), batch):
                row += 1
                if (row - 1) % piece.parts == piece.part:
                    yield values, (index, row)
            row = 0


def _read(dataset: Any, batch: int) -> Iterator[Row]:
    # Not `for row in dataset`: in a worker process of a loader that is a part of the shards.
    for columns in dataset.iter(batch):
        for values in zip(*columns.values(), strict=True):
            yield dict(zip(columns, values, strict=True))


class Source:
    """Endless samples of one source for one stream."""

    def __init__(
        self,
        rows: Rows,
        key: Sequence[int],
        transform: Transform | None,
        block_rows: int,
        state: Mapping[str, int] | None,
    ) -> None:
        """`state` is a `state()`, None for the beginning. Nothing is read before `find` or
        `draw`, which raise RuntimeError if a whole epoch has no samples."""
        self._rows, self._key = rows, key
        self._transform, self._block_rows = transform, block_rows
        numbers = dict(state or {})
        self._taken = numbers.pop("taken", 0)
        self._begin = self._end = Place(**numbers)
        self._samples: Sequence[Any] | None = None
        self._order: list[int] = []
        self._blocks = rows.after(self._begin, block_rows)
        self._barren = self._begin.block == 0  # no sample in this epoch so far

    def draw(self) -> Any:
        """The next sample."""
        samples = self.find()
        self._taken += 1
        return samples[self._order[self._taken - 1]]

    def find(self) -> Sequence[Any]:
        """Read on, if need be, to a block with a sample that has not been drawn: this block."""
        if self._samples is None:
            self._samples = self._next_block()
        while self._taken >= len(self._samples):
            self._samples, self._taken = self._next_block(), 0
        return self._samples

    def state(self) -> dict[str, int]:
        return {**asdict(self._begin), "taken": self._taken}

    @property
    def progress(self) -> float:
        return self._rows.progress(self._begin)

    def _next_block(self) -> Sequence[Any]:
        block = next(self._blocks, None)
        if block is None:
            self._next_epoch()
            block = next(self._blocks, ([], self._end))
        rows, end = block
        self._begin, self._end = self._end, end
        samples = self._transform(rows) if self._transform else rows
        self._barren = self._barren and not samples
        count = len(samples)
        key = seed_of("block", *self._key, self._begin.epoch, self._begin.block)
        self._order = permute(torch.arange(count), count, key).tolist()
        return samples

    def _next_epoch(self) -> None:
        if self._barren:
            raise RuntimeError(
                f"stream {self._key[1]} has no samples of source {self._key[2]}: all rows of its "
                "shards went to other micro-batches of the step or were dropped by the "
                "transformation, or the shards are empty; use more rows, shards of like size, or "
                "a larger micro_batch_size"
            )
        self._end, self._barren = Place(epoch=self._end.epoch + 1), True
        self._blocks = self._rows.after(self._end, self._block_rows)
