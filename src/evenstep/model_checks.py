"""What a model must not do, since it would train differently on another number of processes."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


class FirstStep:
    """Made before a launch's first step, checked after it."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before: dict[str, Tensor] | None = _other_buffers(model)

    def check(self) -> None:
        """Once: raise ValueError if a forward changed a buffer that is not a BatchNorm's."""
        if self._before is None:
            return
        now, before, self._before = _other_buffers(self._model), self._before, None
        if changed := [name for name in before.keys() & now if not now[name].equal(before[name])]:
            raise ValueError(
                f"a forward changes the buffer(s) {', '.join(sorted(changed))}; how many there are "
                "depends on the number of processes, and so would the result. Only BatchNorm "
                "statistics are kept alike; compute this state from the weights, or drop it"
            )


def _other_buffers(model: nn.Module) -> dict[str, Tensor]:
    """A copy of every buffer that is not a BatchNorm's."""
    return {
        f"{prefix}.{name}".strip("."): buffer.clone()
        for prefix, module in model.named_modules()
        if not isinstance(module, _BatchNorm)
        for name, buffer in module.named_buffers(recurse=False)
    }
