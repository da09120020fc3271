"""A look at the data before training: what a bounded sample of it breaks is reported all at once.

Samples are read, augmented, collated, mixed and counted as in training. A file that is broken, an
array of another shape or a NaN then ends the run here, named by its index, and not at step 4,711.
"""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from evenstep.config import RunConfig
from evenstep.data import counted
from evenstep.hardware import Hardware
from evenstep.plan import seed_of
from evenstep.processes import on_main
from evenstep.seeding import seed_everything
from evenstep.streams import Streams
from evenstep.task import Batch, Dataset, Task

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_leaves_with_path

SAMPLES = 256  # of each split
SECONDS = 3.0  # for each split
AT_ONCE = 32  # samples of a micro-batch here, lest one of thousands takes all the time
SHOWN = 10


def check_samples(task: Task, config: RunConfig, hardware: Hardware) -> None:
    """Raises ValueError, alike on all processes, with all problems of a sample of each split.

    The main process reads at most SAMPLES of each, evenly spread, until about SECONDS are over. A
    value that is not finite is no problem under `on_nonfinite: skip`.
    """
    on_main(partial(_check, task, config), hardware.channel)


def _check(task: Task, config: RunConfig) -> None:
    size = AT_ONCE if config.micro_batch_size == "auto" else config.micro_batch_size
    finite = config.on_nonfinite == "stop"
    problems: dict[str, list[str]] = {}  # what went wrong -> where it did
    for where, message in chain.from_iterable(
        split.problems(min(size, AT_ONCE), finite=finite)
        for split in _splits(task, config.seed, size)
    ):
        problems.setdefault(message, []).append(where)
    if problems:
        raise ValueError(_report(problems))


@dataclass(frozen=True)
class Split:
    name: str
    dataset: Dataset
    batch: Callable[[Sequence[Any]], tuple[float, Batch]]
    """(number of targets, micro-batch) of samples; may draw."""
    fewest: int
    """1 if there are micro-batches of a single sample, else 2: a collate or a mix may need two."""
    endless: bool = False

    def problems(self, size: int, *, finite: bool) -> Iterator[tuple[str, str]]:
        """(where, message) of all that fails, looked for in micro-batches of `size` samples."""
        deadline, counts = time.monotonic() + SECONDS, list[float]()
        n = len(self.dataset)
        rows = range(0, n, max(1, math.ceil(n / SAMPLES)))
        is_whole = len(rows) == n and not self.endless
        parts = math.ceil(len(rows) / size)
        for part in range(parts):
            indices = rows[part::parts]  # from the whole split: the time may end after any part
            outcome = self._attempt(indices, finite)
            if isinstance(outcome, Exception):
                yield from self._located(indices, outcome, finite)
            else:
                counts.append(outcome)
            if time.monotonic() > deadline:
                break
        if is_whole and len(counts) == parts > 0 and not any(counts):
            yield f"every {self.name} sample", "no target counts (Task.count is 0)"

    def _attempt(self, indices: Sequence[int], finite: bool) -> float | Exception:
        if len(indices) < self.fewest:
            indices = [*indices, *indices]
        try:
            seed_everything(seed_of("check", indices[0]))
            targets, batch = self.batch(_read(self.dataset, indices))
            if finite:
                _refuse_nonfinite(batch)
        except Exception as error:  # whatever the data makes the user's code raise
            return error
        return targets

    def _located(
        self, indices: Sequence[int], failure: Exception, finite: bool
    ) -> Iterator[tuple[str, str]]:
        """The samples that fail alone; if none does, the first that does not go with another."""
        alone = [(index, self._attempt([index], finite)) for index in indices]
        if failed := [(index, error) for index, error in alone if isinstance(error, Exception)]:
            yield from ((f"{self.name} sample {index}", _said(error)) for index, error in failed)
            return
        pairs = ((index, self._attempt([indices[0], index], finite)) for index in indices[1:])
        for index, error in pairs:
            if isinstance(error, Exception):
                yield f"{self.name} samples {indices[0]} and {index} in one batch", _said(error)
                return
        yield f"{self.name} samples {', '.join(map(str, indices))} in one batch", _said(failure)


