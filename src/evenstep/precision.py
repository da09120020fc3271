"""Precision is part of the result, so it is the run config's: never the hardware file's."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """The context of a forward. Weights, gradients and optimizer state stay in float32."""
    if precision not in _AUTOCAST:
        return nullcontext()
    return torch.autocast(device.type, dtype=_AUTOCAST[precision])


def grad_scaler(precision: str, device: torch.device) -> torch.amp.GradScaler:
    """Scales the loss under fp16; does nothing otherwise."""
    return torch.amp.GradScaler(device.type, enabled=precision == "fp16")


def cast_model(model: nn.Module, precision: str) -> nn.Module:
    return model.double() if precision == "fp64" else model


def cast_batch(batch: Any, precision: str) -> Any:
    """Floating-point tensors of the batch in the precision of the weights."""
    if precision != "fp64":
        return batch
    return tree_map_only(Tensor, lambda t: t.double() if t.is_floating_point() else t, batch)
