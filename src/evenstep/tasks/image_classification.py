"""Image classification: one label an image.

    task:
      name: image_classification
      data: {name: zalando-datasets/fashion_mnist}     a file in datasets/, a hub id or a local path
      model: {name: resnet18}                          a file in models/, timm/<name>, a hub id, vit

A metric is one line in `summarize`; what it needs of each sample is one column in `score`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from evenstep.images import (
    ImageSplits,
    OnError,
    Sample,
    common_size,
    measure,
    uniform,
)
from evenstep.labels import IGNORED
from evenstep.sections import Section
from evenstep.task import Named, Table, Task, find_module

import numpy as np
import PIL.Image
import torch
import torch.nn.functional as F
from pydantic import ConfigDict, Field, model_validator
from torch import Tensor, nn
from torchvision.transforms import v2
from typing_extensions import Self, TypedDict  # pydantic needs these before Python 3.12

Batch = Mapping[str, Tensor]  # "image": (B, C, H, W) normalised, "label": (B,) int64


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

    augment: list[Literal["crop", "flip", "trivial_augment"]] = Field(default=[])
    """Random changes of training images, in this order."""

    crop_padding: int = Field(default=4, ge=0)
    """Pixels of black around the image before "crop" cuts out the original size."""

    normalize: Literal["measured"] | Normalization = "measured"
    """measured: by mean and deviation of the training images; or {mean: [...], std: [...]}."""

    on_error: OnError = "stop"
    """At an image that cannot be read: stop, or skip it with a warning. Skipped images count in no
    loss and no metric; summarize reports how many there were."""

    @model_validator(mode="after")
    def _one_number_a_channel(self) -> Self:
        given = self.normalize
        if given != "measured" and not len(given["mean"]) == len(given["std"]) == self.channels:
            raise ValueError(
                f"normalize needs {self.channels} number(s) for mean and for std: one a channel"
            )
        return self


@dataclass(frozen=True)
class Inputs:
    """What the network sees, and what its outputs stand for."""

    classes: list[str]
    channels: int
    image_size: int
    resizes: bool
    mean: list[float]
    std: list[float]


def build(config: Config) -> Task:
    """Raises ValueError for data that cannot be trained on."""
    splits: ImageSplits = find_module("datasets", config.data.name).build(config.data)
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
    return Task(
        model=partial(build_model, config.model, inputs),
        train_dataset=train,
        eval_dataset=held_out[0] if held_out else None,
        collate=partial(collate, inputs),
        count=count,
        loss=loss,
        score=score,
        summarize=partial(summarize, len(inputs.classes)),
        best_metric="accuracy",
        augment=augmentation(config, size) if config.augment else None,
        export=partial(export, config.model, inputs),
        data_identity={
            **splits.identity,
            "train_samples": len(train),
            "eval_samples": sum(map(len, held_out)),
            "classes": len(inputs.classes),
        },
    )


def build_model(model_section: Any, inputs: Inputs) -> nn.Module:
    model: nn.Module = find_module("models", model_section.name).build(
        model_section,
        num_classes=len(inputs.classes),
        channels=inputs.channels,
        image_size=inputs.image_size,
    )
    model_config: Any = getattr(model, "config", None)
    if hasattr(model_config, "id2label"):  # a transformers model
        model_config.id2label = dict(enumerate(inputs.classes))
        model_config.label2id = {name: number for number, name in enumerate(inputs.classes)}
    return model


def augmentation(config: Config, size: int) -> Callable[[Sample], Sample]:
    transforms: dict[str, Callable[[], nn.Module]] = {
        "crop": lambda: v2.RandomCrop(size, padding=config.crop_padding),
        "flip": v2.RandomHorizontalFlip,
        "trivial_augment": v2.TrivialAugmentWide,
    }
    return partial(_augment, v2.Compose([transforms[name]() for name in config.augment]))


def _augment(transform: v2.Transform, sample: Sample) -> Sample:
    image, label = sample
    return transform(image), label


def collate(inputs: Inputs, samples: Sequence[Sample]) -> Batch:
    images, labels = zip(*samples, strict=True)
    mean, std = (255 * torch.tensor(v).view(-1, 1, 1) for v in (inputs.mean, inputs.std))
    normalised = torch.stack(images).float().sub_(mean).div_(std)
    return {"image": normalised, "label": torch.tensor(labels)}


def count(batch: Batch) -> int:
    return int((batch["label"] != IGNORED).sum())


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """Summed cross entropy."""
    logits = _logits(model, batch["image"])
    return F.cross_entropy(logits, batch["label"], ignore_index=IGNORED, reduction="sum")


def score(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    labels = batch["label"]
    logits = _logits(model, batch["image"])
    probability, prediction = logits.softmax(1).max(1)
    best5 = logits.topk(min(5, logits.shape[1])).indices
    return {
        "label": labels,
        "prediction": prediction,
        "probability": probability,
        "loss": F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="none"),
        "top5": (best5 == labels[:, None]).any(1),
    }


def _logits(model: nn.Module, images: Tensor) -> Tensor:
    """(B, classes), in float32 or wider, so that no loss is summed in 16 bits."""
    output = model(images)
    logits: Tensor = getattr(output, "logits", output)
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


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


def export(model_section: Any, inputs: Inputs, model: nn.Module, folder: Path) -> None:
    """What it takes to use the weights again: for a transformers model all that `from_pretrained`
    and `AutoImageProcessor` read, its weights included; for others config.json."""
    if hasattr(model, "save_pretrained"):
        model.save_pretrained(folder)  # type: ignore[operator]
        _image_processor(inputs).save_pretrained(folder)
        return
    description = {"model": model_section.model_dump(), **asdict(inputs)}
    description["id2label"] = dict(enumerate(description.pop("classes")))
    (folder / "config.json").write_text(json.dumps(description, indent=2) + "\n")


def _image_processor(inputs: Inputs) -> Any:
    """The processor of transformers that prepares an image as `images` and `collate` do."""
    from transformers import BitImageProcessor

    return BitImageProcessor(
        do_resize=inputs.resizes,
        size={"shortest_edge": inputs.image_size},
        resample=PIL.Image.Resampling.BILINEAR,
        do_center_crop=inputs.resizes,
        crop_size={"height": inputs.image_size, "width": inputs.image_size},
        do_normalize=True,
        image_mean=inputs.mean,
        image_std=inputs.std,
        do_convert_rgb=inputs.channels == 3,
    )
