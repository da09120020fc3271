"""BatchNorm statistics that do not depend on the number of processes.

Each micro-batch normalises by its own statistics, as every replica does under DataParallel and
DDP. The running statistics get one update a step, from the mean over all V micro-batches of it,
wherever they were computed. `num_batches_tracked` counts steps.
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


class BatchNormStatistics:
    """Collects the statistics of each micro-batch; `commit` or `discard` them at the step's end.

    With momentum 1 a layer's own forward leaves exactly the batch statistics in its running
    buffers: nothing is computed twice, and compiled or re-computed forwards work as well.
    Make it before `torch.compile` and `prepare`, which see the changed momentum.
    """

    def __init__(self, model: nn.Module) -> None:
        for name, layer in model.named_modules():
            if isinstance(layer, nn.SyncBatchNorm):
                raise ValueError(
                    f"{name} is a SyncBatchNorm, whose result depends on the number of processes; "
                    "use BatchNorm: its statistics are averaged over the global batch already"
                )
        self._momentum: dict[_BatchNorm, float | None] = {
            layer: layer.momentum
            for layer in model.modules()
            if isinstance(layer, _BatchNorm) and layer.running_mean is not None
        }
        for layer in self._momentum:
            layer.momentum = 1.0

    def start(self) -> None:
        """Begin a step. Layers in eval mode, whose statistics are frozen, are left alone."""
        self._layers = [layer for layer in self._momentum if layer.training]
        self._buffers = [b for layer in self._layers for b in _buffers(layer)]
        self._before = [buffer.clone() for buffer in self._buffers]
        self._sums = [torch.zeros_like(buffer) for buffer in self._buffers]
        self._clear()

    def collect(self) -> None:
        """Add what one micro-batch left behind, once its backward is through."""
        if self._buffers:
            # A layer that a micro-batch skips leaves zeros and counts 0; one used twice counts 1.
            torch._foreach_clamp_max_(self._buffers[2::3], 1)
            torch._foreach_add_(self._sums, self._buffers)
            self._clear()

    def commit(self, accelerator: Accelerator) -> None:
        """Update the running statistics once, from the sums over all processes."""
        if not self._buffers:
            return
        sizes = [buffer.numel() for buffer in self._sums]
        flat = torch.cat([total.flatten().to(self._sums[0].dtype) for total in self._sums])
        totals = accelerator.reduce(flat, "sum").split(sizes)
        for i, layer in enumerate(self._layers):
            mean_sum, var_sum, uses = totals[3 * i : 3 * i + 3]
            mean, var, steps = self._before[3 * i : 3 * i + 3]
            steps += uses > 0
            # Momentum None is a cumulative average over steps, as in torch.
            momentum = self._momentum[layer]
            rate = 1 / steps.clamp(min=1) if momentum is None else momentum
            for old, total in ((mean, mean_sum), (var, var_sum)):
                seen = total.view_as(old) / uses.clamp(min=1)
                old += torch.where(uses > 0, rate * (seen - old), 0.0)
        self.discard()

    def discard(self) -> None:
        """Put the statistics back that `start` found."""
        for buffer, before in zip(self._buffers, self._before, strict=True):
            buffer.copy_(before)

    def _clear(self) -> None:
        if self._buffers:
            torch._foreach_zero_(self._buffers)


def _buffers(layer: _BatchNorm) -> tuple[Tensor, Tensor, Tensor]:
    """Running mean (C,), running variance (C,), and the counter of uses (int64 scalar)."""
    assert layer.running_mean is not None
    assert layer.running_var is not None
    assert layer.num_batches_tracked is not None
    return layer.running_mean, layer.running_var, layer.num_batches_tracked
