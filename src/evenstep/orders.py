"""Orders of the samples of an epoch, for `Task.order`: pure functions of (seed, micro_batch_size,
epoch), each bound to what it has to know of the data."""

from __future__ import annotations

from collections.abc import Sequence

from evenstep.labels import IGNORED
from evenstep.plan import seed_of

import torch
from torch import Tensor

SORTED_TOGETHER = 50
"""Micro-batches of a chunk: more leave less padding, and less chance in what meets in a batch."""


def balanced(labels: Sequence[int], seed: int, micro_batch_size: int, epoch: int) -> Tensor:
    """(n,) int64: as many samples of each class as of any other, give or take one, shuffled.

    A class hands out its samples in rounds, each a new permutation of them, and an epoch goes on
    where the one before stopped: how often two samples of a class have been used never differs by
    more than one. Samples without a label are left out.
    """
    numbers = torch.as_tensor(labels)
    members = [(numbers == c).nonzero()[:, 0] for c in sorted(set(labels) - {IGNORED})]
    n, k = len(labels), len(members)
    # The n % k samples that are left over go to the classes in turn, over all epochs.
    bounds = [[(t * n + k - 1 - c) // k for t in (epoch, epoch + 1)] for c in range(k)]
    drawn = [
        _in_rounds(samples, first, last, seed, c)
        for c, (samples, (first, last)) in enumerate(zip(members, bounds, strict=True))
    ]
    return torch.cat(drawn)[_permutation(n, "balanced", seed, epoch)]


def _in_rounds(samples: Tensor, first: int, last: int, seed: int, class_number: int) -> Tensor:
    """Entries `first` to `last` - 1 of the endless list of permutations of the samples."""
    size = len(samples)
    rounds = range(first // size, -(-last // size))
    orders = [_permutation(size, "balanced-class", seed, class_number, r) for r in rounds]
    start = first - rounds.start * size
    return samples[torch.cat(orders)[start : start + last - first]]


def length_grouped(lengths: Tensor, seed: int, micro_batch_size: int, epoch: int) -> Tensor:
    """(n,) int64: every sample once, those of a micro-batch of about the same length, so that
    little is padded. `lengths` are (n,).

    Shuffled samples are sorted by length within chunks of SORTED_TOGETHER micro-batches, and the
    micro-batches of a chunk are shuffled again. One that straddles two epochs is of any length.
    """
    n = len(lengths)
    order = _permutation(n, "length-grouped", seed, epoch)
    before = min(-epoch * n % micro_batch_size, n)  # they end a micro-batch of the epoch before
    chunks = torch.split(order[before:], SORTED_TOGETHER * micro_batch_size)
    parts = [order[:before]]
    for number, chunk in enumerate(chunks):
        by_length = chunk[lengths[chunk].argsort(stable=True)]
        *whole, last = torch.split(by_length, micro_batch_size)
        if len(last) == micro_batch_size:
            whole, last = [*whole, last], last[:0]
        turns = _permutation(len(whole), "length-grouped-chunk", seed, epoch, number)
        parts += [*(whole[turn] for turn in turns.tolist()), last]
    return torch.cat(parts)


def _permutation(n: int, name: str, *key: int) -> Tensor:
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed_of(name, *key)))
