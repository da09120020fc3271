"""Recipes in data, loss and network: what each does to the numbers, on any number of processes."""

import copy
from collections import Counter

from evenstep.classification import logits_of
from evenstep.images import class_numbers
from evenstep.labels import IGNORED
from evenstep.models.resnet18 import with_drop_path
from evenstep.orders import balanced

import pytest
import torch
import torch.nn.functional as F
from image_files import batch, png, table, task
from launching import command, metrics, run, write_config
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from test_exact import assert_same
from torch import nn
from torchvision.models.resnet import BasicBlock
from torchvision.transforms import v2

LABELS = [0] * 11 + [1] * 3 + [2] * 6 + [IGNORED] * 3


# Balanced sampling


@pytest.mark.parametrize("epoch", [0, 1, 5, 1000])
def test_every_class_is_drawn_equally_often(epoch):
    drawn = balanced(LABELS, 7, 4, epoch)
    assert drawn.dtype == torch.int64
    assert len(drawn) == len(LABELS)
    counts = Counter(LABELS[i] for i in drawn.tolist())
    assert sorted(counts.values()) == [7, 8, 8]
    assert IGNORED not in counts


def test_over_the_epochs_samples_of_a_class_are_used_evenly_and_classes_too():
    used, sequences = Counter(), set()
    for epoch in range(40):
        drawn = balanced(LABELS, 7, 4, epoch).tolist()
        sequences.add(tuple(drawn))
        used.update(drawn)
        for number in range(3):
            uses = [used[i] for i, label in enumerate(LABELS) if label == number]
            assert max(uses) - min(uses) <= 1
        classes = [sum(used[i] for i, own in enumerate(LABELS) if own == c) for c in range(3)]
        assert max(classes) - min(classes) <= 1
    assert len(sequences) == 40


def test_a_balanced_order_is_shuffled_and_a_function_of_seed_and_epoch_alone():
    drawn = balanced([0, 1] * 500, 7, 4, 3)
    torch.rand(3)
    assert drawn.equal(balanced([0, 1] * 500, 7, 16, 3))
    assert not drawn.equal(balanced([0, 1] * 500, 8, 4, 3))
    first = (drawn[:500] % 2).sum().item()  # of the class 1: about half of them
    assert 200 < first < 300


def test_the_task_gives_weights_and_an_order_by_its_own_labels(tmp_path):
    table(tmp_path / "train.parquet", ["a"] * 6 + ["b"] * 2)
    data = {"name": str(tmp_path), "eval_split": "none"}
    plain = task(data)
    assert class_numbers(plain.train_dataset) == [0] * 6 + [1] * 2
    assert plain.order is None
    drawn = task(data, balanced_sampling=True).order(0, 4, 0)
    assert Counter((drawn >= 6).tolist()) == {False: 4, True: 4}
    weighted = task(data, class_weights="balanced")
    everything = batch(weighted)
    assert weighted.count(everything) == pytest.approx(8)
    assert weighted.count(batch(weighted, [0, 7])) == pytest.approx(8 / (2 * 6) + 8 / (2 * 2))
    logits = nn.Parameter(torch.randn(8, 2))
    expected = F.cross_entropy(logits, everything["label"], torch.tensor([8 / 12, 2.0]))
    loss = weighted.loss(lambda images: logits, everything) / weighted.count(everything)
    torch.testing.assert_close(loss, expected)


def test_labels_are_known_without_reading_an_image_where_the_source_has_them():
    class Source:
        targets = (2, 0, 1)

        def __getitem__(self, index):
            raise AssertionError

    assert class_numbers(Source()) == [2, 0, 1]
    assert class_numbers([("image", 1), ("image", 0)]) == [1, 0]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"class_weights": "balanced", "balanced_sampling": True}, "drop one of the two"),
        ({"class_weights": [1.0, -1.0]}, "greater than or equal to 0"),
        ({"label_smoothing": 1.0}, "less than 1"),
        ({"mixup": 0}, "greater than 0"),
        ({"teacher": {"name": "x", "alpha": 1.5}}, "less than or equal to 1"),
        ({"augment": ["cutmix"]}, "rand_augment"),
    ],
)
def test_keys_that_make_no_sense_are_refused(keys, message):
    with pytest.raises(ValidationError, match=message):
        task("digits", channels=1, **keys)


# Augmentation


def augmented(names, seed, channels=3, **keys):
    digits = task("digits", channels=channels, image_size=16, augment=names, **keys)
    image, label = digits.train_dataset[0]
    torch.manual_seed(seed)
    changed, same = digits.augment((image, label))
    assert (changed.shape, changed.dtype, same) == (image.shape, torch.uint8, label)
    return image, changed


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    ("names", "keys", "transform"),
    [
        (["rand_augment"], {"rand_augment_magnitude": 4}, v2.RandAugment(2, 4)),
        (["aug_mix"], {}, v2.AugMix()),
    ],
)
def test_policies_are_those_of_torchvision_and_draw_from_torch_alone(
    names, keys, transform, channels
):
    for seed in range(3):
        image, changed = augmented(names, seed, channels, **keys)
        torch.manual_seed(seed)
        assert changed.equal(transform(image))


def test_random_erasing_paints_one_rectangle_in_the_mean_colour():
    keys = {"normalize": {"mean": [0.2, 0.4, 0.6], "std": [0.1] * 3}, "erasing_probability": 1}
    for seed in range(4):
        image, changed = augmented(["random_erasing"], seed, **keys)
        erased = (changed == torch.tensor([51, 102, 153])[:, None, None]).all(0)
        rows, columns = erased.any(1).sum(), erased.any(0).sum()
        assert erased.sum() == rows * columns > 0
        assert changed[:, ~erased].equal(image[:, ~erased])
    image, changed = augmented(["random_erasing"], 0, **{**keys, "erasing_probability": 0})
    assert changed.equal(image)


