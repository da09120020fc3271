"""FSDP2: weights, gradients and optimizer state split over the processes, as DTensors.

Traps of FSDP2 (read in the source of torch 2.14 and accelerate 1.15):
- It reduces the gradients that a process has. Where another process has more of them (LayerDrop, a
  branch that depends on the data), the two add up different things, or hang; and layers gathered
  one by one are mixed up, without an error, when processes call them in different orders.
- After a forward the root layer stays gathered: the next forward does not see that weights changed.
- `cpu_ram_efficient_loading`, on unless a file says no, builds the model on process 0 alone, and
  fails for a model with buffers. Here all processes build the same model.
- Accelerate's activation checkpointing draws other dropout masks in the backward; modules that it
  ignores keep the gradients of their own process.
- Pinned memory, which CPU offload takes by default, needs a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from evenstep.plan import seed_of

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule

_FITTING = {
    "FSDP_VERSION": "2",
    "FSDP_ACTIVATION_CHECKPOINTING": "false",
    "FSDP_IGNORED_MODULES": "",
}


def check(environ: Mapping[str, str]) -> None:
    """Raises ValueError for what a hardware file asks for that evenstep would not run exactly.

    `environ` is what `accelerate launch` makes of the file.
    """
    for key, fitting in _FITTING.items():
        value = environ.get(key, "1" if key == "FSDP_VERSION" else fitting)  # Accelerate's default
        if value.lower() != fitting:
            raise ValueError(
                f"the hardware file asks for {key.lower()} {value}, which evenstep does not run: "
                "accelerate_configs/fsdp2.yaml shows what it does"
            )


def check_mesh(environ: Mapping[str, str]) -> None:
    """Raises ValueError for a mesh of processes that is not data-parallel, or of another size."""
    sizes = {
        kind: environ.get(f"PARALLELISM_CONFIG_{kind}_SIZE", "1")
        for kind in ("TP", "CP", "SP", "DP_REPLICATE", "DP_SHARD")
    }
    for kind in ("TP", "CP", "SP"):
        if sizes[kind] != "1":
            raise ValueError(
                f"the hardware file asks for parallelism_config_{kind.lower()}_size {sizes[kind]}; "
                "evenstep splits data, weights, gradients and optimizer state, and nothing else"
            )
    mesh = int(sizes["DP_REPLICATE"]) * int(sizes["DP_SHARD"])
    count = environ.get("WORLD_SIZE", "1")
    if mesh > 1 and count != str(mesh):
        raise ValueError(
            f"{count} process(es) were launched, and the hardware file's mesh has {mesh}: make "
            "parallelism_config_dp_replicate_size times parallelism_config_dp_shard_size the number"
            " of processes"
        )


def plugin(*, rehearsed: bool) -> Any:
    """The FullyShardedDataParallelPlugin of the Accelerator, as the hardware file has it."""
    from accelerate import FullyShardedDataParallelPlugin

    made = FullyShardedDataParallelPlugin(cpu_ram_efficient_loading=False)
    if rehearsed and isinstance(made.cpu_offload, CPUOffloadPolicy):
        made.cpu_offload = CPUOffloadPolicy(pin_memory=False)
    return made


def name_layers(plugin: Any, model: nn.Module) -> None:
    """Choose what is gathered one by one where the hardware file names no classes: the layers that
    a transformers model declares, apart from one around its input embedding, which Accelerate
    splits off by itself, and then cannot split again."""
    if plugin.transformer_cls_names_to_wrap is None:
        embedding = getattr(model, "get_input_embeddings", lambda: None)()
        layers = {type(m).__name__ for m in model.modules() if embedding not in set(m.modules())}
        declared = getattr(model, "_no_split_modules", None) or ()
        plugin.transformer_cls_names_to_wrap = sorted(layers.intersection(declared))


def reshard(model: nn.Module) -> None:
    """Drop the gathered weights, after the shares of the processes have changed."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


class UsedParameters:
    """Zero gradients for the parameters that only other processes used in a step.

    What DDP's `find_unused_parameters` does: one small message a step, and a parameter that no
    process used keeps no gradient, so that no weight decay moves it.
    """

    def __init__(self, model: nn.Module, channel: Any) -> None:
        """`model` is as `fully_shard` made it; `channel` is a process group on the CPU, or None
        for one process."""
        self._model, self._channel = model, channel
        self._called: list[int] = []  # the layers that are gathered one by one, in order
        for number, module in enumerate(model.modules()):
            if channel is not None and isinstance(module, FSDPModule):
                cast(nn.Module, module).register_forward_pre_hook(
                    lambda *_, number=number: self._note(number)
                )

    def agree_in_backward(self, loss: Tensor) -> None:
        """Call before the last backward of a step, which starts from `loss`.

        That raises RuntimeError on all processes if they called layers in different orders.
        """
        # A callback runs at the end of a backward. FSDP2 reduces the root layer in one, which it
        # queues later than this hook, the first to run. For lack of a public way, as in DDP.
        queue: Any = Variable._execution_engine.queue_callback
        if self._channel is not None:
            loss.register_hook(lambda _: queue(self._agree))  # type: ignore[no-untyped-call]

    def _note(self, number: int) -> None:
        if torch.is_grad_enabled():  # an evaluation has no backward to tell of it in
            self._called.append(number)

    def _agree(self) -> None:
        order = seed_of("layers", *self._called)
        self._called.clear()
        parameters = [p for p in self._model.parameters() if p.requires_grad]
        used = [int(p.grad is not None) for p in parameters]
        told = torch.tensor([order, -order, *used])
        dist.all_reduce(told, dist.ReduceOp.MAX, group=self._channel)
        highest, minus_lowest, *used_anywhere = told.tolist()
        if highest != -minus_lowest:
            raise RuntimeError(
                "processes called the layers of this model in different orders, which FSDP2 mixes "
                "up: set fsdp_auto_wrap_policy to NO_WRAP in the hardware file, or use DDP"
            )
        for parameter, here, anywhere in zip(parameters, used, used_anywhere, strict=True):
            if anywhere and not here:
                parameter.grad = torch.zeros_like(parameter)
