"""Micro-batches from streams, on the process whose turn they are, with the state they leave."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from evenstep.plan import Plan, divisors, seed_of
from evenstep.seeding import seed_everything
from evenstep.streams import Stream, Streams
from evenstep.task import Batch, Task

import fsspec.asyn
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

Counted = tuple[float, Batch]
States = dict[str, Any]  # number of a stream -> its state


class Turns(IterableDataset[tuple[str, Any, Counted]]):
    """(stream, its state after, (targets, batch)) of the micro-batches of one process, in order.

    Worker process j of w gives turns j, j + w, ..., and a loader takes from its workers in turn:
    the order is that of one process, and each stream has one reader, if w divides the turns of
    a step.
    """

    def __init__(
        self,
        task: Task,
        plan: Plan,
        numbers: range,
        steps: range,
        states: States,
        collate: Callable[[list[Any]], Counted],
    ) -> None:
        self.task, self.plan, self.numbers, self.steps = task, plan, numbers, steps
        self.states, self.collate = states, collate

    def __iter__(self) -> Iterator[tuple[str, Any, Counted]]:
        numbers = self.numbers
        if worker := get_worker_info():
            numbers = numbers[worker.id :: worker.num_workers]
            fsspec.asyn.reset_lock()  # may have been forked locked: remote files would hang
        streams: Streams = self.task.train_dataset
        opened = streams.open(numbers, self.plan.num_micro_batches, self.plan.seed, self.states)
        for step in self.steps:
            for stream in opened:
                counted = self._micro_batch(step, stream)
                yield str(stream.number), stream.state(), counted

    def _micro_batch(self, step: int, stream: Stream) -> Counted:
        try:
            samples = [self._sample(stream) for _ in range(self.plan.micro_batch_size)]
            seed_everything(seed_of("mix", self.plan.seed, step, stream.number))
            return self.collate(samples)
        except ValueError as error:
            # Such as all processes raise alike are told by one of them; this is one process's.
            where = f"micro-batch {stream.number} of step {step}"
            raise RuntimeError(f"{where}: {error}") from error

    def _sample(self, stream: Stream) -> Any:
        seed = seed_of("augment", self.plan.seed, stream.number, stream.count)
        sample = stream.draw()
        if self.task.augment is None:
            return sample
        seed_everything(seed)
        return self.task.augment(sample)


def stream_loader(
    turns: Turns, states: States, device: torch.device, *, num_workers: int, **options: Any
) -> Iterator[Counted]:
    """(targets, batch) of each micro-batch, on `device`. `states` is kept at those of what has
    been handed out, which is less than workers have read."""
    loader = DataLoader(
        turns,
        batch_size=None,
        num_workers=max([0, *(d for d in divisors(len(turns.numbers)) if d <= num_workers)]),
        collate_fn=_as_is,
        **options,
    )
    for number, state, (targets, batch) in loader:
        states[number] = state
        yield targets, tree_map_only(Tensor, lambda t: t.to(device, non_blocking=True), batch)


def _as_is(item: Any) -> Any:
    return item  # where the loader would make tensors of numpy arrays
