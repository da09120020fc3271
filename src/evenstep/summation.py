"""Sums over micro-batches whose bits do not depend on the number of processes.

Floating-point addition is not associative, so bitwise mode fixes the order: a binary tree over the
numbers 0 to V-1 of a step's micro-batches. The tree splits a set of them into every other one and
the rest for as long as their count is even; an odd count is added one after another. Process r of
P = 2**k computes the numbers r, r + P, r + 2P, ...: one whole subtree. What remains are the top
k levels, which join the processes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK = 1 << 24  # elements exchanged at a time: 64 MB of float32


def visits(count: int) -> list[int]:
    """The order in which to compute `count` terms so that few partial sums are open at a time."""
    if count % 2:
        return list(range(count))
    half = visits(count // 2)
    return [2 * i for i in half] + [2 * i + 1 for i in half]


def terms_in_a_row(count: int) -> int:
    """How many terms, in the order of `visits`, are added one after another: a leaf of the tree."""
    odd = count // (count & -count)
    return math.gcd(count, 2) if odd == 1 else odd


def tree_sum(terms: Sequence[Tensor]) -> Tensor:
    """The sum of this process's terms, given in the order of their numbers."""
    if len(terms) % 2 == 0:
        return tree_sum(terms[0::2]) + tree_sum(terms[1::2])
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


class PartialSums:
    """The same sum over lists of tensors that come leaf by leaf, in the order of `visits`.

    Two partial sums of equal size are added as soon as both are there, as in a binary counter: of
    n leaves at most log2(n) + 1 are held at a time.
    """

    def __init__(self) -> None:
        self._open: list[list[Tensor]] = []
        self._num_leaves = 0

    def add(self, leaf: list[Tensor]) -> None:
        """Take over the tensors of a leaf; they may be changed in place."""
        self._num_leaves += 1
        size = self._num_leaves
        while size % 2 == 0:
            torch._foreach_add_(self._open[-1], leaf)
            leaf = self._open.pop()
            size //= 2
        self._open.append(leaf)

    def total(self) -> list[Tensor]:
        """The sum of all leaves; to be called when a power of two of them were added."""
        (total,) = self._open
        return total


def sum_over_processes(flat: Tensor, num_processes: int) -> None:
    """The top of the tree, in place: `flat` (1-D, its length a multiple of P) becomes the sum of
    all processes' `flat`, with the same bits on each.

    Each process receives one part from all others, adds the parts in the order of the tree, and
    sends its sums to all: 2 (P-1)/P of the data each way, what a ring all-reduce moves too.
    """
    for chunk in torch.split(flat, CHUNK):
        received = torch.empty_like(chunk)
        dist.all_to_all_single(received, chunk)
        parts = received.view(num_processes, -1)
        while len(parts) > 1:
            parts = parts[: len(parts) // 2] + parts[len(parts) // 2 :]
        dist.all_gather(list(chunk.view(num_processes, -1)), parts[0])