def _splits(task: Task, seed: int, micro_batch_size: int) -> Iterator[Split]:
    """Copies of the datasets: a file that one opens when it is first read (HDF5, a database) must
    not be open yet in this process when the workers of the loader are forked from it."""
    training, fewest = partial(_training_batch, task), min(micro_batch_size, 2)
    if isinstance(task.train_dataset, Streams):
        for name, dataset in _drawn(task.train_dataset, seed):
            yield Split(name, dataset, training, fewest, endless=True)
    else:
        yield Split("training", copy(task.train_dataset), training, fewest)
    if task.eval_dataset is not None:
        evaluation = copy(task.eval_dataset)
        fewest = min(len(evaluation) % micro_batch_size or micro_batch_size, 2)  # of the last batch
        yield Split("evaluation", evaluation, lambda rows: (len(rows), task.collate(rows)), fewest)


def _drawn(streams: Streams, seed: int) -> Iterator[tuple[str, Dataset]]:
    """The name of each source, and its first samples."""
    for number, source in enumerate(streams.sources):
        block = min(streams.shuffle_buffer, SAMPLES)
        only = replace(streams, sources=[source], weights=[1.0], shuffle_buffer=block)
        (stream,) = only.open([0], 1, seed, {})
        yield f"source {number}, training", _Drawn(stream.draw)


class _Drawn:
    """What can be drawn from a stream before SECONDS are over, and the error that ended it."""

    def __init__(self, draw: Callable[[], Any]) -> None:
        self._samples: list[Any] = []
        self._error: Exception | None = None
        deadline = time.monotonic() + SECONDS
        try:
            while len(self._samples) < SAMPLES and time.monotonic() < deadline:
                self._samples.append(draw())
        except Exception as error:
            self._error = error

    def __len__(self) -> int:
        return len(self._samples) + (self._error is not None)

    def __getitem__(self, index: int) -> Any:
        if index == len(self._samples) and self._error:
            raise self._error
        return self._samples[index]


def _training_batch(task: Task, samples: Sequence[Any]) -> tuple[float, Batch]:
    augmented = [task.augment(sample) for sample in samples] if task.augment else samples
    targets, batch = counted(task, lambda batch: batch)(augmented)
    if not 0 <= targets < math.inf:
        raise ValueError(f"Task.count is {targets}; it is a number of targets, from 0 on")
    return targets, batch


def _read(dataset: Dataset, indices: Sequence[int]) -> Sequence[Any]:
    if hasattr(dataset, "__getitems__"):
        return list(dataset.__getitems__(list(indices)))
    return [dataset[index] for index in indices]


def _refuse_nonfinite(batch: Batch) -> None:
    for path, leaf in tree_leaves_with_path(batch):
        # Not a sparse or nested one, which cannot be asked everywhere.
        dense = isinstance(leaf, Tensor) and leaf.layout == torch.strided and not leaf.is_nested
        # Not -inf, which masks of attention hold; and isposinf takes no complex numbers.
        if dense and (leaf.isnan() | (leaf == math.inf)).any():
            raise ValueError(
                f"NaN or infinity in the batch{keystr(path)}; mend the data, or set "
                "on_nonfinite=skip, which leaves out steps whose loss is not finite"
            )


def _report(problems: Mapping[str, Sequence[str]]) -> str:
    lines = [f"{_some(where)}: {message}" for message, where in problems.items()]
    more = [f"and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    return "\n  ".join(["a look at the data before training found:", *lines[:SHOWN], *more])


def _some(where: Sequence[str]) -> str:
    return ", ".join(where[:3]) + (f" and {len(where) - 3} more" if len(where) > 3 else "")


def _said(error: Exception) -> str:
    """What evenstep says it says for the user; of anything else, also what it was and where."""
    frames = traceback.extract_tb(error.__traceback__)
    own = Path(__file__).parent
    if isinstance(error, ValueError) and Path(frames[-1].filename).is_relative_to(own):
        return str(error)
    libraries = ("/lib/python", "/lib64/python", "<frozen")
    theirs = [frame for frame in frames if not any(part in frame.filename for part in libraries)]
    last = (theirs or frames)[-1]
    return f"{type(error).__name__}: {error} ({Path(last.filename).name}, line {last.lineno})"
