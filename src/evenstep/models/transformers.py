"""Any image classification model of transformers.

`google/vit-base-patch16-224` or a local folder: its weights, with a new head where the number of
classes differs. `vit`, `convnext`, `resnet` or another model type: built from its configuration
class, with fresh weights and without a download.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any

from evenstep.sections import Section

from pydantic import Field
from torch import nn


class Config(Section):
    name: str
    """A hub id, a local folder, or a model type of transformers such as vit."""

    config: dict[str, Any] = Field(default={})
    """Overrides of the model's configuration, for example {hidden_size: 64}."""

    revision: str | None = None
    """Commit, tag or branch of a hub model; a commit makes the run repeatable."""

    trust_remote_code: bool = False
    """Run code that the model's repository brings along. Read it before you do."""


def model_types() -> list[str]:
    """The model types of transformers that classify images."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    )

    return list(MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES)


def build(config: Config, *, num_classes: int, channels: int, image_size: int) -> nn.Module:
    """Raises ValueError for unknown names and configuration keys, and for images that do not fit
    the weights."""
    data = {"num_channels": channels, "image_size": image_size}
    if config.name in model_types():
        return _fresh(config, num_classes, data)
    return _pretrained(config, num_classes, data)


def _fresh(config: Config, num_classes: int, data: dict[str, int]) -> nn.Module:
    from transformers import AutoConfig, AutoModelForImageClassification

    default = AutoConfig.for_model(config.name)
    known = {*default.to_dict(), *default.attribute_map}
    _refuse(config, [key for key in config.config if key not in known], known)
    fitting = {key: value for key, value in data.items() if hasattr(default, key)}
    model_config = AutoConfig.for_model(
        config.name, **{**fitting, **config.config, "num_labels": num_classes}
    )
    model: nn.Module = AutoModelForImageClassification.from_config(model_config)
    return model


def _pretrained(config: Config, num_classes: int, data: dict[str, int]) -> nn.Module:
    import torch
    from transformers import AutoConfig, AutoModelForImageClassification

    source = {"revision": config.revision, "trust_remote_code": config.trust_remote_code}
    try:
        model_config, unknown = AutoConfig.from_pretrained(
            config.name, return_unused_kwargs=True, **source, **config.config
        )
    except OSError as error:
        raise ValueError(f"the model {config.name!r} cannot be read: {error}") from error
    _refuse(config, list(unknown), model_config.to_dict())
    _check_fit(config, model_config, data)
    model_config.num_labels = num_classes
    model: nn.Module = AutoModelForImageClassification.from_pretrained(
        config.name,
        config=model_config,
        ignore_mismatched_sizes=True,  # the new head
        dtype=torch.float32,  # by default the one in which the weights were saved, often bf16
        **source,
    )
    return model


def _refuse(config: Config, unknown: Sequence[str], known: Iterable[str]) -> None:
    if unknown:
        nearest = difflib.get_close_matches(unknown[0], known, n=3)
        raise ValueError(
            f"{config.name} has no configuration key {', '.join(map(repr, unknown))}; "
            f"nearest: {', '.join(nearest) or 'none'}"
        )


def _check_fit(config: Config, model_config: Any, data: dict[str, int]) -> None:
    """ignore_mismatched_sizes would quietly start patch or position embeddings afresh."""
    for key, value in data.items():
        expected = getattr(model_config, key, value)
        if expected not in (value, [value, value], (value, value)):
            task_key = {"num_channels": "channels", "image_size": "image_size"}[key]
            raise ValueError(
                f"{config.name} was trained with {key} {expected}, the data has {value}; set "
                f"task.{task_key}={expected}, or task.model.config.{key}={value} to train the "
                "weights that depend on it afresh"
            )
