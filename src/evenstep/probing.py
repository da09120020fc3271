"""Trying out a model that has just been built."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def trying(model: nn.Module) -> Iterator[None]:
    """In eval mode and without gradients; then each part goes back into the mode it was in."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True
