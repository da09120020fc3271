"""Image classification: one label an image.

    task:
      name: image_classification
      data: {name: zalando-datasets/fashion_mnist}     a file in datasets/, a hub id or a local path
      model: {name: resnet18}                          a file in models/, timm/<name>, a hub id, vit

A metric is one line in `summarize`; what it needs of each sample is one column in `score`.

Stochastic depth is the model's: {name: resnet18, drop_path: 0.1}, {name: timm/convnext_atto,
options: {drop_path_rate: 0.1}}, {name: convnext, config: {drop_path_rate: 0.1}}.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal

from evenstep.augmentation import AugmentName, augmentation
from evenstep.classification import (
    class_weights_of,
    logits_of,
    num_targets,
    summed_cross_entropy,
)
from evenstep.distillation import Teacher, TeacherConfig, taught
from evenstep.image_models import Inputs, build_model, export
from evenstep.image_teacher import ImageTeacher
from evenstep.images import (
    ImageSplits,
    OnError,
    Sample,
    class_numbers,
    common_size,
    measure,
    uniform,
)
from evenstep.labels import IGNORED
from evenstep.mixing import mixing
from evenstep.orders import balanced
from evenstep.sections import Section
from evenstep.task import Named, Table, Task, find_module
from evenstep.texts import TextSplits

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import ConfigDict, Field, ValidationInfo, field_validator, model_validator
from torch import Tensor, nn
from typing_extensions import Self, TypedDict  # pydantic needs these before Python 3.12

# "image": (B, C, H, W) normalised; "label": (B,) int64, or (B, classes) where images are mixed
Batch = Mapping[str, Tensor]
Weight = Annotated[float, Field(ge=0)]


class Normalization(TypedDict):
    """One number a channel, on the scale of 0 to 1."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]
    mean: list[float]
    std: list[Annotated[float, Field(gt=0)]]


class Config(Section):
    name: str = "image_classification"
    """Picks the task."""

    data: Annotated[Any, Named("datasets")]
    """The images and their labels."""

    model: Annotated[Any, Named("models")]
    """The network."""

    image_size: int | None = Field(default=None, ge=1)
    """Side in pixels to which images are resized (shorter side, then the centre is cropped);
    null leaves them as they are, which needs square images of one size."""

    channels: Literal[1, 3] = 3
    """1: grey, 3: colour. Images are converted."""

    augment: list[AugmentName] = Field(default=[])
    """Random changes of training images, in this order."""

    crop_padding: int = Field(default=4, ge=0)
    """Pixels of black around the image before "crop" cuts out the original size."""

    rand_augment_magnitude: int = Field(default=9, ge=0, le=30)
    """Strength of the changes of "rand_augment", of which each image gets two."""

    erasing_probability: float = Field(default=0.5, ge=0, le=1)
    """How often "random_erasing" paints a rectangle of the image with the mean colour."""

    mixup: float | None = Field(default=None, gt=0)
    """Mix the images of a micro-batch in pairs, and their labels, in shares drawn from
    Beta(mixup, mixup), for example 0.2; null for none."""

    cutmix: float | None = Field(default=None, gt=0)
    """Replace a rectangle of each image by that of another one, its area drawn from
    Beta(cutmix, cutmix), for example 1.0; with mixup, each micro-batch gets one of the two."""

    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    """Part of each label that is spread over all classes, in training."""

    class_weights: Literal["balanced"] | list[Weight] | None = None
    """Weights of the classes in the training loss: one number a class; balanced: the rarer a class,
    the more a sample weighs, so that all have the same share; null: 1. An image that is skipped
    counts as what it is labelled; so it does for balanced_sampling."""

    balanced_sampling: bool = False
    """Train on every class equally often: rare samples are repeated, frequent ones wait for a later
    epoch."""

    teacher: TeacherConfig | None = None
    """A trained network whose outputs are learned as well (distillation); null for none."""

    flip_in_evaluation: bool = False
    """Evaluate the mean of the logits of each image and of its mirror image."""

    normalize: Literal["measured"] | Normalization = "measured"
    """measured: by mean and deviation of the training images; or {mean: [...], std: [...]}."""

    on_error: OnError = "stop"
    """At an image that cannot be read: stop, or skip it with a warning. Skipped images count in no
    loss and no metric; summarize reports how many there were."""

    @field_validator("balanced_sampling")
    @classmethod
    def _balanced_once(cls, balanced_sampling: bool, info: ValidationInfo) -> bool:
        if balanced_sampling and info.data.get("class_weights") == "balanced":
            raise ValueError(
                "class_weights=balanced makes up for rare classes already: drop one of the two"
            )
        return balanced_sampling

    @model_validator(mode="after")
    def _one_number_a_channel(self) -> Self:
        given = self.normalize
        if given != "measured" and not len(given["mean"]) == len(given["std"]) == self.channels:
            raise ValueError(
                f"normalize needs {self.channels} number(s) for mean and for std: one a channel"
            )
        return self


