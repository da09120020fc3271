"""How the gradients of micro-batches become one update of the weights, on this hardware."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from evenstep import fsdp2, summation
from evenstep.average import Average
from evenstep.checkpoint import PlainTensors, Tensors
from evenstep.config import RunConfig
from evenstep.hardware import Hardware
from evenstep.optimizer import set_lr
from evenstep.precision import grad_scaler

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer


def prepare(
    config: RunConfig, hardware: Hardware, bare: nn.Module, optimizer: Optimizer
) -> Strategy:
    """Wrap the model and its optimizer for this hardware."""
    scaler = grad_scaler(config.precision, hardware.device)
    if config.reproducibility == "bitwise":
        model = hardware.accelerator.prepare_model(bare, evaluation_mode=True)  # without DDP
        return Bitwise(hardware, bare, model, optimizer, scaler)
    kind = hardware.accelerator.distributed_type.value
    if kind in ("FSDP", "DEEPSPEED"):
        _check_dimensions(bare, kind)
        _check_optimizer(config.optimizer.name, kind)
    if kind == "FSDP":
        fsdp2.name_layers(hardware.accelerator.state.fsdp_plugin, bare)
    try:
        model, prepared = hardware.accelerator.prepare(bare, optimizer)
    except ValueError as error:
        raise ValueError(f"the hardware file does not fit this model: {error}") from error
    if kind == "DEEPSPEED":
        from evenstep.zero import Zero

        return Zero(hardware, bare, model, scaler)
    strategy = Fsdp2 if kind == "FSDP" else Strategy
    # Accelerate's own optimizer looks for a package on the disk in every step.
    return strategy(hardware, bare, model, prepared.optimizer, scaler)


def _check_dimensions(model: nn.Module, kind: str) -> None:
    if names := [name for name, p in model.named_parameters() if not p.ndim]:
        raise ValueError(
            f"{kind} cannot split parameters without a dimension: give {', '.join(names)} the "
            "shape (1,), or use accelerate_configs/multi_gpu.yaml"
        )


def _check_optimizer(name: str, kind: str) -> None:
    if name in ("muon", "schedule_free"):
        raise ValueError(
            f"optimizer.name {name} is not run on the split weights of {kind}: use adamw or sgd, "
            "or accelerate_configs/multi_gpu.yaml"
        )


class Strategy:
    """One process and DDP: gradients are added in the order in which they come."""

    shows_gradients = True
    """Whether `p.grad` holds the gradient of a single micro-batch after its backward."""

    def __init__(
        self,
        hardware: Hardware,
        bare: nn.Module,
        model: nn.Module,
        optimizer: Optimizer,
        scaler: torch.amp.GradScaler,
    ) -> None:
        self.hardware, self.bare, self.model = hardware, bare, model
        self.optimizer, self.scaler = optimizer, scaler
        self.parameters = [p for p in model.parameters() if p.requires_grad]

    @property
    def averaged_over(self) -> int:
        """Over how many processes gradients are averaged, as DDP and FSDP2 do, instead of added."""
        return self.hardware.num_processes

    def visits(self, count: int) -> Sequence[int]:
        """The order in which this process computes its `count` micro-batches of a step."""
        return range(count)

    def start(self) -> None:
        """Begin a step."""
        self.optimizer.zero_grad()

    def micro_batch(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Around a forward and its backward; with the last of a step, processes join their sums."""
        if is_last:
            return nullcontext()
        return self.hardware.accelerator.no_sync(self.model)  # type: ignore[no-any-return]

    def backward(self, loss: Tensor, weight: Tensor) -> None:
        """Add the gradient of `weight * loss` to the step's: `weight` is 1 / targets of the step,
        or NaN."""
        # P times an average over P processes is their sum. With the factor P float16 would overflow
        # sooner: there it has to wait until `clip`.
        factor = 1 if self.scaler.is_enabled() else self.averaged_over
        loss.backward(self.scaler.scale(weight * factor))  # type: ignore[no-untyped-call]

    def clip(self, max_norm: float) -> float:
        """Scale the step's gradient down to `max_norm`; returns the norm it had, the same on all
        processes: not finite as soon as one micro-batch's gradient is not."""
        self.scaler.unscale_(self.optimizer)
        if self.scaler.is_enabled() and self.averaged_over > 1:
            gradients = [p.grad for p in self.parameters if p.grad is not None]
            torch._foreach_mul_(gradients, self.averaged_over)
        norm = clip_grad_norm_(self.parameters, max_norm)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def step(self, lr: float) -> None:
        """Update the weights."""
        set_lr(self.optimizer, lr)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def discard(self) -> None:
        """Leave the weights as they are; fp16 lowers its loss scale."""
        self.scaler.update()

    def local_parameters(self) -> dict[str, Tensor]:
        """By name, the tensors that hold the parameters, or this process's share of them."""
        return dict(self.bare.named_parameters())

    def parameters_changed(self) -> None:
        """To be called once the local parameters were written."""

    def tensors(self, average: Average | None) -> Tensors:
        """What a checkpoint holds."""
        return PlainTensors(self.bare, self.optimizer, average)

    def full_weights(self) -> dict[str, Tensor]:
        """The whole state of the model, on the CPU, at least on the main process. To be called on
        all processes."""
        from evenstep.checkpoint_tensors import full_weights

        return full_weights(self.bare)

    def sum(self, terms: Sequence[Tensor]) -> Tensor:
        """The sum over all micro-batches of the step, given this process's terms by number."""
        total = torch.stack(list(terms)).sum(0)
        return self.hardware.accelerator.reduce(total, "sum")  # type: ignore[no-any-return]


