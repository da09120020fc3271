"""Distillation from `final/` of a run, of evenstep's own models and of transformers'."""

import pickle

from evenstep import image_teacher, text_teacher
from evenstep.distillation import TeacherConfig, divergence
from evenstep.labels import IGNORED

import pytest
import torch
import torch.nn.functional as F
from image_files import batch, task
from safetensors.torch import load_file, save_file
from torch import nn

RESNET = {"name": "resnet", "config": {"embedding_size": 8, "hidden_sizes": [8], "depths": [1]}}
GREY = {"channels": 1, "normalize": {"mean": [0.4], "std": [0.3]}}


@pytest.fixture(autouse=True)
def forget_teachers():
    image_teacher._read.cache_clear()
    text_teacher._read.cache_clear()


def finished(folder, model="resnet18", data="digits", **keys):
    """A folder like `final/` of a run, and the trained network in it."""
    teacher = task(data, model, **GREY | keys)
    torch.manual_seed(1)
    network = teacher.model()
    network.train()(torch.rand(8, 1, 8, 8))  # statistics of its own
    teacher.export(network, folder)
    if not list(folder.glob("*.safetensors")):
        save_file(network.state_dict(), folder / "model.safetensors")
    return network.eval()


def student(folder, **keys):
    section = {"name": str(folder), "alpha": 0.3, "temperature": 2.0}
    return task("digits", channels=1, teacher={**section, **keys.pop("teacher", {})}, **keys)


class Fixed(nn.Module):
    """Gives the same logits whatever it sees."""

    def __init__(self, rows, dtype=torch.float64):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.logits = nn.Parameter(torch.randn(rows, 10, dtype=dtype, generator=generator))

    def forward(self, image):
        return self.logits


def expected_loss(network, images, labels, model, class_weights=None, alpha=0.3, t=2.0):
    """Probabilities and logarithms, written out one by one, for the images as the teacher wants."""
    with torch.no_grad():
        output = network.double()(images)
        theirs = (getattr(output, "logits", output) / t).softmax(1)
    ours = (model.logits / t).softmax(1)
    total = torch.zeros((), dtype=torch.float64)
    for row, label in enumerate(labels.tolist()):
        if label != IGNORED:
            weight = 1.0 if class_weights is None else class_weights[label]
            divergence = (theirs[row] * (theirs[row] / ours[row]).log()).sum()
            cross_entropy = -model.logits[row].log_softmax(0)[label]
            total += weight * ((1 - alpha) * cross_entropy + alpha * t * t * divergence)
    return total


@pytest.mark.parametrize("model", ["resnet18", RESNET])
@pytest.mark.parametrize("class_weights", [None, [1.0, 2.0, 0.5, *[1.0] * 7]])
def test_the_loss_is_labels_and_divergence_in_their_shares(tmp_path, model, class_weights):
    """The student normalises in its own way; the teacher sees the images as it was trained."""
    network = finished(tmp_path, model)
    taught = student(tmp_path, class_weights=class_weights)
    given = batch(taught, range(6))
    given = {"image": given["image"].double(), "label": given["label"].clone()}
    given["label"][4] = IGNORED
    pixels = torch.stack([taught.train_dataset[i][0] for i in range(6)]).double() / 255
    fixed = Fixed(6)
    expected = expected_loss(network, (pixels - 0.4) / 0.3, given["label"], fixed, class_weights)
    loss = taught.loss(fixed, given)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)  # pixels were float32

    (gradient,) = torch.autograd.grad(loss, fixed.logits)
    (by_hand,) = torch.autograd.grad(expected, fixed.logits)
    torch.testing.assert_close(gradient, by_hand, rtol=1e-6, atol=1e-6)
    assert gradient[4].count_nonzero() == 0


def test_a_student_that_agrees_with_its_teacher_diverges_by_nothing():
    logits = torch.randn(3, 5)
    torch.testing.assert_close(
        divergence(logits, logits + 7, 4.0), torch.zeros(3), atol=1e-5, rtol=0
    )


def test_the_teacher_is_no_part_of_the_model_and_never_changes(tmp_path):
    finished(tmp_path)
    taught = student(tmp_path)
    model = taught.model().train()
    keys = set(task("digits", channels=1).model().state_dict())
    loss = taught.loss(model, batch(taught, range(8)))
    assert set(model.state_dict()) == keys
    loss.backward()
    network, _ = image_teacher._read(str(tmp_path), None)
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        assert network.state_dict()[name].equal(tensor), name
    assert not any(module.training for module in network.modules())
    assert all(p.grad is None and not p.requires_grad for p in network.parameters())


def test_a_task_takes_no_weights_of_the_teacher_to_a_worker_process(tmp_path):
    finished(tmp_path)
    taught = student(tmp_path)
    untaught = task("digits", channels=1)
    assert len(pickle.dumps(taught)) < len(pickle.dumps(untaught)) + 10_000


