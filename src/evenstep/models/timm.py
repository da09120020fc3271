"""Any model of timm, as `timm/<name>`, for example `timm/convnext_atto`."""

from __future__ import annotations

import difflib
from typing import Any

from evenstep.sections import Section

from pydantic import Field
from torch import nn


class Config(Section):
    name: str
    """timm/<name of the model in timm>."""

    pretrained: bool = False
    """Start from the weights that timm downloads for this name."""

    options: dict[str, Any] = Field(default={})
    """Further arguments of timm.create_model, for example {drop_path_rate: 0.1}."""


def build(config: Config, *, num_classes: int, channels: int, image_size: int) -> nn.Module:
    """Raises ValueError if timm is missing, or does not know the name or one of the options."""
    try:
        import timm
    except ModuleNotFoundError as error:
        raise ValueError(f"the model {config.name!r} needs timm: pip install timm") from error

    name = config.name.removeprefix("timm/")
    if not timm.is_model(name):
        nearest = difflib.get_close_matches(name, timm.list_models(), n=3)
        raise ValueError(f"timm has no model {name!r}; nearest: {', '.join(nearest) or 'none'}")
    options = {"num_classes": num_classes, "in_chans": channels, **config.options}
    pretrained_config = timm.get_pretrained_cfg(name)
    if pretrained_config and pretrained_config.fixed_input_size:
        options.setdefault("img_size", image_size)
    try:
        model: nn.Module = timm.create_model(name, pretrained=config.pretrained, **options)
    except TypeError as error:
        raise ValueError(f"{config.name} with options {config.options}: {error}") from error
    return model
