"""The summed cross entropy that classification tasks share: one class a target.

A label is *hard*, (N,) int64 class numbers of which IGNORED count nowhere, or *soft*, (N, classes)
floats that sum to 1, and to 0 where the target counts nowhere. On hard labels

    summed_cross_entropy(...) / num_targets(...)

over a global batch is `F.cross_entropy(logits, labels, weight=..., label_smoothing=...)`, however
it was cut into micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from evenstep.labels import IGNORED

import torch
import torch.nn.functional as F
from torch import Tensor


def logits_of(output: Any) -> Tensor:
    """What a model returned, a tensor or an output of transformers, as logits in float32 or wider,
    so that no loss is summed in 16 bits."""
    logits: Tensor = getattr(output, "logits", output)
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def summed_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    label_smoothing: float = 0.0,
    class_weights: Tensor | None = None,
) -> Tensor:
    """A scalar. `logits` are (N, classes), `class_weights` (classes,) on any device.

    Smoothing moves a part of each target to all classes alike, before they are weighted (Szegedy et
    al., "Rethinking the Inception Architecture", 2015, section 7).
    """
    if class_weights is not None:
        class_weights = class_weights.to(logits, non_blocking=True)
    if not labels.is_floating_point():
        return F.cross_entropy(
            logits,
            labels,
            class_weights,
            ignore_index=IGNORED,
            reduction="sum",
            label_smoothing=label_smoothing,
        )
    losses = F.cross_entropy(
        logits,
        labels.to(logits.dtype),
        class_weights,
        reduction="none",
        label_smoothing=label_smoothing,
    )
    # Smoothing would give a target of zeros a loss as well.
    return (losses * target_weights(labels)).sum()


def target_weights(labels: Tensor, class_weights: Tensor | None = None) -> Tensor:
    """(N,): what each target counts: 0 where it is ignored, else 1, or the weight of its class. The
    weight of a soft label is the mean over its classes, so that a soft label of one class is a hard
    one (PyTorch lets it count as 1)."""
    soft = labels.is_floating_point()
    if class_weights is None:
        return labels.sum(1) > 0 if soft else labels != IGNORED
    weights = class_weights.to(labels.device, non_blocking=True)
    if soft:
        return labels.to(weights.dtype) @ weights
    return weights[labels.clamp(min=0)] * (labels != IGNORED)


def num_targets(labels: Tensor, class_weights: Tensor | None = None) -> float:
    """What to divide the summed loss by: the targets that count, or the sum of their weights."""
    total: float = target_weights(labels, class_weights).sum().item()
    return total


def class_weights_of(
    given: str | Sequence[float] | None, labels: Sequence[int], num_classes: int
) -> Tensor | None:
    """(classes,) float64 of a config key that is null, "balanced" or one number a class.

    balanced: n / (classes * samples of the class), as in scikit-learn: every class has the same
    share of the loss. A class without a sample weighs nothing. Raises ValueError unless there is a
    weight for each class, and one above 0.
    """
    if given is None:
        return None
    if isinstance(given, str):
        known = torch.as_tensor(labels)
        counts = torch.bincount(known[known != IGNORED], minlength=num_classes).double()
        present = counts > 0
        return torch.where(present, counts.sum() / (present.sum() * counts.clamp(min=1)), 0.0)
    if len(given) != num_classes or not any(given):
        raise ValueError(
            f"class_weights {list(given)}: the data has {num_classes} classes; give one number a "
            "class, at least one of them above 0, or balanced"
        )
    return torch.tensor(given, dtype=torch.float64)
