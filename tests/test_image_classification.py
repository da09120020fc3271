"""The image classification task: batches, loss, metrics, augmentation, export."""

import json
import pickle
import warnings

from evenstep.labels import IGNORED
from evenstep.task import find_module

import numpy as np
import PIL.Image
import pytest
import torch
import torch.nn.functional as F
from image_files import batch, folder, picture, png, ramp16, table, task
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from torch import nn

pytestmark = pytest.mark.xdist_group("image_classification")  # one process makes its fixture

TINY_VIT = {
    "name": "vit",
    "config": {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "patch_size": 4,
    },
}


@pytest.fixture(scope="module")
def digits():
    return task("digits", channels=1)


class Fixed(nn.Module):
    """Gives the logits it was made with."""

    def __init__(self, logits):
        super().__init__()
        self.logits = nn.Parameter(logits)

    def forward(self, image):
        return self.logits


def labelled(labels):
    return {"image": torch.zeros(len(labels), 1, 2, 2), "label": torch.tensor(labels)}


# Batches


@pytest.mark.parametrize("channels", [1, 3])
def test_images_of_all_modes_make_one_batch(tmp_path, channels):
    images = {mode: picture(mode=mode, size=(9, 7)) for mode in ["L", "LA", "P", "RGBA", "1"]}
    images |= {"RGB": picture(size=(7, 9)), "I16": ramp16(16)}
    for number, (mode, image) in enumerate(images.items()):
        class_folder = tmp_path / "data" / "ab"[number % 2]
        class_folder.mkdir(parents=True, exist_ok=True)
        image.save(class_folder / f"{mode}.png")
    picture(mode="CMYK").save(tmp_path / "data/a/cmyk.jpg")
    data = {"name": str(tmp_path / "data"), "eval_split": "none"}
    everything = batch(task(data, channels=channels, image_size=8))
    assert everything["image"].shape == (8, channels, 8, 8)
    assert everything["image"].dtype == torch.float32
    assert everything["label"].dtype == torch.int64


def test_measured_normalisation_gives_zero_mean_and_unit_deviation(digits):
    image = batch(digits)["image"].double()
    assert image.mean().item() == pytest.approx(0, abs=1e-6)
    assert image.std(correction=0).item() == pytest.approx(1, abs=1e-6)


def test_given_normalisation_is_used():
    given = task("digits", channels=1, normalize={"mean": [0.5], "std": [0.25]})
    image, _ = given.train_dataset[3]
    expected = (image.double() / 255 - 0.5) / 0.25
    torch.testing.assert_close(batch(given, [3])["image"][0].double(), expected)


@pytest.mark.parametrize(
    "normalize",
    [
        {"mean": [0.5], "std": [0.5]},
        {"mean": [0.5] * 3, "std": [0.5, 0, 0.5]},
        {"mean": [0.5] * 3},
        {"mean": [0.5] * 3, "std": [0.5] * 3, "max": 1},
        "imagenet",
    ],
)
def test_normalisation_that_does_not_fit_is_refused(normalize):
    with pytest.raises(ValidationError, match="normalize"):
        task("digits", normalize=normalize)


def test_sizes_that_differ_are_an_error_at_the_start(tmp_path):
    table(tmp_path / "train.parquet", ["a", "b"] * 2, [png(), png(size=(9, 9)), png(), png()])
    with pytest.raises(ValueError, match=r"8x8 and 9x9.*task.image_size"):
        task(tmp_path)
    assert batch(task(tmp_path, image_size=6))["image"].shape[1:] == (3, 6, 6)


def test_a_task_can_be_sent_to_a_worker_process_however_it_is_started(digits):
    sent = pickle.loads(pickle.dumps(digits))
    assert torch.equal(batch(sent, [1, 2])["image"], batch(digits, [1, 2])["image"])


def test_many_at_once_and_one_by_one_give_the_same_batch(digits):
    indices = [5, 0, 1437, 5]
    many = digits.collate(digits.train_dataset.__getitems__(indices))
    one_by_one = batch(digits, indices)
    assert torch.equal(many["image"], one_by_one["image"])
    assert torch.equal(many["label"], one_by_one["label"])


# Loss and skipped images


def test_the_loss_is_the_sum_over_the_samples():
    logits = torch.randn(5, 4, dtype=torch.float64)
    labels = [0, 3, 1, 1, 2]
    any_task = task("digits", channels=1)
    expected = sum(logits[i].logsumexp(0) - logits[i, label] for i, label in enumerate(labels))
    assert any_task.loss(Fixed(logits), labelled(labels)).item() == pytest.approx(expected.item())
    assert any_task.count(labelled(labels)) == 5


