"""ResNet-50 for small images."""

from __future__ import annotations

from evenstep.models.resnet18 import Config, for_small_images, with_drop_path

import torchvision
from torch import nn

__all__ = ["Config", "build"]


def build(config: Config, *, num_classes: int, channels: int, image_size: int) -> nn.Module:
    resnet = for_small_images(torchvision.models.resnet50(num_classes=num_classes), channels)
    return with_drop_path(resnet, config.drop_path)
