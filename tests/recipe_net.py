"""A network of two residual blocks, named in a run config as `task.model.name=recipe_net`."""

from evenstep.models.resnet18 import Config, with_drop_path

from torch import nn
from torchvision.models.resnet import BasicBlock

__all__ = ["Config", "build"]


def build(config: Config, *, num_classes: int, channels: int, image_size: int) -> nn.Module:
    network = nn.Sequential(
        nn.Conv2d(channels, 8, 3, stride=2, padding=1, bias=False),
        BasicBlock(8, 8),
        BasicBlock(8, 8),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, num_classes),
    )
    return with_drop_path(network, config.drop_path)