@pytest.mark.parametrize(
    ("given", "computed"),
    [
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
    ],
)
def test_the_loss_is_computed_in_float32_or_wider_also_under_autocast(digits, given, computed):
    model = Fixed(torch.randn(2, 10, dtype=given))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert digits.loss(model, labelled([1, 2])).dtype == computed
        assert digits.score(model, labelled([1, 2]))["loss"].dtype == computed


def test_skipped_images_keep_their_place_and_count_nowhere(tmp_path):
    images = [png(row) for row in range(6)]
    images[2] = b"broken"
    for split in ("train", "test"):
        table(tmp_path / f"{split}.parquet", ["a", "b"] * 3, images)
    with pytest.raises(ValueError, match=r"row 2 of split 'train'.*on_error=skip"):
        task(tmp_path)
    skipping = task(tmp_path, on_error="skip")
    everything = batch(skipping)
    assert everything["label"].tolist() == [0, 1, IGNORED, 1, 0, 1]
    assert skipping.count(everything) == 5

    logits = torch.randn(6, 2)
    kept = [0, 1, 3, 4, 5]
    expected = F.cross_entropy(logits[kept], everything["label"][kept], reduction="sum")
    torch.testing.assert_close(skipping.loss(Fixed(logits), everything), expected)

    logits[:, 0] = 9.0  # predicts class 0 everywhere, right for two of the five that are left
    rows = skipping.score(Fixed(logits), batch(skipping, split="eval_dataset"))
    summary = skipping.summarize({name: column.detach().numpy() for name, column in rows.items()})
    assert summary["accuracy"] == 0.4
    assert summary["skipped"] == 1
    assert np.sum(summary["confusion_matrix"]) == 5


# Metrics


def rows(labels, predictions, losses=None, top5=None):
    losses = [0.0] * len(labels) if losses is None else losses
    top5 = [True] * len(labels) if top5 is None else top5
    columns = {"label": labels, "prediction": predictions, "loss": losses, "top5": top5}
    return {name: np.array(values) for name, values in columns.items()}


def test_metrics_equal_hand_computed_values(tmp_path):
    names = list("abcdefg")
    table(tmp_path / "train.parquet", names * 2)
    seven = task(tmp_path)
    summary = seven.summarize(
        rows([0, 0, 0, 1, 2], [0, 0, 1, 1, 0], [0, 1, 2, 3, 4.5], [True, True, True, True, False])
    )
    # Class 0: precision 2/3, recall 2/3. Class 1: precision 1/2, recall 1. Class 2: never right.
    assert summary["accuracy"] == pytest.approx(3 / 5)
    assert summary["loss"] == pytest.approx(10.5 / 5)
    assert summary["macro_f1"] == pytest.approx((2 / 3 + 2 / 3 + 0) / 3)
    assert summary["balanced_accuracy"] == pytest.approx((2 / 3 + 1 + 0) / 3)
    assert summary["top5_accuracy"] == pytest.approx(4 / 5)
    assert np.array(summary["confusion_matrix"])[:3, :3].tolist() == [
        [2, 1, 0],
        [0, 1, 0],
        [1, 0, 0],
    ]
    assert np.shape(summary["confusion_matrix"]) == (7, 7)
    assert "skipped" not in summary


def test_the_mean_loss_is_that_over_all_rows(digits):
    summary = digits.summarize(rows([0] * 9, [0] * 9, np.arange(9, dtype=np.float32)))
    assert summary["loss"] == 4.0


@pytest.mark.parametrize(("label", "prediction"), [(3, 3), (3, 4)])
def test_one_row_and_absent_classes_need_no_warning(digits, label, prediction):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        summary = digits.summarize(rows([label], [prediction]))
    assert summary["accuracy"] == float(label == prediction)
    assert summary["balanced_accuracy"] == float(label == prediction)


def test_all_rows_skipped_is_an_error(digits):
    with pytest.raises(ValueError, match="skipped"):
        digits.summarize(rows([IGNORED], [3]))


def test_top5_is_reported_only_where_it_says_something(tmp_path):
    table(tmp_path / "train.parquet", list("abcde") * 2)
    five = task(tmp_path)
    scored = five.score(Fixed(torch.randn(3, 5)), labelled([0, 1, 2]))
    assert scored["top5"].tolist() == [True] * 3
    assert "top5_accuracy" not in five.summarize(rows([0], [0]))


