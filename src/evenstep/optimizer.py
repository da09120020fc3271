"""Optimizers from the run config: which parameters decay, and the fastest kernels there are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups: matrices and filters decay, 1-D parameters (norms, biases, scales) do not.

    By shape, since lists of names miss the norms of the next architecture. Frozen parameters are
    in neither group; a tied parameter is in one.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build(model: nn.Module, config: Any) -> Optimizer:
    """The optimizer of the run config's `optimizer` section; its lr is set anew each step."""
    groups = parameter_groups(model, config.weight_decay)
    if not groups:
        raise ValueError("no parameter of the model requires a gradient: there is nothing to train")
    if config.name == "adamw":
        options = {"lr": config.lr, "betas": config.betas, "eps": config.eps}
        return _fastest(torch.optim.AdamW, groups, options)
    options = {"lr": config.lr, "momentum": config.momentum, "nesterov": config.nesterov}
    return _fastest(torch.optim.SGD, groups, options)


def _fastest(
    kind: Callable[..., Optimizer], groups: list[dict[str, Any]], options: dict[str, Any]
) -> Optimizer:
    try:
        return kind(groups, **options, fused=True)
    except RuntimeError:  # no fused kernel for this device or dtype
        return kind(groups, **options, foreach=True)
