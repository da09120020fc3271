"""DeepSpeed ZeRO 1, 2 and 3 as the strategy of a run: optimizer state, gradients and weights are
split over the processes; what goes in and out are whole tensors under the names of the model.

Traps (read in the source of DeepSpeed 0.19):

- The flat optimizer cannot leave a parameter out of a step, as torch does without a gradient; and
  one that a single process does not use shifts the buffers that are added up, without an error.
- ZeRO-2 and 3 add up gradients in the order in which they come, on each process for itself.
- ZeRO-1 and 2, and 3 with offload, step a copy of the weights, which overwrites the weights.
- Under ZeRO-3 small parameters stay whole, as copies that only a step brings up to date.
- `engine.step` computes a norm of its own, too late to decide anything by it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from evenstep.average import Average
from evenstep.hardware import Hardware
from evenstep.optimizer import set_lr
from evenstep.plan import seed_of
from evenstep.strategy import Strategy
from evenstep.zero_setup import ELSEWHERE

import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass(frozen=True)
class ZeroTensors:
    """What a checkpoint holds: whole tensors, put together and taken apart here."""

    strategy: Zero
    average: Average | None

    def collect(self) -> dict[str, Tensor]:
        averages = self.strategy.whole(self.average.tensors) if self.average else {}
        return self.strategy.state() | {f"ema.{name}": each for name, each in averages.items()}

    def restore(self, path: Path) -> None:
        from evenstep import checkpoint_tensors

        stored = checkpoint_tensors.read_whole(path)
        # A new run has no optimizer state yet that could be compared.
        not_optimizer = (item for item in stored.items() if not item[0].startswith("optimizer."))
        checkpoint_tensors.check_fit(path, self.collect(), dict(not_optimizer))
        self.strategy.restore(stored)
        if self.average:
            averages = {name: stored[f"ema.{name}"] for name in self.average.tensors}
            self.strategy.scatter(averages, self.average.tensors)


@dataclass(frozen=True)
class Share:
    """The part of a flattened parameter that this process keeps."""

    first: int
    """Its place in the parameter, in elements."""
    numel: int
    group: int | None = None
    """Which flat tensor of the optimizer it is in; None for a frozen parameter."""
    start: int = 0
    """Its place in that flat tensor."""

    def of(self, flat: Tensor) -> Tensor:
        """The part in a tensor of the optimizer."""
        return flat.detach()[self.start : self.start + self.numel]

    def cut(self, whole: Tensor) -> Tensor:
        """The part of a whole parameter."""
        return whole.flatten()[self.first : self.first + self.numel]


class Zero(Strategy):
    """The engine as the strategy of a run. Every method is for all processes together."""

    shows_gradients = False

    def __init__(
        self, hardware: Hardware, bare: nn.Module, engine: Any, scaler: torch.amp.GradScaler
    ) -> None:
        """`engine` is what Accelerate prepared from `bare`; `scaler` does nothing."""
        super().__init__(hardware, bare, engine, engine.optimizer.optimizer, scaler)
        self._engine, self._zero = engine, (zero := engine.optimizer)
        self._named: dict[str, Any] = dict(bare.named_parameters())
        self._splits_weights = engine.zero_optimization_stage() == 3
        self._order: list[int] = []  # in which the gradients of a step came
        for number, parameter in enumerate(self.parameters):
            note = partial(self._note, number)
            parameter.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]
        # What the optimizer steps: this process's parts of a group's parameters, in a row.
        self._flats: list[Tensor]
        if self._splits_weights:
            self._flats, self._offloads = zero.fp32_partitioned_groups_flat, zero.offload_optimizer
            self._shares = {name: _share_3(zero, p) for name, p in self._named.items()}
        else:
            self._flats, self._offloads = zero.single_partition_of_fp32_groups, zero.cpu_offload
            groups = {id(p): i for i, group in enumerate(zero.bit16_groups) for p in group}
            self._shares = {n: _share_1_2(groups.get(id(p)), p) for n, p in self._named.items()}

    def start(self) -> None:
        """The last step left no gradient."""
        self._order.clear()

    def micro_batch(self, *, is_last: bool) -> AbstractContextManager[None]:
        self._engine.set_gradient_accumulation_boundary(is_last)
        return nullcontext()

    def backward(self, loss: Tensor, weight: Tensor) -> None:
        """Raises ValueError for trained parameters that the loss does not depend on."""
        weighted = loss * (weight * self.averaged_over)
        weighted.register_hook(self._check_use)  # type: ignore[no-untyped-call]
        self._engine.backward(weighted, scale_wrt_gas=False)

    def _check_use(self, _: Tensor) -> None:
        # Before any gradient is on its way. Only a running backward can tell.
        from deepspeed.runtime.utils import count_used_parameters_in_backward as count

        if count(self.parameters) < len(self.parameters):
            trained = {name: p for name, p in self._named.items() if p.requires_grad}
            raise ValueError(
                f"a micro-batch does not use {[n for n, p in trained.items() if not count([p])]}, "
                "and DeepSpeed steps all trained parameters alike: freeze those that no micro-batch"
                f" uses (requires_grad=False), or {ELSEWHERE}"
            )

    def clip(self, max_norm: float) -> float:
        """Raises ValueError if gradients came in different orders, which DeepSpeed mixes up."""
        self._check_order()
        gradients = self._gradients()
        square = torch.nn.utils.get_total_norm(gradients).double().square()
        square = square.to(self.hardware.device)
        dist.all_reduce(square)
        norm = float(square.sqrt())
        scale = max_norm / (norm + 1e-6)  # as torch's clip_grad_norm_
        if scale < 1:
            torch._foreach_mul_(gradients, scale)
        return norm

    def _note(self, number: int, _: Tensor) -> None:
        self._order.append(number)

    def _check_order(self) -> None:
        order = seed_of("gradients", *self._order) >> 10  # float64 holds 53 bits
        if len({*self.hardware.everywhere(order)}) > 1:
            raise ValueError(
                "processes computed the gradients of this model in different orders (layers that a "
                f"micro-batch skips or swaps), which DeepSpeed mixes up: {ELSEWHERE}"
            )

    def _gradients(self) -> list[Tensor]:
        """This process's part of the step's gradient."""
        if self._offloads:
            return [flat.grad for flat in self._flats if flat.grad is not None]
        return [g for group in self._zero.averaged_gradients.values() for g in group]

    def step(self, lr: float) -> None:
        set_lr(self.optimizer, lr)
        self._engine.step()

    def discard(self) -> None:
        """As DeepSpeed itself does after an overflow."""
        zero = self._zero
        if self._splits_weights:
            zero._pre_step()
            zero._overflow_clean_up(None)
            return
        zero.zero_grad()
        zero.micro_step_id = -1
        if self._offloads:
            zero._offload_accumulated_param_ids = set()
            zero.reset_cpu_buffers()
        for gradients in (zero.averaged_gradients, zero.all_grad_tensors):
            gradients.update(dict.fromkeys(gradients))  # in place: others refer to these

    def local_parameters(self) -> dict[str, Tensor]:
        """Whole parameters; under ZeRO-3, 1-D tensors with this process's part, padded."""
        if self._splits_weights:
            return {name: parameter.ds_tensor for name, parameter in self._named.items()}
        return dict(self._named)

    def tensors(self, average: Average | None) -> ZeroTensors:
        return ZeroTensors(self, average)

    @torch.no_grad()
    def parameters_changed(self) -> None:
        for name, local in self.local_parameters().items():
            share = self._shares[name]
            if share.group is not None:
                mine = local[: share.numel] if self._splits_weights else share.cut(local)
                share.of(self._flats[share.group]).copy_(mine)
        if self._splits_weights:
            self._zero._partition_all_parameters()
            if small := self._zero.persistent_parameters:
                small[0].all_gather(small)

    @torch.no_grad()
    def whole(self, local: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole parameters, on the CPU, from tensors like `local_parameters()`."""
        if not self._splits_weights:
            return {name: tensor.detach().to("cpu", copy=True) for name, tensor in local.items()}
        return {n: self._join(n, t[: self._shares[n].numel]) for n, t in local.items()}

    @torch.no_grad()
    def scatter(self, whole: Mapping[str, Tensor], local: Mapping[str, Tensor]) -> None:
        """The reverse: fill tensors like `local_parameters()` from whole parameters."""
        for name, tensor in local.items():
            share = self._shares[name]
            if self._splits_weights:
                tensor[: share.numel].copy_(share.cut(whole[name]))
            else:
                tensor.copy_(whole[name])

    def _join(self, name: str, part: Tensor) -> Tensor:
        """A whole tensor, on the CPU, from all processes' parts of it."""
        share, parameter = self._shares[name], self._named[name]
        shape = parameter.ds_shape if self._splits_weights else parameter.shape
        # x + -0.0 is x, to the bit, for -0.0 as well.
        whole = torch.full((shape.numel(),), -0.0, dtype=part.dtype, device=self.hardware.device)
        whole[share.first : share.first + share.numel] = part
        dist.all_reduce(whole)
        return whole.view(shape).cpu()

    def full_weights(self) -> dict[str, Tensor]:
        """The state dict of the bare model, on the CPU, tied parameters under all their names."""
        whole = self.whole(self.local_parameters())
        names = {id(parameter): name for name, parameter in self._named.items()}
        return {
            key: whole[names[id(value)]] if id(value) in names else value.to("cpu", copy=True)
            for key, value in self.bare.state_dict(keep_vars=True).items()
        }

    @torch.no_grad()
    def state(self) -> dict[str, Tensor]:
        """`model.<name>` and, after a first step, `optimizer.<parameter>.<key>`, on the CPU."""
        state = {f"model.{name}": tensor for name, tensor in self.full_weights().items()}
        for name, flat, share in self._optimized():
            for key, value in self.optimizer.state.get(flat, {}).items():
                is_count = value.ndim == 0  # of the steps taken
                whole = (
                    value.to("cpu", copy=True) if is_count else self._join(name, share.of(value))
                )
                state[f"optimizer.{name}.{key}"] = whole
        return state

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """The reverse of `state`. Raises ValueError for optimizer state that does not fit."""
        for key, value in self.bare.state_dict(keep_vars=True).items():
            if not isinstance(value, nn.Parameter):
                value.copy_(tensors[f"model.{key}"])
        self.scatter({n: tensors[f"model.{n}"] for n in self._named}, self.local_parameters())
        self.parameters_changed()
        self.optimizer.state.clear()
        names = (name for name in tensors if name.startswith("optimizer."))
        for key in sorted({name.rpartition(".")[2] for name in names}):
            self._restore_optimizer(key, tensors)

    def _restore_optimizer(self, key: str, tensors: Mapping[str, Tensor]) -> None:
        for name, flat, share in self._optimized():
            whole = tensors.get(f"optimizer.{name}.{key}")
            state = self.optimizer.state[flat]
            if whole is not None and whole.ndim:
                share.of(state.setdefault(key, torch.zeros_like(flat))).copy_(share.cut(whole))
            elif whole is None or whole != state.setdefault(key, whole.to(flat.device, copy=True)):
                raise ValueError(
                    f"{name} took another number of steps than the parameters before it, which "
                    f"DeepSpeed cannot go on from: {ELSEWHERE}"
                )

    def _optimized(self) -> Iterator[tuple[str, Tensor, Share]]:
        """Trained parameters, each with the flat tensor that this process's part is in."""
        for name, share in self._shares.items():
            if share.group is not None:
                yield name, self._flats[share.group], share


def _share_3(zero: Any, parameter: Any) -> Share:
    width = parameter.ds_tensor.ds_numel  # padded to be alike on all processes
    first = dist.get_rank() * width
    numel = max(0, min(width, parameter.ds_numel - first))
    if not parameter.requires_grad:
        return Share(first, numel)
    group, start, _ = zero.grad_position[zero.get_param_id(parameter)]
    return Share(first, numel, group, start)


def _share_1_2(group: int | None, parameter: Any) -> Share:
    mapping = None if group is None else parameter._hp_mapping
    if mapping is None:
        return Share(0, 0, group)
    here, there = mapping.lp_fragment_address, mapping.hp_fragment_address
    return Share(here.start, here.numel, group, there.start)
