"""The network of `overhead.py`: three convolutions of width 16 on 8x8 images, about 2 ms a step."""

from __future__ import annotations

import time

from evenstep.sections import Section

from torch import Tensor, nn

starts: list[float] = []
"""The time of every forward, in seconds."""


class Config(Section):
    name: str = "tiny_model"


def build(config: Config, *, num_classes: int, channels: int, image_size: int) -> nn.Module:
    return Network()


class Network(nn.Sequential):
    """Notes the time of every forward."""

    def __init__(self) -> None:
        widths = [(1, 16), (16, 16), (16, 16)]
        convolutions = [nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.ReLU()) for i, o in widths]
        super().__init__(*convolutions, nn.Flatten(), nn.Linear(16 * 64, 10))

    def forward(self, x: Tensor) -> Tensor:
        starts.append(time.perf_counter())
        return super().forward(x)
