"""The order of additions: the same tree on any number of processes."""

from evenstep.summation import (
    CHUNK,
    PartialSums,
    sum_over_processes,
    terms_in_a_row,
    tree_sum,
    visits,
)

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def expression(numbers):
    """The sum over micro-batches as text, written down from the definition."""
    if len(numbers) % 2:
        text = str(numbers[0])
        for number in numbers[1:]:
            text = f"({text}+{number})"
        return text
    return f"({expression(numbers[0::2])}+{expression(numbers[1::2])})"


def on_processes(total, processes):
    """The expression that P processes evaluate: each its own subtree, then the top levels."""
    parts = [expression(range(total)[rank::processes]) for rank in range(processes)]
    while len(parts) > 1:
        half = len(parts) // 2
        parts = [f"({a}+{b})" for a, b in zip(parts[:half], parts[half:], strict=True)]
    return parts[0]


@pytest.mark.parametrize(("total", "processes"), [(8, 2), (8, 4), (8, 8), (12, 4), (24, 8), (6, 2)])
def test_a_process_computes_a_subtree(total, processes):
    assert on_processes(total, processes) == expression(range(total))


@pytest.mark.parametrize("count", [1, 2, 3, 4, 6, 8, 12, 16, 20])
def test_partial_sums_add_in_the_order_of_the_tree(count):
    terms = [torch.randn(100) * 10 ** (index % 7) for index in range(count)]
    sums, in_a_row = PartialSums(), terms_in_a_row(count)
    order = visits(count)
    assert sorted(order) == list(range(count))
    for start in range(0, count, in_a_row):
        leaf = torch.zeros(100)
        for index in order[start : start + in_a_row]:
            leaf = leaf + terms[index]
        sums.add([leaf])
    (total,) = sums.total()
    assert total.equal(tree_sum(terms))


def test_few_partial_sums_are_open_at_a_time():
    sums = PartialSums()
    for _ in range(16):
        sums.add([torch.zeros(1)])
        assert len(sums._open) <= 4


def worker(rank, processes, file, results):
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=processes)
    flat = process_terms(processes)[rank].clone()
    sum_over_processes(flat, processes)
    results[rank] = flat
    dist.destroy_process_group()


def process_terms(processes):
    generator = torch.Generator().manual_seed(0)
    scale = 10.0 ** torch.arange(processes)[:, None]
    return torch.randn(processes, CHUNK + 4, generator=generator) * scale


@pytest.mark.processes
def test_processes_add_in_the_order_of_the_tree(tmp_path):
    """More than one chunk, on four processes: the sums as the tree joins them, on each."""
    results = mp.Manager().dict()
    mp.spawn(worker, (4, tmp_path / "store", results), nprocs=4)
    a, b, c, d = process_terms(4)
    expected = (a + c) + (b + d)
    for rank in range(4):
        assert results[rank].equal(expected)
