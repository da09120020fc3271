"""The loaders as a run uses them, against the plan read directly."""

import dataclasses
import random

from evenstep.data import PlannedDataset, eval_loader, train_loader
from evenstep.plan import Plan, seed_of
from evenstep.seeding import seed_everything
from evenstep.task import Task

import numpy as np
import pytest
import torch


class Numbers:
    """Sample i is the number i."""

    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        return float(index)


class ManyNumbers(Numbers):
    def __getitems__(self, indices):
        return [float(index) for index in indices]


class Drawing(Numbers):
    """A dataset that draws by itself, from the three generators that augmentations use."""

    def __getitem__(self, index):
        return index + torch.rand(()).item() + random.random() + np.random.random()


def draw(sample):
    return sample + torch.rand(()).item() + random.random() + np.random.random()


def as_is(batch):
    return batch


def task(dataset, augment=None):
    return Task(
        model=torch.nn.Identity, train_dataset=dataset, eval_dataset=dataset, collate=torch.tensor,
        count=len, loss=None, score=None, summarize=None, best_metric="", augment=augment,
    )  # fmt: skip


def plan(n=10):
    return Plan(num_samples=n, global_batch_size=4, micro_batch_size=2, seed=0)


def batches(task, first_step=1, last_step=6, **options):
    n = len(task.train_dataset)
    loader = train_loader(
        task, plan(n), first_step=first_step, last_step=last_step, cast=as_is, **options
    )
    return [batch.tolist() for _, batch in loader]


@pytest.mark.parametrize("dataset", [Numbers(10), ManyNumbers(10)])
def test_micro_batches_hold_what_the_plan_says(dataset):
    expected = [[index for _, index in plan().samples(r)] for r in plan().micro_batches(1, 6)]
    assert batches(task(dataset)) == expected
    assert batches(task(dataset), first_step=3) == expected[4:]


def test_targets_are_counted_in_the_loader():
    loader = train_loader(task(Numbers(10)), plan(), first_step=1, last_step=2, cast=as_is)
    assert [count for count, _ in loader] == [2] * 4


@pytest.mark.parametrize(
    "case", [task(Numbers(10), draw), task(Drawing(10))], ids=["augment", "own"]
)
def test_augmentation_depends_on_seed_epoch_and_sample_alone(case):
    """CASES 14: any number of workers, any step to start from; every epoch draws anew."""
    straight = batches(case)
    assert batches(case, num_workers=2) == straight
    assert batches(case, first_step=4) == straight[6:]
    values = [value for batch in straight for value in batch]
    noise = [round(value % 1, 9) for value in values]
    assert len(set(noise)) == len(values)  # differs by sample, and for one sample by epoch


def test_a_sample_that_an_epoch_repeats_is_augmented_anew_each_time():
    """By the number of the repeat: what comes first is augmented as if it came once."""

    def order(seed, micro_batch_size, epoch):
        return torch.tensor([[2, 0, 2, 2, 0], [1, 1, 4, 1, 1]][epoch % 2])

    case, ordered = task(Numbers(5), draw), dataclasses.replace(plan(5), order=order)

    def read(first_step=1, **options):
        loader = train_loader(
            case, ordered, first_step=first_step, last_step=5, cast=as_is, **options
        )
        return [batch.tolist() for _, batch in loader]

    straight = read()
    assert read(num_workers=2) == straight
    assert read(first_step=3) == straight[4:]
    values = [value for batch in straight for value in batch]
    assert len({round(value % 1, 9) for value in values}) == len(values) == 20
    for epoch, offset, index in [(0, 0, 2), (0, 1, 0), (1, 0, 1), (1, 2, 4), (2, 0, 2), (3, 2, 4)]:
        seed_everything(seed_of("augment", 0, epoch, index))
        assert values[5 * epoch + offset] == pytest.approx(draw(float(index)), abs=1e-6)


def test_an_order_that_repeats_nothing_changes_no_augmentation():
    case, backwards = task(Numbers(10), draw), lambda *_: torch.arange(9, -1, -1)
    ordered = dataclasses.replace(plan(), order=backwards)
    loader = train_loader(case, ordered, first_step=1, last_step=5, cast=as_is)
    reordered = [value for _, batch in loader for value in batch.tolist()]
    usual = [value for batch in batches(case, last_step=5) for value in batch]
    assert reordered[:10] != usual[:10]
    assert sorted(reordered[:10]) == sorted(usual[:10])
    assert sorted(reordered[10:]) == sorted(usual[10:])


def test_mixing_depends_on_seed_step_and_micro_batch_alone():
    def mixed(batch):
        return batch + torch.rand(()) + random.random() + np.random.random()

    case = dataclasses.replace(task(Numbers(2)), mix=mixed)
    straight = batches(case)
    assert batches(case, num_workers=2) == straight
    assert batches(case, first_step=4) == straight[6:]
    noise = [round(values[0] % 1, 5) for values in straight]
    assert len(set(noise)) == len(straight)  # also where the samples are the same
    unmixed = torch.tensor(batches(task(Numbers(2)))[-1])
    seed_everything(seed_of("mix", 0, 6, 1))
    assert straight[-1] == mixed(unmixed).tolist()


def test_a_batch_read_is_used_where_there_is_one():
    dataset = ManyNumbers(10)
    dataset.__class__ = type("Fast", (ManyNumbers,), {"__getitem__": None})
    assert len(PlannedDataset(dataset, plan(), None).__getitems__(range(4))) == 4


@pytest.mark.parametrize("workers", [0, 2])
def test_evaluation_reads_every_sample_with_its_index(workers):
    loader = eval_loader(
        task(Numbers(7)), batch_size=3, num_processes=2, cast=as_is, num_workers=workers
    )
    pairs = [(indices, batch.tolist()) for indices, batch in loader]
    assert [i for indices, _ in pairs for i in indices] == [0, 1, 2, 3, 4, 5, 6, 6]
    assert all(indices == values for indices, values in pairs)
