"""Streams: training data of unknown length, read as it comes, beyond memory and disk.

The data is read as V virtual streams, one for each micro-batch number: micro-batch v of a step is
the next `micro_batch_size` samples of stream v. A stream belongs to the process that computes its
micro-batches, and is the same whichever that is: nothing here depends on how many there are.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from evenstep.plan import seed_of
from evenstep.stream_source import Row, Rows, Source, Transform, divisible, pieces


@dataclass(frozen=True)
class Streams:
    """As `Task.train_dataset`: endless samples from sources of rows, mixed by weight.

    A source that is through begins its next epoch, whatever the others do; an epoch of a source
    has each of its rows once.
    """

    sources: Sequence[Any]
    """`datasets.IterableDataset`s, not shuffled: that is done here, where a resume is exact."""

    weights: Sequence[float] = (1.0,)
    """The share of each source in the samples, in proportion; each above 0."""

    transform: Transform | None = None
    """The rows of a block to samples, perhaps more or fewer: pure. None: a row is a sample."""

    shuffle_buffer: int = 1000
    """Rows of a block. Samples are shuffled within a block, and blocks by shards."""

    def __post_init__(self) -> None:
        if len(self.sources) != len(self.weights) or min(self.weights, default=0) <= 0:
            raise ValueError(
                f"{len(self.sources)} sources and weights {list(self.weights)}: each source needs "
                "a weight above 0"
            )
        if self.shuffle_buffer < 1:
            raise ValueError(f"shuffle_buffer {self.shuffle_buffer}: 1 is the least, no shuffle")
        if any(_is_shuffled(getattr(source, "_ex_iterable", None)) for source in self.sources):
            raise ValueError(
                "a source was shuffled with .shuffle(), by a generator that each process has of "
                "its own: give it unshuffled, and shuffle_buffer to Streams"
            )

    def transformed(self, transform: Transform) -> Streams:
        return replace(self, transform=transform)

    def first_rows(self, count: int) -> list[Row]:
        """Some `count` rows, from the beginning of each source, as many of each: to look at the
        data before training, or to train a tokenizer on. Raises ValueError for a source that cannot
        be read that far."""
        share = -(-count // len(self.sources))
        rows: list[Row] = []
        for number, source in enumerate(self.sources):
            try:
                rows += source.take(share)
            except Exception as error:  # whatever a library says of a broken file
                kind = type(error).__name__
                raise ValueError(f"source {number} cannot be read: {kind}: {error}") from error
        return rows[:count]

    def open(
        self, numbers: Sequence[int], num_streams: int, seed: int, states: Mapping[str, Any]
    ) -> list[Stream]:
        """Streams `numbers` of `num_streams`, each from its state by number, or its beginning."""
        sources = [divisible(source, num_streams) for source in self.sources]
        return [
            Stream(self, sources, number, num_streams, seed, states.get(str(number)))
            for number in numbers
        ]


def _is_shuffled(iterable: Any) -> bool:
    """Of what is inside an IterableDataset, and inside that, which `datasets` tells nobody."""
    inner = getattr(iterable, "ex_iterable", None)
    return "Shuffled" in type(iterable).__name__ or (inner is not None and _is_shuffled(inner))


class Stream:
    """One endless stream of samples: functions of the seed, its number, and their count in it."""

    def __init__(
        self,
        streams: Streams,
        sources: Sequence[Any],
        number: int,
        num_streams: int,
        seed: int,
        state: Mapping[str, Any] | None,
    ) -> None:
        self.number, self._seed = number, seed
        self.count: int = state["count"] if state else 0
        """Samples drawn so far."""
        self._bounds = list(accumulate(streams.weights))
        saved = state["sources"] if state else [None] * len(sources)
        self._sources = []
        for index, (source, old) in enumerate(zip(sources, saved, strict=True)):
            key = (seed, number, index)
            rows = Rows(source, pieces(source.num_shards, number, num_streams), key)
            block_rows = streams.shuffle_buffer
            self._sources.append(Source(rows, key, streams.transform, block_rows, old))

    def draw(self) -> Any:
        """The next sample. Raises RuntimeError if its source has none for this stream; at the first
        one, if any source has none: it may be long before a small weight comes to it."""
        for source in self._sources if self.count == 0 else ():
            source.find()
        key = seed_of("mixture", self._seed, self.number, self.count)
        point = (key >> 10) / 2**53 * self._bounds[-1]
        self.count += 1
        return self._sources[bisect(self._bounds[:-1], point)].draw()

    def state(self) -> dict[str, Any]:
        """Plain JSON, to go on behind the last sample drawn; `epoch` is the mean progress."""
        return {
            "count": self.count,
            "epoch": sum(source.progress for source in self._sources) / len(self._sources),
            "sources": [source.state() for source in self._sources],
        }
