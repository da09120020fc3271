"""Mixup and CutMix against written out formulas."""

import pickle
from types import SimpleNamespace

from evenstep import memory
from evenstep.hardware import Hardware
from evenstep.labels import IGNORED
from evenstep.mixing import mixing
from evenstep.task import Task

import pytest
import torch
from accelerate import Accelerator

LABELS = [2, 0, IGNORED, 1, 2]


def batch(labels=LABELS):
    images = torch.rand(len(labels), 3, 8, 8, generator=torch.Generator().manual_seed(0)) + 1
    images[torch.tensor(labels) == IGNORED] = 0  # as skipped images are
    return {"image": images, "label": torch.tensor(labels)}


def draw(mix, seed, given=None):
    torch.manual_seed(seed)
    return mix(given or batch())


def test_nothing_is_mixed_by_default():
    assert mixing(3, mixup=None, cutmix=None) is None


def test_mixup_mixes_images_and_labels_in_the_same_share():
    mix, before = mixing(3, mixup=0.8, cutmix=None), batch()
    shares = set()
    counted = [0, 1, 3, 4]
    for seed in range(20):
        mixed = draw(mix, seed)
        images, labels = before["image"][counted], before["label"][counted]
        partners, partner_labels = images.roll(1, 0), labels.roll(1, 0)
        # sample 1 of class 0 is mixed with sample 0 of class 2
        share = mixed["label"][1, 0].item()
        shares.add(share)
        torch.testing.assert_close(mixed["image"][counted], share * images + (1 - share) * partners)
        expected = share * torch.eye(3)[labels] + (1 - share) * torch.eye(3)[partner_labels]
        torch.testing.assert_close(mixed["label"][counted], expected)
    assert len(shares) == 20


def test_cutmix_labels_are_the_shares_of_the_area():
    mix = mixing(3, mixup=None, cutmix=1.0)
    images = batch()["image"]
    for seed in range(20):
        mixed = draw(mix, seed)
        own = (mixed["image"][1] == images[1]).all(0)
        other = (mixed["image"][1] == images[0]).all(0)
        assert (own ^ other).all()
        assert mixed["label"][1].tolist() == pytest.approx(
            [own.double().mean().item(), 0, other.double().mean().item()]
        )


@pytest.mark.parametrize("alphas", [(0.8, None), (None, 1.0), (0.8, 1.0)])
def test_skipped_images_leak_nowhere(alphas):
    """They are black; every pixel of the others is at least 1."""
    mix = mixing(3, mixup=alphas[0], cutmix=alphas[1])
    for seed in range(20):
        mixed = draw(mix, seed)
        assert mixed["label"].sum(1).tolist() == pytest.approx([1, 1, 0, 1, 1])
        assert mixed["image"][2].count_nonzero() == 0
        assert mixed["image"][[0, 1, 3, 4]].min() >= 1
    none = draw(mix, 0, batch([IGNORED, IGNORED]))
    assert none["label"].tolist() == [[0, 0, 0], [0, 0, 0]]


def test_mixing_is_a_pure_function_of_the_seed_and_can_be_sent_to_a_worker_process():
    mix, given = mixing(3, mixup=0.8, cutmix=1.0), batch()
    before = given["image"].clone()
    drawn = [draw(mix, seed, given) for seed in range(20)]
    sent = pickle.loads(pickle.dumps(mix))
    for seed, mixed in enumerate(drawn):
        again = draw(sent, seed)
        assert mixed["image"].equal(again["image"])
        assert mixed["label"].equal(again["label"])
    assert given["image"].equal(before)
    # An image that keeps a pixel of its own was cut, not mixed: both kinds occur.
    assert {bool((mixed["image"][1] == before[1]).any()) for mixed in drawn} == {True, False}


def test_a_micro_batch_of_one_image_is_refused():
    with pytest.raises(ValueError, match="micro_batch_size to at least 2"):
        draw(mixing(3, mixup=0.8, cutmix=None), 0, batch([1]))


def test_micro_batches_of_one_image_are_refused_where_no_others_fit_into_memory():
    task = Task(
        model=None,
        train_dataset=[0, 1] * 4,
        eval_dataset=None,
        collate=batch,
        count=lambda mixed: len(mixed["label"]),
        loss=None,
        score=None,
        summarize=None,
        best_metric="",
        mix=mixing(2, mixup=0.8, cutmix=None),
    )
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    strategy = SimpleNamespace(optimizer=optimizer, start=optimizer.zero_grad)
    learner = SimpleNamespace(bare=model, strategy=strategy)
    hardware = Hardware(Accelerator(cpu=True), channel=None)

    def accumulate(batches):
        if any(targets > 1 for targets, _ in batches):
            raise MemoryError

    with pytest.raises(ValueError, match="micro_batch_size to at least 2"):
        memory.settled(Auto(), task, learner, hardware, accumulate)


class Auto(SimpleNamespace):
    """A run config that leaves the micro-batch size open."""

    micro_batch_size, global_batch_size, seed = "auto", 8, 0
    num_workers, precision, compile = 0, "fp32", False

    def model_copy(self, update):
        return Auto(**update)
