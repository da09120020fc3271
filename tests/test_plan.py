from evenstep.plan import BLOCK, Plan, permute, seed_of

import pytest
import torch


def plan(n=10, batch=4, micro=2, seed=0):
    return Plan(num_samples=n, global_batch_size=batch, micro_batch_size=micro, seed=seed)


def indices(plan, first_step, last_step):
    return [plan.samples(r) for r in plan.micro_batches(first_step, last_step)]


@pytest.mark.parametrize("n", [1, 2, 3, 7, 10, 100, 1438, 65_536, 65_537, 200_001])
def test_every_epoch_is_a_permutation(n):
    assert permute(torch.arange(n), n, key=5).sort().values.equal(torch.arange(n))


def test_part_of_a_permutation_of_a_billion_needs_no_billion_integers():
    n = 10**9
    part = permute(torch.arange(n - 1000, n), n, key=1)
    assert len(set(part.tolist())) == 1000
    assert part.min() >= 0
    assert part.max() < n
    again = permute(torch.tensor([n - 1]), n, key=1)
    assert again.item() == part[-1]


def test_permutations_look_random():
    """Where sample i lands is uniform over the places, and neighbours do not stay together."""
    n, epochs = 16, 4000
    landed = torch.stack([permute(torch.arange(n), n, key) for key in range(epochs)])
    counts = torch.stack([torch.bincount(landed[:, i], minlength=n) for i in range(n)]).double()
    chi_squared = ((counts - epochs / n) ** 2 / (epochs / n)).sum()
    degrees = (n - 1) ** 2
    assert abs(chi_squared - degrees) < 5 * (2 * degrees) ** 0.5
    steps = (landed[:, 1:] - landed[:, :-1] == 1).double().mean()
    assert abs(steps - 1 / n) < 0.005


def test_epochs_and_seeds_give_unrelated_orders():
    orders = {
        tuple(i for _, i in plan(n=100, seed=seed).samples(range(epoch * 100, epoch * 100 + 100)))
        for seed in (0, 1)
        for epoch in (0, 1)
    }
    assert len(orders) == 4


def test_seeds_hash_the_whole_key():
    seeds = {seed_of("order", a, b) for a in range(50) for b in range(50)}
    assert len(seeds) == 2500
    assert seed_of("order", 1, 23) != seed_of("order", 12, 3)
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize(("n", "batch"), [(10, 4), (3, 8), (1, 4), (7, 7)])
def test_each_epoch_of_the_stream_holds_every_sample_once(n, batch):
    """No short batch, no dropped and no repeated sample, also when n < B (CASES 12)."""
    p = plan(n=n, batch=batch, micro=1)
    steps = 3 * n  # batch * 3n positions: whole epochs
    stream = [sample for micro_batch in indices(p, 1, steps) for sample in micro_batch]
    assert len(stream) == steps * batch
    for epoch in range(3 * batch):
        assert sorted(i for e, i in stream if e == epoch) == list(range(n))


def test_starting_at_any_step_continues_the_same_stream():
    p = plan(n=10, batch=4, micro=2)
    whole = indices(p, 1, 20)
    for step in range(1, 20):
        assert indices(p, step, 20) == whole[(step - 1) * 2 :]


def test_blocks_join_without_a_seam():
    p = plan(n=2 * BLOCK + 5, batch=4, micro=2)
    near_the_seam = [index for _, index in p.samples(range(BLOCK - 3, BLOCK + 3))]
    key = seed_of("order", 0, 0)
    expected = permute(torch.arange(BLOCK - 3, BLOCK + 3), 2 * BLOCK + 5, key)
    assert near_the_seam == expected.tolist()


def test_accumulation_is_derived():
    assert plan(batch=64, micro=16).accumulation(1) == 4
    assert plan(batch=64, micro=16).accumulation(2) == 2
    assert plan(batch=64, micro=16).accumulation(4) == 1


def test_processes_that_do_not_divide_are_refused_with_what_would_work():
    with pytest.raises(
        ValueError, match=r"launch \[1, 2, 4\] processes.*nearest: \[4, 8\]"
    ) as error:
        plan(batch=64, micro=16).accumulation(8)
    assert "3 processes" not in str(error.value)
    with pytest.raises(ValueError, match="make global_batch_size a multiple of 3"):
        plan(batch=64, micro=16).accumulation(3)


def test_micro_batch_size_must_divide():
    with pytest.raises(ValueError, match=r"micro_batch_size 5.*global_batch_size 8.*\[2, 4\]"):
        plan(batch=8, micro=5)


def test_huge_numbers_are_refused_at_once():
    with pytest.raises(ValueError, match="micro_batch_size 7"):
        plan(batch=10**9, micro=7)


def test_no_samples_is_an_error():
    with pytest.raises(ValueError, match="no samples"):
        plan(n=0)


def test_the_task_can_order_the_samples_of_an_epoch_itself():
    def rotated(seed, micro_batch_size, epoch):
        return (torch.arange(5) + seed + micro_batch_size + epoch) % 5

    plan = Plan(5, 4, 2, seed=1, order=rotated)
    found = [sample for p in plan.micro_batches(1, 3) for sample in plan.samples(p)]
    assert found == [
        *((0, (i + 3) % 5) for i in range(5)),
        *((1, (i + 4) % 5) for i in range(5)),
        *((2, i % 5) for i in range(2)),
    ]


def test_what_an_epoch_repeats_is_told_apart_by_how_often_it_came_before():
    plan = Plan(6, 4, 2, seed=0, order=lambda seed, size, epoch: torch.tensor([3, 1, 3, 3, 1, 0]))
    first = [(0, 3), (0, 1), (0, 3, 1), (0, 3, 2), (0, 1, 1), (0, 0)]
    assert plan.samples(range(6)) == first
    assert plan.samples(range(3, 9)) == [*first[3:], (1, 3), (1, 1), (1, 3, 1)]


@pytest.mark.parametrize("wrong", [[0, 1], [0, 1, 3], [-1, 0, 1], []])
def test_an_order_of_another_length_or_of_unknown_samples_is_an_error(wrong):
    plan = Plan(3, 3, 3, seed=0, order=lambda *_: torch.tensor(wrong))
    with pytest.raises(ValueError, match="has to give 3 indices from 0 to 2"):
        plan.samples(range(3))


def test_positions_know_their_step_and_micro_batch():
    plan = Plan(5, 6, 2, seed=0)
    assert [plan.step_of(p) for p in (0, 2, 5, 6, 11)] == [(1, 0), (1, 1), (1, 2), (2, 0), (2, 2)]
