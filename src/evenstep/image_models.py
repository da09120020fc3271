"""A network that classifies images: built, exported to `final/`, and read back from there."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from evenstep.labels import name_outputs
from evenstep.task import find_module

import PIL.Image
from torch import nn


@dataclass(frozen=True)
class Inputs:
    """What a network sees, and what its outputs stand for."""

    classes: Sequence[str]
    channels: int
    image_size: int
    resizes: bool
    mean: Sequence[float]
    """One number a channel, on the scale of 0 to 1; so is `std`."""
    std: Sequence[float]


def build_model(model_section: Any, inputs: Inputs) -> nn.Module:
    model: nn.Module = find_module("models", model_section.name).build(
        model_section,
        num_classes=len(inputs.classes),
        channels=inputs.channels,
        image_size=inputs.image_size,
    )
    name_outputs(model, inputs.classes)
    return model


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


def read_final(folder: Path) -> tuple[nn.Module, Inputs]:
    """The network that `export` described in a run's `final/`, with its weights, unless it is one
    of transformers. Raises ValueError for a folder that is none."""
    from safetensors.torch import load_model

    try:
        description = json.loads((folder / "config.json").read_text())
        section = description.pop("model")
        classes = list(description.pop("id2label").values())
        inputs = Inputs(classes=classes, **description)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{folder} is not the final/ of an image classification run: {error!r}"
        ) from error
    if "pretrained" in section:  # nothing to download
        section["pretrained"] = False
    model = build_model(find_module("models", section["name"]).Config(**section), inputs)
    load_model(model, folder / "model.safetensors")
    return model, inputs