class Fsdp2(Strategy):
    """Every process holds a share of the weights, and all of them compute on whole ones."""

    shows_gradients = False  # and with an extra forward on one process the others would not wait

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._used = fsdp2.UsedParameters(self.model, self.hardware.channel)

    def micro_batch(self, *, is_last: bool) -> AbstractContextManager[None]:
        self._is_last = is_last
        return super().micro_batch(is_last=is_last)

    def backward(self, loss: Tensor, weight: Tensor) -> None:
        if self._is_last:
            self._used.agree_in_backward(loss)
        super().backward(loss, weight)

    def parameters_changed(self) -> None:
        fsdp2.reshard(self.model)


class Bitwise(Strategy):
    """One process and DDP: gradients are added in an order that does not depend on P.

    `model` is the bare one: no wrapper takes part. After the last micro-batch the gradients are
    views of one flat buffer, followed by a number a parameter: how many leaves of the tree used it.
    """

    @property
    def averaged_over(self) -> int:
        return 1

    def visits(self, count: int) -> Sequence[int]:
        self._in_a_row = summation.terms_in_a_row(count)
        return summation.visits(count)

    def start(self) -> None:
        super().start()
        self._sums, self._computed = summation.PartialSums(), 0

    def micro_batch(self, *, is_last: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def backward(self, loss: Tensor, weight: Tensor) -> None:
        super().backward(loss, weight)
        self._computed += 1
        if self._computed % self._in_a_row == 0:
            self._sums.add(self._take_gradients())

    def clip(self, max_norm: float) -> float:
        totals = self._sums.total()
        if self.hardware.num_processes > 1:
            totals = self._over_processes(totals)
        *gradients, uses = totals
        # A leaf that did not use a parameter counts as 0. Whether 0 was added or nothing shows in
        # the sign of a zero: adding 0 makes all of them +0.
        torch._foreach_add_(gradients, 0.0)
        for parameter, gradient, used in zip(
            self.parameters, gradients, uses.tolist(), strict=True
        ):
            parameter.grad = gradient if used else None
        return super().clip(max_norm)

    def sum(self, terms: Sequence[Tensor]) -> Tensor:
        total = summation.tree_sum(terms)
        if self.hardware.num_processes > 1:
            (total,) = self._over_processes([total])
        return total

    def _take_gradients(self) -> list[Tensor]:
        """The gradients of a leaf, out of the parameters' hands; 1 for each that was used."""
        gradients = [p.grad for p in self.parameters]
        used = self.parameters[0].new_tensor([gradient is not None for gradient in gradients])
        self.optimizer.zero_grad()
        filled = (
            torch.zeros_like(p) if gradient is None else gradient
            for p, gradient in zip(self.parameters, gradients, strict=True)
        )
        return [*filled, used]

    def _over_processes(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Their sums over the processes, as views of one buffer."""
        sizes = [tensor.numel() for tensor in tensors]
        padding = -sum(sizes) % self.hardware.num_processes
        flat = torch.cat([*(t.flatten() for t in tensors), tensors[0].new_zeros(padding)])
        summation.sum_over_processes(flat, self.hardware.num_processes)
        views = torch.split(flat[: sum(sizes)], sizes)
        return [view.view_as(tensor) for view, tensor in zip(views, tensors, strict=True)]
