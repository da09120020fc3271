"""What a model must not do, checked on the first step: it would train differently on another P."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


def other_buffers(model: nn.Module) -> dict[str, Tensor]:
    """A copy of every buffer that is not a BatchNorm's."""
    return {
        f"{prefix}.{name}".strip("."): buffer.clone()
        for prefix, module in model.named_modules()
        if not isinstance(module, _BatchNorm)
        for name, buffer in module.named_buffers(recurse=False)
    }


def check_first_step(model: nn.Module, buffers_before: dict[str, Tensor]) -> None:
    """Raises ValueError if a forward changed a buffer, or left a parameter without a gradient."""
    changed = [
        name
        for name, buffer in other_buffers(model).items()
        if name in buffers_before and not buffer.equal(buffers_before[name])
    ]
    if changed:
        raise ValueError(
            f"the forward changes the buffer(s) {', '.join(changed)}: how often it runs depends on "
            "the number of processes, so the result would too. Only BatchNorm statistics are kept "
            "equal; compute this state from the weights, or drop it"
        )
    unused = [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]
    if unused:
        raise ValueError(
            f"no gradient reached {len(unused)} parameter(s): {', '.join(unused[:5])}. Several "
            "processes could not add up their gradients; use them in the loss, or freeze them "
            "(requires_grad_(False)) where the model is built"
        )