def test_the_mean_of_an_image_and_its_mirror_image_is_evaluated():
    flipping = task("digits", channels=1, flip_in_evaluation=True)
    model, images = flipping.model().eval(), batch(flipping, range(4))
    with torch.no_grad():
        mean = (model(images["image"]) + model(images["image"].flip(-1))) / 2
        scored = flipping.score(model, images)
    expected = F.cross_entropy(mean, images["label"], reduction="none")
    torch.testing.assert_close(scored["loss"], expected)
    assert scored["prediction"].equal(mean.argmax(1))


# Stochastic depth


def test_a_block_keeps_or_drops_the_residual_branch_of_each_sample():
    plain = nn.Sequential(BasicBlock(4, 4)).double()
    dropping = with_drop_path(copy.deepcopy(plain), 0.25)
    dropping = copy.deepcopy(dropping)  # as an average of the weights may: hooks go along
    assert dropping.state_dict().keys() == plain.state_dict().keys()
    x = torch.rand(400, 4, 2, 2, dtype=torch.float64)
    block = plain[0]
    branch = block.bn2(block.conv2(block.bn1(block.conv1(x)).relu()))
    kept, dropped = (x + branch / 0.75).relu(), x.relu()
    out = dropping(x)
    took = torch.tensor([row.allclose(other) for row, other in zip(out, dropped, strict=True)])
    torch.testing.assert_close(out, torch.where(took[:, None, None, None], dropped, kept))
    assert 0.15 < took.double().mean() < 0.35
    plain.load_state_dict(dropping.state_dict())
    torch.testing.assert_close(dropping.eval()(x), plain.eval()(x))


def test_later_blocks_are_dropped_more_often():
    blocks = with_drop_path(nn.Sequential(*(BasicBlock(4, 4) for _ in range(4))), 0.2)
    assert [block.drop_path.p for block in blocks] == pytest.approx([0.05, 0.1, 0.15, 0.2])
    (untouched,) = with_drop_path(nn.Sequential(BasicBlock(4, 4)), 0.0)
    assert not hasattr(untouched, "drop_path")
    depths = [b.drop_path.p for b in network("resnet50", drop_path=0.1).modules() if drops(b)]
    assert depths == pytest.approx([0.1 * number / 16 for number in range(1, 17)])


def drops(module):
    return hasattr(module, "drop_path")


def network(name, **keys):
    return task("digits", {"name": name, **keys}, channels=1, image_size=32).model()


@pytest.mark.parametrize(
    "model",
    [
        {"name": "resnet18", "drop_path": 0.9},
        {"name": "timm/resnet10t", "options": {"drop_path_rate": 0.9}},
        {
            "name": "convnext",
            "config": {"hidden_sizes": [8] * 4, "depths": [1] * 4, "drop_path_rate": 0.9},
        },
    ],
    ids=lambda model: model["name"],
)
def test_each_kind_of_model_has_its_key_for_stochastic_depth(model):
    if model["name"].startswith("timm/"):
        pytest.importorskip("timm")
    built = network(**model)
    for module in built.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.ones_(module.weight)  # timm starts branches at 0
            module.eval()
        if hasattr(module, "layer_scale_parameter"):
            nn.init.ones_(module.layer_scale_parameter)
    images = torch.rand(1, 1, 32, 32).expand(16, -1, -1, -1)
    with torch.no_grad():
        logits = logits_of(built(images))
    assert len(logits.round(decimals=3).unique(dim=0)) > 1  # equal images, other paths


# No hardware matters


@pytest.mark.processes
def test_all_recipes_together_are_equal_on_one_and_two_processes(tmp_path):
    """With a broken image, classes that are not balanced, and a teacher."""
    data = {"name": str(tmp_path / "data")}
    images = [png((row * 37) % 256, mode="L") for row in range(30)]
    table(tmp_path / "data/test.parquet", list("aabc") * 3)
    images[4] = b"broken"
    table(tmp_path / "data/train.parquet", list("aaabbcaaaa") * 3, images)
    skipping = task(data, "recipe_net", on_error="skip")
    teacher, final = skipping.model(), tmp_path / "final"
    final.mkdir()
    skipping.export(teacher, final)
    save_file(teacher.state_dict(), final / "model.safetensors")

    task_keys = {
        "name": "image_classification",
        "data": data,
        "model": {"name": "recipe_net", "drop_path": 0.3},
        "on_error": "skip",
        "augment": ["rand_augment", "aug_mix", "random_erasing"],
        "mixup": 0.4,
        "cutmix": 1.0,
        "label_smoothing": 0.1,
        "class_weights": [0.5, 2.0, 1.5],
        "balanced_sampling": True,
        "teacher": {"name": str(final), "alpha": 0.4},
        "flip_in_evaluation": True,
    }
    runs = [trained(tmp_path, processes, task_keys) for processes in (1, 2)]
    assert_same(*runs, 1e-9)
    targets = {row["train/targets"] for row in metrics(runs[0])}
    assert any(value != round(value) for value in targets)  # weights of mixed labels
    assert (
        load_file(final / "model.safetensors").keys()
        == load_file(runs[0] / "final" / "model.safetensors").keys()
    )


def trained(folder, processes, task_keys):
    config = write_config(
        folder, task=task_keys, steps=8, global_batch_size=16, micro_batch_size=4, eval_every=4
    )
    code, output = run(command(processes, str(config), f"name=on-{processes}"))
    assert code == 0, output
    return folder / "runs" / f"on-{processes}"
