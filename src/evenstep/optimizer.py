"""Optimizers from the run config: which parameters decay, how fast each of them learns, and the
fastest kernels there are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from evenstep.layers import blocks, depths

import torch
from torch import nn
from torch.optim import Optimizer

Groups = list[dict[str, Any]]


def parameter_groups(
    model: nn.Module, weight_decay: float, layer_decay: float | None = None
) -> Groups:
    """Matrices and filters, which decay, then 1-D parameters (norms, biases, scales), which do not;
    both divided by `lr_scale`, the factor on the learning rate, where there is layer decay.

    By shape, since lists of names miss the norms of the next architecture. Frozen parameters are
    in no group; a tied parameter is in one.
    """
    scales = lr_scales(model, layer_decay) if layer_decay is not None else {}
    groups: dict[tuple[bool, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            key = (parameter.ndim <= 1, scales.get(name, 1.0))
            groups.setdefault(key, []).append(parameter)
    return [
        {"params": groups[key], "weight_decay": 0.0 if key[0] else weight_decay, "lr_scale": key[1]}
        for key in sorted(groups)
    ]


def lr_scales(model: nn.Module, layer_decay: float) -> dict[str, float]:
    """The factor on the learning rate of each parameter, by name: layer_decay ** (L + 1 - depth)
    with L blocks, as in BEiT (Bao et al., 2021): 1 for what comes after the last block, such as
    the head. A tied parameter has that of its first name: for an embedding that is the head too,
    that of the embedding."""
    key = "optimizer.layer_decay"
    depth, top = depths(model, key), len(blocks(model, key)) + 1
    return {name: layer_decay ** (top - depth[name]) for name in depth}


def build(model: nn.Module, config: Any) -> Optimizer:
    """The optimizer of the run config's `optimizer` section; `set_lr` sets its lr in each step.

    Raises ValueError where there is nothing to train, and where the model or the installation
    lacks what the optimizer needs.
    """
    groups = parameter_groups(model, config.weight_decay, config.layer_decay)
    if not groups:
        raise ValueError("no parameter of the model requires a gradient: there is nothing to train")
    if config.name == "sgd":
        options = {"lr": config.lr, "momentum": config.momentum, "nesterov": config.nesterov}
        return _fastest(torch.optim.SGD, groups, options)
    options = {"lr": config.lr, "betas": config.betas, "eps": config.eps}
    if config.name == "muon":
        return _muon(model, groups, config, options)
    if config.name == "schedule_free":
        return _schedule_free(groups, options)
    return _fastest(torch.optim.AdamW, groups, options)


def set_lr(optimizer: Optimizer, lr: float) -> None:
    """The learning rate of a step, times the `lr_scale` of each group that has one."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)


def _muon(model: nn.Module, groups: Groups, config: Any, options: dict[str, Any]) -> Optimizer:
    from evenstep.muon import Combined

    found = blocks(model, "optimizer.name muon").values()
    inner = {p for block in found for p in block.parameters() if p.ndim == 2}
    matrices = _only(groups, lambda parameter: parameter in inner)
    others = _only(groups, lambda parameter: parameter not in inner)
    if not matrices:
        raise ValueError(
            "optimizer.name muon steps matrices within repeated blocks, of which this model has "
            "none to train (filters of convolutions are none): use adamw or sgd"
        )
    muon: Optimizer = torch.optim.Muon(
        matrices, lr=config.lr, momentum=config.momentum, adjust_lr_fn=config.adjust_lr
    )
    if not others:
        return muon
    for group in others:
        group["lr_scale"] *= (config.adamw_lr or config.lr) / config.lr
    return Combined(muon, _fastest(torch.optim.AdamW, others, options))


def _only(groups: Groups, wanted: Callable[[nn.Parameter], bool]) -> Groups:
    parts = [{**group, "params": list(filter(wanted, group["params"]))} for group in groups]
    return [part for part in parts if part["params"]]


def _schedule_free(groups: Groups, options: dict[str, Any]) -> Optimizer:
    try:
        from evenstep.schedule_free import ScheduleFree
    except ModuleNotFoundError as error:
        raise ValueError(
            "optimizer.name schedule_free needs schedulefree: pip install schedulefree"
        ) from error
    return ScheduleFree(groups, **options)


def _fastest(kind: Callable[..., Optimizer], groups: Groups, options: dict[str, Any]) -> Optimizer:
    try:
        return kind(groups, **options, fused=True)
    except RuntimeError:  # no fused kernel for this device or dtype
        return kind(groups, **options, foreach=True)
