"""A teacher of image classification: `final/` of a run, or an image model of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from evenstep.distillation import Teacher, frozen, is_of_transformers
from evenstep.image_models import Inputs, read_final
from evenstep.models._transformers import TransformersConfig, pretrained, read_config

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class ImageTeacher(Teacher):
    """Raises ValueError also for one that sees images of other channels."""

    inputs: Inputs
    """What the student sees."""

    def __post_init__(self) -> None:
        _, seen = _read(self.config.name, self.config.revision)
        if seen.channels != self.inputs.channels:
            raise ValueError(
                f"the teacher {self.config.name} sees images of {seen.channels} channel(s): set "
                f"task.channels={seen.channels}"
            )
        super().__post_init__()

    def read(self) -> tuple[nn.Module, Sequence[str]]:
        network, seen = _read(self.config.name, self.config.revision)
        return network, seen.classes

    def output(self, network: nn.Module, inputs: Tensor) -> Any:
        """Of the images (B, C, H, W) that the student sees, resized and normalised as the teacher
        knows them."""
        _, seen = _read(self.config.name, self.config.revision)
        return network(_as_seen(inputs, self.inputs, seen))


def _as_seen(images: Tensor, given: Inputs, wanted: Inputs) -> Tensor:
    if wanted.image_size != given.image_size:
        size = (wanted.image_size, wanted.image_size)
        images = F.interpolate(images, size, mode="bilinear", antialias=True)
    mean, std, new_mean, new_std = (
        images.new_tensor(values).view(-1, 1, 1)
        for values in (given.mean, given.std, wanted.mean, wanted.std)
    )
    return (images * std + (mean - new_mean)) / new_std


@lru_cache(maxsize=1)  # one teacher a run; checked, then used at each step
def _read(name: str, revision: str | None) -> tuple[nn.Module, Inputs]:
    folder = Path(name).expanduser()
    own = folder.is_dir() and not is_of_transformers(folder)
    network, seen = read_final(folder) if own else _of_transformers(name, revision)
    return frozen(network), seen


def _of_transformers(name: str, revision: str | None) -> tuple[nn.Module, Inputs]:
    from transformers import AutoImageProcessor, AutoModelForImageClassification

    section = TransformersConfig(name=name, revision=revision)
    model_config = read_config(section)
    network = pretrained(section, AutoModelForImageClassification, model_config)
    processor: Any = AutoImageProcessor.from_pretrained(name, revision=revision)
    classes = [model_config.id2label[number] for number in range(model_config.num_labels)]
    size = processor.crop_size if getattr(processor, "do_center_crop", False) else processor.size
    normalizes, channels = processor.do_normalize, len(processor.image_mean or "RGB")
    seen = Inputs(
        classes=classes,
        channels=channels,
        image_size=size["height"] or size["shortest_edge"],
        resizes=processor.do_resize,
        mean=processor.image_mean if normalizes else [0.0] * channels,
        std=processor.image_std if normalizes else [1.0] * channels,
    )
    _check_as_processed(name, processor, seen)
    return network, seen


def _check_as_processed(name: str, processor: Any, seen: Inputs) -> None:
    """By one image of a single colour, which no resizing changes. Raises ValueError for a processor
    that also does what only some do, such as swapping red and blue."""
    colour = torch.tensor([40, 110, 200], dtype=torch.uint8)[: seen.channels].view(-1, 1, 1)
    image = colour.expand(seen.channels, seen.image_size, seen.image_size)
    processed = processor(image, return_tensors="pt")["pixel_values"]
    plain = replace(seen, mean=[0.0] * seen.channels, std=[1.0] * seen.channels)
    ours = _as_seen(image[None] / 255, plain, seen)
    if processed.shape != ours.shape or not torch.allclose(processed, ours, atol=1e-3):
        raise ValueError(
            f"the teacher {name} needs its images otherwise than resized, scaled to 0..1 and "
            f"normalised: {type(processor).__name__} is not supported with its settings"
        )
