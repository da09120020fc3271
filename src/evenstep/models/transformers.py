"""Any image classification model of transformers.

`google/vit-base-patch16-224` or a local folder: its weights, with a new head where the number of
classes differs. `vit`, `convnext`, `resnet` or another model type: built from its configuration
class, with fresh weights and without a download.
"""

from __future__ import annotations

from typing import Any

from evenstep.models import _transformers

from torch import nn


class Config(_transformers.TransformersConfig):
    name: str
    """A hub id, a local folder, or a model type of transformers such as vit."""


def model_types() -> list[str]:
    """The model types of transformers that classify images."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    )

    return list(MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES)


def build(config: Config, *, num_classes: int, channels: int, image_size: int) -> nn.Module:
    """Raises ValueError for unknown names and configuration keys, and for images that do not fit
    the weights."""
    from transformers import AutoModelForImageClassification

    data = {"num_channels": channels, "image_size": image_size}
    if config.name in model_types():
        return _transformers.fresh(
            config, AutoModelForImageClassification, usual=data, num_labels=num_classes
        )
    model_config = _transformers.read_config(config)
    _check_fit(config, model_config, data)
    model_config.num_labels = num_classes
    return _transformers.pretrained(config, AutoModelForImageClassification, model_config)


def _check_fit(config: Config, model_config: Any, data: dict[str, int]) -> None:
    """Weights that do not fit start afresh: of patch or position embeddings nobody would notice."""
    for key, value in data.items():
        expected = getattr(model_config, key, value)
        if expected not in (value, [value, value], (value, value)):
            task_key = {"num_channels": "channels", "image_size": "image_size"}[key]
            raise ValueError(
                f"{config.name} was trained with {key} {expected}, the data has {value}; set "
                f"task.{task_key}={expected}, or task.model.config.{key}={value} to train the "
                "weights that depend on it afresh"
            )