def test_autocast_computes_the_divergence_in_float32(tmp_path):
    finished(tmp_path)
    taught = student(tmp_path)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = taught.loss(Fixed(4, torch.bfloat16), batch(taught, range(4)))
    assert loss.dtype == torch.float32
    exact = taught.loss(Fixed(4, torch.bfloat16), batch(taught, range(4)))
    torch.testing.assert_close(loss, exact, rtol=0.02, atol=0)


def test_images_are_resized_for_a_teacher_of_another_size(tmp_path):
    network = finished(tmp_path, image_size=16)
    taught = student(tmp_path, normalize=GREY["normalize"], teacher={"alpha": 1.0})
    given = batch(taught, range(4))
    resized = F.interpolate(given["image"], (16, 16), mode="bilinear", antialias=True)
    fixed = Fixed(4, torch.float32)
    with torch.no_grad():
        expected = divergence(fixed.logits, network(resized), 2.0).sum()
    torch.testing.assert_close(taught.loss(fixed, given), expected)


def test_classes_are_matched_by_name(tmp_path):
    """A teacher of more classes, in another order."""
    import json

    network = finished(tmp_path)
    description = json.loads((tmp_path / "config.json").read_text())
    names = [str((number + 1) % 10) for number in range(10)]
    description["id2label"] = dict(enumerate(names))
    (tmp_path / "config.json").write_text(json.dumps(description))
    taught = student(tmp_path, normalize=GREY["normalize"], teacher={"alpha": 1.0})
    given, fixed = batch(taught, range(4)), Fixed(4, torch.float32)
    with torch.no_grad():  # its first output stands for the class 1
        expected = divergence(fixed.logits, network(given["image"]).roll(1, 1), 2.0).sum()
    torch.testing.assert_close(taught.loss(fixed, given), expected)


def test_another_teacher_is_other_data(tmp_path):
    finished(tmp_path)
    first = student(tmp_path).data_identity
    weights = load_file(tmp_path / "model.safetensors")
    save_file({**weights, "fc.bias": weights["fc.bias"] + 1}, tmp_path / "model.safetensors")
    image_teacher._read.cache_clear()
    assert first["teacher"] != student(tmp_path).data_identity["teacher"]
    assert "teacher" not in task("digits", channels=1).data_identity


def test_teachers_that_do_not_fit_are_refused(tmp_path):
    with pytest.raises(ValueError, match="is not the final/ of an image classification run"):
        student(tmp_path)
    finished(tmp_path)
    with pytest.raises(ValueError, match=r"1 channel\(s\): set task.channels=1"):
        task("digits", channels=3, teacher={"name": str(tmp_path)})
    (tmp_path / "config.json").write_text(
        (tmp_path / "config.json").read_text().replace('"7": "7"', '"7": "seven"')
    )
    image_teacher._read.cache_clear()
    with pytest.raises(ValueError, match=r"does not know the class\(es\) \['7'\]"):
        student(tmp_path)
    with pytest.raises(ValueError, match="cannot be read"):
        student("no/such-model")
    from transformers import BertConfig, BertForSequenceClassification

    BertForSequenceClassification(
        BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    ).save_pretrained(tmp_path)
    image_teacher._read.cache_clear()
    with pytest.raises(ValueError, match=r"is of type bert, .* no ModelForImageClassification"):
        student(tmp_path)


def test_the_final_of_a_run_is_pointed_to(tmp_path):
    (tmp_path / "final").mkdir()
    with pytest.raises(ValueError, match=f"trained network is in {tmp_path}/final"):
        TeacherConfig(name=str(tmp_path))
    for name in ("runs/none/final", "./none", str(tmp_path / "none")):
        with pytest.raises(ValueError, match="no such folder, and it is no hub id"):
            TeacherConfig(name=name)


def test_a_teacher_of_transformers_sees_what_its_own_processor_makes(tmp_path):
    from transformers import (
        EfficientNetImageProcessor,
        MobileViTImageProcessor,
        ViTConfig,
        ViTForImageClassification,
        ViTImageProcessor,
    )

    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    ViTForImageClassification(
        ViTConfig(intermediate_size=8, num_labels=3, **sizes)
    ).save_pretrained(tmp_path)

    def seen(processor):
        processor.save_pretrained(tmp_path)
        image_teacher._read.cache_clear()
        return image_teacher._read(str(tmp_path), None)[1]

    square = {"height": 32, "width": 32}
    plain = seen(ViTImageProcessor(size=square, do_normalize=False))
    assert (plain.image_size, plain.mean, plain.std) == (32, [0.0] * 3, [1.0] * 3)
    uncut = {"crop_size": {"height": 40, "width": 40}, "do_center_crop": False}
    plainly = {"include_top": False, "rescale_offset": False}
    assert seen(EfficientNetImageProcessor(size=square, **uncut, **plainly)).image_size == 32
    for other in (
        EfficientNetImageProcessor(size=square, **uncut, include_top=True),
        MobileViTImageProcessor(size={"shortest_edge": 32}, crop_size=square),
    ):
        with pytest.raises(ValueError, match="ImageProcessor is not supported with its settings"):
            seen(other)
