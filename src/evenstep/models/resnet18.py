"""ResNet-18 for small images."""

from __future__ import annotations

from evenstep.sections import Section

import torchvision
from torch import nn


class Config(Section):
    name: str
    """The file in `evenstep/models/`."""


def build(config: Config, *, num_classes: int, channels: int, image_size: int) -> nn.Module:
    return for_small_images(torchvision.models.resnet18(num_classes=num_classes), channels)


def for_small_images(resnet: nn.Module, channels: int) -> nn.Module:
    """Replaces the stem, which keeps a quarter of an image's side, by a 3x3 convolution that keeps
    all of it (He et al., "Deep Residual Learning", 2015, section 4.2); any number of channels."""
    conv = nn.Conv2d(channels, 64, kernel_size=3, padding=1, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    resnet.conv1, resnet.maxpool = conv, nn.Identity()
    return resnet
