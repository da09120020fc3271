"""A small convolutional network that learns small images in few epochs, on a CPU too.

After airbench (Jordan, "94% on CIFAR-10 in 3.29 Seconds on a Single GPU", 2024) and the networks of
Page and Balsam before it: a fixed whitening layer, then blocks that halve the side of the image.
"""

from __future__ import annotations

from evenstep.sections import Section

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

LOGIT_SCALE = 1 / 9  # as in airbench: logits start small, so that the first steps can be large


class Config(Section):
    name: str = "fast_cnn"
    """The file in `evenstep/models/`."""

    widths: list[int] = Field(default=[64, 256, 256], min_length=1)
    """Channels of each block. A block halves the side of the image."""


class Conv(nn.Module):
    """3x3 filters as the rows of a matrix, which Muon can step. They pass their input on at first,
    as far as it has channels (as in airbench)."""

    def __init__(self, width_in: int, width: int) -> None:
        super().__init__()
        filters = nn.Conv2d(width_in, width, 3).weight.detach()
        nn.init.dirac_(filters[:width_in])
        self.weight = nn.Parameter(filters.flatten(1))

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight.view(len(self.weight), -1, 3, 3), padding=1)


class Block(nn.Module):
    def __init__(self, width_in: int, width: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = Conv(width_in, width), _norm(width)
        self.conv2, self.norm2 = Conv(width, width), _norm(width)

    def forward(self, x: Tensor) -> Tensor:
        # Pooled before the norm and GELU, which then see a quarter of the values.
        x = F.gelu(self.norm1(F.max_pool2d(self.conv1(x), 2)))
        return F.gelu(self.norm2(self.conv2(x)))


class FastCNN(nn.Module):
    def __init__(self, widths: list[int], *, num_classes: int, channels: int) -> None:
        super().__init__()
        filters = whitening_filters(channels)
        self.whiten = nn.Conv2d(channels, len(filters), 2, bias=False)
        self.whiten.weight = nn.Parameter(filters, requires_grad=False)
        ends = [len(filters), *widths]
        self.blocks = nn.Sequential(*map(Block, ends, widths))
        self.head = nn.Linear(widths[-1], num_classes, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        """(B, channels, H, W) to logits (B, num_classes)."""
        # Pixels with their channels side by side: a third faster on a CPU than the default layout.
        images = images.contiguous(memory_format=torch.channels_last)
        features = self.blocks(F.gelu(self.whiten(images)))
        return torch.mul(self.head(features.amax((2, 3))), LOGIT_SCALE)


def build(config: Config, *, num_classes: int, channels: int, image_size: int) -> nn.Module:
    """Raises ValueError for images that the blocks would halve to nothing."""
    smallest = 2 ** len(config.widths) + 1
    if image_size < smallest:
        raise ValueError(
            f"{len(config.widths)} blocks of fast_cnn halve {image_size}x{image_size} to nothing; "
            f"set task.image_size={smallest} or more, or fewer task.model.widths"
        )
    return FastCNN(config.widths, num_classes=num_classes, channels=channels)


def whitening_filters(channels: int) -> Tensor:
    """(8 * channels, channels, 2, 2): filters whose outputs are uncorrelated and of variance 1 on
    natural images, and their negatives, since what follows is no even function.

    Not measured: neighbouring pixels are taken to correlate by 0.95, channels by 0.9. Cosines
    decorrelate such images (Ahmed, Natarajan and Rao, "Discrete Cosine Transform", 1974).
    """
    basis = torch.kron(_cosines(channels), torch.kron(_cosines(2), _cosines(2)))
    line = torch.tensor([[1, 0.95], [0.95, 1]]).double()
    pixel = torch.full((channels, channels), 0.9).fill_diagonal_(1).double()
    covariance = torch.kron(pixel, torch.kron(line, line))
    filters = basis / (basis @ covariance @ basis.T).diagonal().sqrt()[:, None]
    return torch.cat([filters, -filters]).reshape(-1, channels, 2, 2).float()


def _cosines(n: int) -> Tensor:
    """(n, n) orthonormal rows, the first of them constant: the discrete cosine transform."""
    angles = torch.outer(torch.arange(n), torch.arange(n) + 0.5) * (torch.pi / n)
    return F.normalize(angles.double().cos())


def _norm(width: int) -> nn.BatchNorm2d:
    """Without a learned scale, and with quick statistics: a run has few steps."""
    norm = nn.BatchNorm2d(width, momentum=0.4)
    norm.weight.requires_grad_(False)
    return norm
