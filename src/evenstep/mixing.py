"""Mixup and CutMix: each image of a micro-batch mixed with another one, and their labels alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from evenstep.labels import IGNORED

import torch
from torch import Tensor
from torchvision.transforms import v2

Batch = Mapping[str, Tensor]  # "image": (B, C, H, W), "label": (B,) int64


def mixing(
    num_classes: int, *, mixup: float | None, cutmix: float | None
) -> Callable[[Batch], Batch] | None:
    """Makes labels soft: (B, num_classes). `mixup` and `cutmix` are the alpha of the Beta(alpha,
    alpha) distribution that the share of an image is drawn from, once a micro-batch; with both,
    each micro-batch takes one of them at random. None without either.

    Zhang et al., "mixup: Beyond Empirical Risk Minimization", 2017; Yun et al., "CutMix", 2019.
    """
    kinds: list[tuple[type[v2.Transform], float | None]] = [(v2.MixUp, mixup), (v2.CutMix, cutmix)]
    transforms = [kind(alpha=a, num_classes=num_classes) for kind, a in kinds if a is not None]
    if not transforms:
        return None
    chosen = v2.RandomChoice(transforms) if len(transforms) > 1 else transforms[0]
    return partial(_mix, chosen, num_classes)


def _mix(transform: v2.Transform, num_classes: int, batch: Batch) -> Batch:
    """Skipped images, which are black, are mixed into none and get a label of zeros."""
    images, labels = batch["image"].clone(), batch["label"]
    if len(labels) < 2:
        raise ValueError(
            "mixup and cutmix mix the images of a micro-batch with each other: set "
            "micro_batch_size to at least 2"
        )
    soft = torch.zeros(len(labels), num_classes)
    counted = labels != IGNORED
    if counted.any():
        images[counted], soft[counted] = transform(images[counted], labels[counted])
    return {**batch, "image": images, "label": soft}
