"""Loaders that follow the plan and never know a rank: Accelerate gives batch i to process i mod P.

A batch sampler yields *positions* (train) or sample indices (evaluation); the epoch and the sample
behind a position are worked out where the sample is read, so worker processes need no state and a
run starts at any step in O(1). Streams, which have no positions, are `stream_loader`'s.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from evenstep.config import RunConfig
from evenstep.hardware import Hardware
from evenstep.plan import Plan, seed_of
from evenstep.precision import cast_batch
from evenstep.seeding import seed_everything
from evenstep.stop import shield_worker
from evenstep.stream_loader import States, Turns, stream_loader
from evenstep.streams import Streams
from evenstep.task import Batch, Dataset, Task

from torch.utils.data import DataLoader

Cast = Callable[[Batch], Batch]


def steps_per_epoch(config: RunConfig, task: Task) -> float:
    """Infinite for streams, whose end is not known."""
    return (_num_samples(task) or math.inf) / config.global_batch_size


def epochs(config: RunConfig, task: Task, step: int, passes: float) -> float:
    """Passes over the training data up to a step; `passes` are those of all streams, added up."""
    if isinstance(task.train_dataset, Streams):
        assert config.micro_batch_size != "auto"
        return passes * config.micro_batch_size / config.global_batch_size
    return step * config.global_batch_size / len(task.train_dataset)


def _num_samples(task: Task) -> int | None:
    return None if isinstance(task.train_dataset, Streams) else len(task.train_dataset)


def make_plan(config: RunConfig, task: Task, hardware: Hardware) -> Plan:
    """Raises ValueError if the processes cannot share the micro-batches of a step evenly."""
    size = config.micro_batch_size
    assert size != "auto"
    n, global_size = _num_samples(task), config.global_batch_size
    plan = Plan(n, global_size, size, config.seed, task.order)
    plan.accumulation(hardware.num_processes)
    return plan


def loaders(
    task: Task,
    plan: Plan,
    hardware: Hardware,
    config: RunConfig,
    steps: range,
    streams: States,
) -> tuple[Iterator[tuple[float, Batch]], Iterable[tuple[list[int], Batch]] | None]:
    """This process's training micro-batches of `steps`, and its evaluation batches, on its device.

    `streams` are the states that streams go on from; it is kept at those of this process.
    """
    options: dict[str, Any] = {
        "cast": partial(cast_batch, precision=config.precision),
        "num_workers": config.num_workers,
        "pin_memory": hardware.device.type == "cuda",
        "worker_init_fn": shield_worker,
    }
    prepare = hardware.accelerator.prepare_data_loader
    size = plan.micro_batch_size
    evaluating = eval_loader(task, batch_size=size, num_processes=hardware.num_processes, **options)
    if isinstance(task.train_dataset, Streams):
        training = stream_batches(task, plan, hardware, steps, streams, **options)
    else:
        first, last = steps.start, steps.stop - 1
        loader = train_loader(task, plan, first_step=first, last_step=last, **options)
        training = iter(prepare(loader))
    return training, evaluating and prepare(evaluating)


def stream_batches(
    task: Task,
    plan: Plan,
    hardware: Hardware,
    steps: range,
    states: States,
    *,
    cast: Cast,
    **loader_options: Any,
) -> Iterator[tuple[float, Batch]]:
    """What `train_loader` yields, of streams. From now on, `states` holds those of this process."""
    numbers = range(hardware.rank, plan.num_micro_batches, hardware.num_processes)
    for number in states.keys() - {str(number) for number in numbers}:
        del states[number]  # another process's, and out of date from its next step on
    turns = Turns(task, plan, numbers, steps, dict(states), counted(task, cast))
    return stream_loader(turns, states, hardware.device, **loader_options)


def train_loader(
    task: Task, plan: Plan, *, first_step: int, last_step: int, cast: Cast, **loader_options: Any
) -> DataLoader[Any]:
    """Yields (targets, batch) for every micro-batch of steps `first_step` to `last_step`."""
    return DataLoader(
        PlannedDataset(task.train_dataset, plan, task.augment),  # type: ignore[arg-type]
        batch_sampler=MicroBatches(plan, first_step, last_step),
        collate_fn=counted(task, cast),
        **loader_options,
    )


def eval_loader(
    task: Task, *, batch_size: int, num_processes: int, cast: Cast, **loader_options: Any
) -> DataLoader[Any] | None:
    """Yields (sample indices, batch) over the evaluation split, as many batches on every process.

    The last batch is repeated where processes would be left without one; the evaluation table is
    keyed by sample index, so repeated rows fall out of it. None if there is no such split.
    """
    if task.eval_dataset is None:
        return None
    if not len(task.eval_dataset):
        raise ValueError("the evaluation split has no samples; None in its place switches it off")
    return DataLoader(
        IndexedDataset(task.eval_dataset),  # type: ignore[arg-type]
        batch_sampler=EvalBatches(len(task.eval_dataset), batch_size, num_processes),
        collate_fn=partial(_collate_indexed, task.collate, cast),
        **loader_options,
    )


def counted(task: Task, cast: Cast) -> Callable[[Sequence[Any]], tuple[float, Batch]]:
    """Makes of samples a training micro-batch, with the number of its targets; may draw."""
    # Not the task: where workers are not forked (macOS) all that is bound here has to be pickled.
    return partial(_collate_counted, task.collate, task.mix, task.count, cast)


def _collate_counted(
    collate: Callable[[Sequence[Any]], Batch],
    mix: Callable[[Batch], Batch] | None,
    count: Callable[[Batch], float],
    cast: Cast,
    samples: Sequence[Any],
) -> tuple[float, Batch]:
    batch = mix(collate(samples)) if mix else collate(samples)
    return float(count(batch)), cast(batch)  # a tensor too, which would move to the device


def _collate_indexed(
    collate: Callable[[Sequence[Any]], Batch], cast: Cast, rows: Sequence[tuple[int, Any]]
) -> tuple[list[int], Batch]:
    indices, samples = zip(*rows, strict=True)
    return list(indices), cast(collate(samples))


class MicroBatches:
    """Batch sampler: the positions of each micro-batch, O(1) to start at any step."""

    def __init__(self, plan: Plan, first_step: int, last_step: int) -> None:
        self.plan, self.first_step, self.last_step = plan, first_step, last_step
        self.batch_size = plan.micro_batch_size

    def __iter__(self) -> Iterator[Any]:  # ranges, where torch's stubs say lists
        return self.plan.micro_batches(self.first_step, self.last_step)

    def __len__(self) -> int:
        return (self.last_step - self.first_step + 1) * self.plan.num_micro_batches


class EvalBatches:
    """Batch sampler: consecutive sample indices, the number of batches a multiple of P."""

    def __init__(self, num_samples: int, batch_size: int, num_processes: int) -> None:
        starts = range(0, num_samples, batch_size)
        self.batches = [range(s, min(s + batch_size, num_samples)) for s in starts]
        self.batches += [self.batches[-1]] * (-len(self.batches) % num_processes)
        self.batch_size = batch_size

    def __iter__(self) -> Iterator[Any]:  # ranges, where torch's stubs say lists
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class PlannedDataset:
    """The training split read by position. Whatever a sample draws depends on its key alone."""

    def __init__(self, dataset: Dataset, plan: Plan, augment: Callable[[Any], Any] | None) -> None:
        self.dataset, self.plan, self.augment = dataset, plan, augment

    def __getitems__(self, positions: range) -> list[Any]:
        samples = self._read(self.plan.samples(positions))
        # For what comes next in this worker, which is to collate and mix them.
        seed_everything(seed_of("mix", self.plan.seed, *self.plan.step_of(positions[0])))
        return samples

    def _read(self, keys: list[tuple[int, ...]]) -> list[Any]:
        if self.augment is None and hasattr(self.dataset, "__getitems__"):
            # One read for the whole micro-batch, seeded as one should the dataset draw by itself.
            seed_everything(seed_of("augment", self.plan.seed, *keys[0]))
            return list(self.dataset.__getitems__([index for _, index, *_ in keys]))
        return [self._sample(key) for key in keys]

    def _sample(self, key: tuple[int, ...]) -> Any:
        # Repeats by their number, not their position: what comes once keeps (epoch, sample index).
        seed_everything(seed_of("augment", self.plan.seed, *key))
        sample = self.dataset[key[1]]
        return sample if self.augment is None else self.augment(sample)


class IndexedDataset:
    """The evaluation split: (sample index, sample) pairs. Should it draw, then always the same."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset

    def __getitems__(self, indices: range) -> list[tuple[int, Any]]:
        if hasattr(self.dataset, "__getitems__"):
            seed_everything(seed_of("evaluate", indices[0]))
            return list(zip(indices, self.dataset.__getitems__(list(indices)), strict=True))
        return [(index, self._sample(index)) for index in indices]

    def _sample(self, index: int) -> Any:
        seed_everything(seed_of("evaluate", index))
        return self.dataset[index]
