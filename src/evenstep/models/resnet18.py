"""ResNet-18 for small images."""

from __future__ import annotations

from functools import partial
from typing import Any

from evenstep.sections import Section

import torchvision
from pydantic import Field
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, Bottleneck
from torchvision.ops import StochasticDepth


class Config(Section):
    name: str
    """The file in `evenstep/models/`."""

    drop_path: float = Field(default=0.0, ge=0, lt=1)
    """Stochastic depth: how often an image skips the last residual block; earlier ones less."""


def build(config: Config, *, num_classes: int, channels: int, image_size: int) -> nn.Module:
    resnet = for_small_images(torchvision.models.resnet18(num_classes=num_classes), channels)
    return with_drop_path(resnet, config.drop_path)


def for_small_images(resnet: nn.Module, channels: int) -> nn.Module:
    """Replaces the stem, which keeps a quarter of an image's side, by a 3x3 convolution that keeps
    all of it (He et al., "Deep Residual Learning", 2015, section 4.2); any number of channels."""
    conv = nn.Conv2d(channels, 64, kernel_size=3, padding=1, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    resnet.conv1, resnet.maxpool = conv, nn.Identity()
    return resnet


def with_drop_path(resnet: nn.Module, rate: float) -> nn.Module:
    """In training, block l of L drops its residual branch for a sample with probability rate * l/L
    (Huang et al., "Deep Networks with Stochastic Depth", 2016, equation 4), and divides the
    branches that it keeps by the rest, so that evaluation needs no factor."""
    blocks = [block for block in resnet.modules() if isinstance(block, BasicBlock | Bottleneck)]
    for number, block in enumerate(blocks if rate else [], 1):
        block.drop_path = StochasticDepth(rate * number / len(blocks), mode="row")
        branch_end = block.bn3 if isinstance(block, Bottleneck) else block.bn2
        # A hook, where a layer between would rename the weights.
        branch_end.register_forward_hook(partial(_drop, block.drop_path))
    return resnet


def _drop(drop_path: nn.Module, layer: nn.Module, inputs: Any, branch: Tensor) -> Tensor:
    dropped: Tensor = drop_path(branch)
    return dropped
