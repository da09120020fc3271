"""Orders of the samples of an epoch."""

from evenstep.orders import length_grouped
from evenstep.plan import Plan

import pytest
import torch


def lengths(n):
    return torch.randint(1, 200, (n,), generator=torch.Generator().manual_seed(n))


@pytest.mark.parametrize("n", [1, 3, 8, 101, 2000])
@pytest.mark.parametrize("micro_batch_size", [1, 4, 8, 64])
def test_every_sample_comes_once_an_epoch(n, micro_batch_size):
    for epoch in range(4):
        order = length_grouped(lengths(n), 7, micro_batch_size, epoch)
        assert order.dtype == torch.int64
        assert sorted(order.tolist()) == list(range(n))


def test_it_is_a_pure_function_of_seed_micro_batch_size_and_epoch():
    known = lengths(300)
    torch.manual_seed(1)
    first = length_grouped(known, 7, 8, 2)
    torch.manual_seed(2)
    assert torch.equal(first, length_grouped(known, 7, 8, 2))
    assert (
        len(
            {
                tuple(length_grouped(known, *key).tolist())
                for key in [(7, 8, 2), (8, 8, 2), (7, 4, 2), (7, 8, 3)]
            }
        )
        == 4
    )


def test_the_micro_batches_of_the_stream_are_of_similar_length_in_every_epoch():
    """2001 samples and micro-batches of 8: they begin elsewhere in each epoch."""
    n, size, known = 2001, 8, lengths(2001)

    def order(seed, micro_batch_size, epoch):
        return length_grouped(known, seed, micro_batch_size, epoch)

    def spread(plan):
        batches = [
            [known[i] for _, i in plan.samples(range(s, s + size))] for s in range(0, 4 * n, size)
        ]
        gaps = [int(max(batch) - min(batch)) for batch in batches]
        return sum(gaps) / len(gaps)

    assert spread(Plan(n, size, size, 3, order)) < 0.05 * spread(Plan(n, size, size, 3))


def test_micro_batches_come_in_no_order_of_length():
    known = lengths(4000)
    order = length_grouped(known, 1, 8, 0)
    means = known[order].double().view(-1, 8).mean(1)
    place = torch.arange(len(means)).double()
    assert abs(torch.corrcoef(torch.stack([place, means]))[0, 1]) < 0.15


def test_other_samples_meet_in_another_epoch():
    known = torch.full((800,), 5)
    first, second = (
        {frozenset(batch.tolist()) for batch in length_grouped(known, 1, 8, epoch).split(8)}
        for epoch in (0, 1)
    )
    assert not first & second
