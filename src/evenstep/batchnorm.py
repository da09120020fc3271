"""BatchNorm statistics that do not depend on the number of processes.

Each micro-batch normalises by its own statistics, as every replica does under DataParallel and
DDP. The running statistics get one update a step, from the mean over all V micro-batches of it,
wherever they were computed. `num_batches_tracked` counts steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
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
        # Any: nn.Module types its buffers as Tensor | None.
        self._momentum: dict[Any, float | None] = {
            layer: layer.momentum
            for layer in model.modules()
            if isinstance(layer, _BatchNorm) and layer.track_running_stats
        }
        for layer in self._momentum:
            layer.momentum = 1.0

    def start(self) -> None:
        """Begin a step. Layers in eval mode, whose statistics are frozen, are left alone."""
        layers = [layer for layer in self._momentum if layer.training]
        self._momenta = [self._momentum[layer] for layer in layers]
        self._statistics = [b for layer in layers for b in (layer.running_mean, layer.running_var)]
        self._counters = [layer.num_batches_tracked for layer in layers]
        self._buffers = self._statistics + self._counters
        self._before = [buffer.clone() for buffer in self._buffers]
        self._collected: dict[int, Tensor] = {}
        self._clear()

    def collect(self, turn: int) -> None:
        """Take what this process's micro-batch `turn` left behind, once its backward is through."""
        if self._buffers:
            # A layer that a micro-batch skips leaves zeros and counts 0; one used twice counts 1.
            torch._foreach_clamp_max_(self._counters, 1)
            self._collected[turn] = _flat(self._buffers)
            self._clear()

    def commit(self, add_up: Callable[[Sequence[Tensor]], Tensor]) -> None:
        """Update the running statistics once. `add_up` makes of one tensor for each micro-batch of
        this process, in order, the sum over those of all processes."""
        if not self._buffers:
            return
        sums = add_up([self._collected[turn] for turn in sorted(self._collected)])
        num_layers, device = len(self._counters), sums.device
        statistics, uses = sums[:-num_layers], sums[-num_layers:]
        before = _flat(self._before)[:-num_layers]
        steps = _flat(self._before)[-num_layers:] + (uses > 0)
        # Momentum None is a cumulative average over the steps, as in torch.
        constant = sums.new_tensor([m or 0.0 for m in self._momenta])
        cumulative = torch.tensor([m is None for m in self._momenta], device=device)
        rates = torch.where(cumulative, 1 / steps.clamp(min=1), constant) * (uses > 0)
        # Which layer each entry of the flat statistics belongs to.
        widths = torch.tensor([2 * mean.numel() for mean in self._statistics[::2]])
        owner = torch.arange(num_layers).repeat_interleave(widths).to(device)
        seen = statistics / uses.clamp(min=1)[owner]
        updated = torch.cat([before + rates[owner] * (seen - before), steps])
        values = torch.split(updated, [buffer.numel() for buffer in self._buffers])
        for buffer, value in zip(self._buffers, values, strict=True):
            buffer.copy_(value.view_as(buffer))

    def discard(self) -> None:
        """Put the statistics back that `start` found."""
        for buffer, before in zip(self._buffers, self._before, strict=True):
            buffer.copy_(before)

    def _clear(self) -> None:
        if self._buffers:
            torch._foreach_zero_(self._buffers)


def _flat(buffers: list[Tensor]) -> Tensor:
    return torch.cat([buffer.flatten().to(buffers[0].dtype) for buffer in buffers])