def build(config: Config) -> Task:
    """Raises ValueError for data that cannot be trained on."""
    data = find_module("datasets", config.data.name)
    splits: ImageSplits | TextSplits = data.build(config.data)
    if isinstance(splits, TextSplits):
        raise ValueError(f"task.data.name={config.data.name} has rows of text, and no images")
    sources = [source for source in (splits.train, splits.eval) if source is not None]
    size, resizes = config.image_size or common_size(*sources), config.image_size is not None
    train, *held_out = (
        uniform(
            source,
            channels=config.channels,
            size=size,
            resizes=resizes,
            on_error=config.on_error,
        )
        for source in sources
    )
    given = config.normalize
    mean, std = measure(train) if given == "measured" else (given["mean"], given["std"])
    inputs = Inputs(list(splits.classes), config.channels, size, resizes, mean, std)
    num_classes = len(inputs.classes)
    needs_labels = config.class_weights == "balanced" or config.balanced_sampling
    labels = class_numbers(train) if needs_labels else []
    weights = class_weights_of(config.class_weights, labels, num_classes)
    teacher = ImageTeacher(config.teacher, inputs.classes, inputs) if config.teacher else None
    return Task(
        model=partial(build_model, config.model, inputs),
        train_dataset=train,
        eval_dataset=held_out[0] if held_out else None,
        collate=partial(collate, inputs),
        count=partial(count, weights),
        loss=partial(loss, config.label_smoothing, weights, teacher),
        score=partial(score, config.flip_in_evaluation),
        summarize=partial(summarize, num_classes),
        best_metric="accuracy",
        augment=augmentation(
            config.augment,
            image_size=size,
            mean=mean,
            crop_padding=config.crop_padding,
            rand_augment_magnitude=config.rand_augment_magnitude,
            erasing_probability=config.erasing_probability,
        ),
        mix=mixing(num_classes, mixup=config.mixup, cutmix=config.cutmix),
        order=partial(balanced, labels) if config.balanced_sampling else None,
        export=partial(export, config.model, inputs),
        data_identity={
            **splits.identity,
            "train_samples": len(train),
            "eval_samples": sum(map(len, held_out)),
            "classes": num_classes,
            **({"teacher": teacher.fingerprint()} if teacher else {}),
        },
    )


def collate(inputs: Inputs, samples: Sequence[Sample]) -> Batch:
    images, labels = zip(*samples, strict=True)
    classes = range(len(inputs.classes))
    if wrong := [label for label in labels if label not in classes and label != IGNORED]:
        raise ValueError(f"label {wrong[0]} is none of the classes, 0 to {len(classes) - 1}")
    mean, std = (255 * torch.tensor(v).view(-1, 1, 1) for v in (inputs.mean, inputs.std))
    normalised = torch.stack(images).float().sub_(mean).div_(std)
    return {"image": normalised, "label": torch.tensor(labels)}


def count(class_weights: Tensor | None, batch: Batch) -> float:
    return num_targets(batch["label"], class_weights)


def loss(
    label_smoothing: float,
    class_weights: Tensor | None,
    teacher: Teacher | None,
    model: nn.Module,
    batch: Batch,
) -> Tensor:
    """Summed cross entropy; with a teacher, its share of alpha is the summed divergence from it."""
    images, labels = batch["image"], batch["label"]
    logits = logits_of(model(images))
    if class_weights is not None:
        class_weights = class_weights.to(logits, non_blocking=True)
    supervised = summed_cross_entropy(
        logits, labels, label_smoothing=label_smoothing, class_weights=class_weights
    )
    return taught(teacher, supervised, images, logits, labels, class_weights)


def score(flip: bool, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """The loss is the plain cross entropy, without smoothing, weights and teacher."""
    images, labels = batch["image"], batch["label"]
    logits = logits_of(model(images))
    if flip:
        logits = (logits + logits_of(model(images.flip(-1)))) / 2
    probability, prediction = logits.softmax(1).max(1)
    best5 = logits.topk(min(5, logits.shape[1])).indices
    return {
        "label": labels,
        "prediction": prediction,
        "probability": probability,
        "loss": F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="none"),
        "top5": (best5 == labels[:, None]).any(1),
    }


def summarize(num_classes: int, table: Table) -> dict[str, Any]:
    """Metrics of the evaluation table. F1 is averaged over the classes that occur as a label or a
    prediction, recall (balanced accuracy) over those that occur as a label."""
    from sklearn import metrics

    counted = table["label"] != IGNORED
    if not counted.any():
        raise ValueError("every image of the evaluation split was skipped; nothing to evaluate")
    label, prediction, losses, top5 = (
        table[name][counted] for name in ("label", "prediction", "loss", "top5")
    )
    average: dict[str, Any] = {"average": "macro", "zero_division": 0.0}
    summary: dict[str, Any] = {
        "accuracy": float(np.mean(label == prediction)),
        "loss": float(np.mean(losses, dtype=np.float64)),
        "macro_f1": float(metrics.f1_score(label, prediction, **average)),
        "balanced_accuracy": float(
            metrics.recall_score(label, prediction, labels=np.unique(label), **average)
        ),
    }
    if num_classes > 5:
        summary["top5_accuracy"] = float(np.mean(top5))
    if num_classes <= 100:
        matrix = metrics.confusion_matrix(label, prediction, labels=range(num_classes))
        summary["confusion_matrix"] = matrix.tolist()  # a row a label, a column a prediction
    if skipped := int((~counted).sum()):
        summary["skipped"] = skipped
    return summary
