"""The plan: which samples and which seeds make up each micro-batch of each step.

Pure functions of the run config. Nothing here knows a process, a device or a clock, so the plan
is the same on any hardware and after any resume. Words: a *position* is a place in the endless
stream of samples; step s (counted from 1) covers positions (s-1)*B to s*B-1, B being the global
batch size; a batch may straddle two epochs, and n may be smaller than B.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

BLOCK = 1 << 16  # positions shuffled at a time: 0.5 MB of indices, whatever n is
ROUNDS = 8
MAX_BITS = 52


def seed_of(name: str, *key: int) -> int:
    """A 63-bit seed from a named key, e.g. `seed_of("augment", seed, epoch, index)`.

    The whole key is hashed, so that (seed 1, epoch 0) and (seed 0, epoch 1) are unrelated.
    """
    digest = hashlib.blake2b(repr((name, *key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def permute(indices: Tensor, n: int, key: int) -> Tensor:
    """Map each of `indices` (int64, 0 <= i < n) through the permutation of range(n) named by `key`.

    A Feistel network over the bits that hold n, walked until the value falls below n (Black and
    Rogaway, "Ciphers with Arbitrary Finite Domains", 2002): any part of the permutation can be
    computed alone, so 10^9 samples need no 10^9 integers.
    """
    bits = max(2, (n - 1).bit_length())
    if bits > MAX_BITS:
        raise ValueError(f"{n} samples: the plan can order at most 2**{MAX_BITS}")
    keys = [seed_of("round", key, r) & 0x3FFFFFF for r in range(ROUNDS)]
    values = indices.clone()
    todo = torch.arange(len(values))
    while len(todo):
        values[todo] = walked = _feistel(values[todo], bits, keys)
        todo = todo[walked >= n]
    return values


def _feistel(values: Tensor, bits: int, keys: list[int]) -> Tensor:
    """Each half in turn is changed by a hash of the other, which can be undone: a permutation."""
    low = bits // 2
    left, right = values >> low, values & ((1 << low) - 1)
    for even, odd in zip(keys[::2], keys[1::2], strict=True):
        left = left ^ _hash(right, even, bits - low)
        right = right ^ _hash(left, odd, low)
    return (left << low) | right


def _hash(half: Tensor, key: int, bits: int) -> Tensor:
    """Multipliers below 2**31 on values below 2**32: no product leaves int64."""
    mixed = (half ^ key) * 0x4F1BBCDD
    mixed = ((mixed ^ (mixed >> 25)) & 0x7FFFFFFF) * 0x2C1B3C6D
    return (mixed >> 27) & ((1 << bits) - 1)


Order = Callable[[int, int, int], Tensor]  # see Task.order


@lru_cache(maxsize=4)
def _permuted_block(seed: int, n: int, epoch: int, block: int) -> list[int]:
    start = block * BLOCK
    indices = torch.arange(start, min(start + BLOCK, n))
    ordered: list[int] = permute(indices, n, seed_of("order", seed, epoch)).tolist()
    return ordered


@lru_cache(maxsize=2)  # a micro-batch may straddle two epochs
def _ordered_epoch(
    order: Order, seed: int, micro_batch_size: int, n: int, epoch: int
) -> tuple[list[int], list[int]]:
    """The samples in order, and for each how often the epoch had it before."""
    indices = order(seed, micro_batch_size, epoch)
    if len(indices) != n or indices.min() < 0 or indices.max() >= n:
        raise ValueError(f"Task.order has to give {n} indices from 0 to {n - 1} for epoch {epoch}")
    grouped, places = indices.sort(stable=True)
    before = torch.empty_like(places)
    before[places] = torch.arange(n) - torch.searchsorted(grouped, grouped)
    return indices.tolist(), before.tolist()


@dataclass(frozen=True)
class Plan:
    """Which samples every step trains on, from four numbers of the run config and the data."""

    num_samples: int | None
    """None where it is not known, as of streams: these have their own order, and no positions."""
    global_batch_size: int
    micro_batch_size: int
    seed: int
    order: Order | None = None
    """The task's own order of the samples of an epoch; None is a permutation."""

    def __post_init__(self) -> None:
        if self.num_samples is not None and self.num_samples < 1:
            raise ValueError("the training split has no samples; the plan needs at least one")
        check_batch_sizes(self.global_batch_size, self.micro_batch_size)

    @property
    def num_micro_batches(self) -> int:
        """V: micro-batches a step, numbered 0 to V-1."""
        return self.global_batch_size // self.micro_batch_size

    @property
    def steps_per_epoch(self) -> float:
        """Infinite where the number of samples is not known."""
        return (self.num_samples or math.inf) / self.global_batch_size

    def accumulation(self, num_processes: int) -> int:
        """Micro-batches that each of `num_processes` computes a step; ValueError if uneven."""
        v = self.num_micro_batches
        if v % num_processes:
            share, rest = divmod(self.global_batch_size, num_processes)
            nearest = [] if rest else _nearest_divisors(share, self.micro_batch_size)
            way_out = (
                f"or choose another micro_batch_size (nearest: {nearest})"
                if nearest
                else f"or make global_batch_size a multiple of {num_processes}"
            )
            raise ValueError(
                f"{v} micro-batches a step (global_batch_size {self.global_batch_size} / "
                f"micro_batch_size {self.micro_batch_size}) cannot be shared evenly by "
                f"{num_processes} processes; launch {divisors(v)} processes, {way_out}"
            )
        return v // num_processes

    def describe(self, num_processes: int, total_steps: int) -> str:
        """The batch arithmetic in two lines."""
        length = (
            f"{self.num_samples} samples, {self.steps_per_epoch:.2f} steps an epoch, "
            f"{total_steps} steps = {total_steps / self.steps_per_epoch:.2f} epochs"
            if self.num_samples
            else f"{total_steps} steps of a stream; an epoch stands for a tenth of them"
        )
        return (
            f"global batch {self.global_batch_size} = {self.num_micro_batches} micro-batches of "
            f"{self.micro_batch_size} = {num_processes} process(es) x "
            f"{self.accumulation(num_processes)} accumulated\n{length}"
        )

    def micro_batches(self, first_step: int, last_step: int) -> Iterator[range]:
        """The positions of every micro-batch of steps first to last (from 1), in order."""
        start = (first_step - 1) * self.global_batch_size
        stop = last_step * self.global_batch_size
        for position in range(start, stop, self.micro_batch_size):
            yield range(position, position + self.micro_batch_size)

    def samples(self, positions: range) -> list[tuple[int, ...]]:
        """The key of the sample at each of a run of positions: (epoch, sample index), and where
        the epoch had that sample before, how often."""
        assert self.num_samples is not None
        found: list[tuple[int, ...]] = []
        while len(found) < len(positions):
            epoch, offset = divmod(positions[len(found)], self.num_samples)
            wanted = len(positions) - len(found)
            found += [(epoch, *key) for key in self._epoch_part(epoch, offset, wanted)]
        return found

    def _epoch_part(self, epoch: int, offset: int, wanted: int) -> list[tuple[int, ...]]:
        """The keys of the samples of an epoch from `offset` on: at least one, at most `wanted`."""
        n = self.num_samples
        assert n is not None
        if self.order:
            ordered = _ordered_epoch(self.order, self.seed, self.micro_batch_size, n, epoch)
            pairs = zip(*(part[offset : offset + wanted] for part in ordered), strict=True)
            return [(index, before) if before else (index,) for index, before in pairs]
        block, within = divmod(offset, BLOCK)
        indices = _permuted_block(self.seed, n, epoch, block)
        return [(index,) for index in indices[within : within + wanted]]

    def step_of(self, position: int) -> tuple[int, int]:
        """The step (from 1) and the number of the micro-batch that cover a position."""
        step, within = divmod(position, self.global_batch_size)
        return step + 1, within // self.micro_batch_size


def check_batch_sizes(global_batch_size: int, micro_batch_size: int) -> None:
    """Raises ValueError unless a global batch is a whole number of micro-batches."""
    if global_batch_size % micro_batch_size:
        raise ValueError(
            f"micro_batch_size {micro_batch_size} does not divide global_batch_size "
            f"{global_batch_size}; nearest that do: "
            f"{_nearest_divisors(global_batch_size, micro_batch_size)}"
        )


def _nearest_divisors(total: int, wanted: int) -> list[int]:
    return sorted(sorted(divisors(total), key=lambda d: abs(d - wanted))[:2])


def divisors(total: int) -> list[int]:
    """Of a positive number, from small to large."""
    small = [d for d in range(1, math.isqrt(total) + 1) if total % d == 0]
    return sorted({*small, *(total // d for d in small)})