def test_scored_columns_equal_hand_computed_values(digits):
    logits = torch.zeros(2, 10)
    logits[:, 4:] = torch.tensor([1.0, 2, 3, 4, 5, 6])  # the best five are classes 5 to 9
    scored = digits.score(Fixed(logits), labelled([9, 4]))
    exponentials = logits[0].exp()
    assert scored["prediction"].tolist() == [9, 9]
    assert scored["top5"].tolist() == [True, False]
    probability = (exponentials[9] / exponentials.sum()).item()
    assert scored["probability"].tolist() == pytest.approx([probability] * 2)
    assert scored["loss"][0].item() == pytest.approx(-np.log(probability))


# Augmentation


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("augment", [["crop"], ["flip"], ["trivial_augment"], ["crop", "flip"]])
def test_augmentation_is_a_pure_function_of_the_seed(augment, channels):
    augmented = task("digits", channels=channels, image_size=12, augment=augment, crop_padding=2)
    sample = augmented.train_dataset[0]
    before = sample[0].clone()

    def draw(seed):
        torch.manual_seed(seed)
        image, label = augmented.augment(sample)
        assert (image.shape, image.dtype, label) == (before.shape, torch.uint8, sample[1])
        return image

    drawn = [draw(seed) for seed in range(30)]
    np.random.seed(0)
    assert all(torch.equal(image, draw(seed)) for seed, image in enumerate(drawn))
    assert len({image.numpy().tobytes() for image in drawn}) > 1
    assert torch.equal(sample[0], before)


def test_no_augmentation_leaves_the_loader_its_fast_path(digits):
    assert digits.augment is None


# What stays


def test_the_data_is_identified(digits, tmp_path):
    assert digits.data_identity["train_samples"] == 1438
    assert digits.data_identity["eval_samples"] == 359
    assert digits.data_identity["classes"] == 10
    assert json.dumps(digits.data_identity)
    table(tmp_path / "train.parquet", ["a", "b"])
    local = task({"name": str(tmp_path), "eval_split": "none"})
    assert local.eval_dataset is None
    assert local.data_identity["eval_samples"] == 0
    assert str(tmp_path) not in json.dumps(local.data_identity)


def test_a_transformers_model_is_exported_with_its_label_names_and_preprocessing(tmp_path):
    from transformers import AutoImageProcessor, AutoModelForImageClassification

    root = folder(tmp_path / "data", *(f"{name}/{i}.png" for name in ("ant", "bee") for i in "012"))
    wide = PIL.Image.fromarray(np.random.default_rng(0).integers(0, 256, (20, 30, 3), np.uint8))
    wide.save(root / "ant/0.png")
    vit = task({"name": str(root), "eval_split": "none"}, TINY_VIT, image_size=12)
    model = vit.model().eval()
    (tmp_path / "final").mkdir()
    vit.export(model, tmp_path / "final")

    again = AutoModelForImageClassification.from_pretrained(tmp_path / "final")
    assert again.config.id2label == {0: "ant", 1: "bee"}
    assert again.config.label2id == {"ant": 0, "bee": 1}
    processor = AutoImageProcessor.from_pretrained(tmp_path / "final")
    pixels = processor(wide, return_tensors="pt")["pixel_values"]
    ours = batch(vit, [0])["image"]
    torch.testing.assert_close(pixels, ours, rtol=0, atol=0.02)
    torch.testing.assert_close(again(ours).logits, model(ours).logits)


def test_other_models_are_exported_with_all_it_takes_to_build_them_again(tmp_path):
    grey = task("digits", channels=1, normalize={"mean": [0.25], "std": [0.5]})
    model = grey.model().eval()
    grey.export(model, tmp_path)
    save_file(model.state_dict(), tmp_path / "model.safetensors")

    config = json.loads((tmp_path / "config.json").read_text())
    assert config["id2label"] == {str(number): str(number) for number in range(10)}
    assert (config["mean"], config["std"], config["image_size"]) == ([0.25], [0.5], 8)
    module = find_module("models", config["model"]["name"])
    again = module.build(
        module.Config(**config["model"]),
        num_classes=len(config["id2label"]),
        channels=config["channels"],
        image_size=config["image_size"],
    ).eval()
    again.load_state_dict(load_file(tmp_path / "model.safetensors"))
    images = batch(grey, range(4))["image"]
    assert torch.equal(again(images), model(images))


def test_models_with_an_output_object_are_trained_and_scored(tmp_path):
    vit = task({"name": "digits"}, TINY_VIT, channels=1)
    model, four = vit.model(), batch(vit, range(4))
    vit.loss(model, four).backward()
    assert all(p.grad is not None for p in model.parameters())
    assert vit.score(model, four)["prediction"].shape == (4,)


def test_rows_of_text_are_no_images(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(ValueError, match="has rows of text, and no images"):
        task({"name": "streaming", "sources": [{"name": str(tmp_path / "train.jsonl")}]})
