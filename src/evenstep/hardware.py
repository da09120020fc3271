"""The hardware a run is launched on: the guard, the Accelerator, rehearsal on CPU, and what
processes have to say to each other outside of gradients.

Accelerate starts silently wrong in several ways on a machine without an accelerator (one process
where two were asked for, or two that each believe to be alone); every such launch ends here.
"""

from __future__ import annotations

import atexit
import math
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evenstep import fsdp2, zero_setup
from evenstep.config import RunConfig
from evenstep.processes import let_threads_finish

import torch
import torch.distributed as dist
from accelerate import (
    Accelerator,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    PartialState,
)
from accelerate.utils import (
    DistributedType,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    is_torch_xla_available,
)
from torch import Tensor

BITWISE_THREADS = 2

_REHEARSAL = (
    "REHEARSAL: this machine has no accelerator, so {} processes on its CPU stand in for it. "
    "The result is what the hardware file would give; the speed is not."
)


class LaunchError(ValueError):
    """A launch that would not do what its hardware file says; the text is the one-line fix."""


@dataclass(frozen=True)
class Hardware:
    """The Accelerator, and a channel on the CPU for counts, flags and tables.

    The channel is a gloo group of its own, so that reading a count never waits for the GPU.
    """

    accelerator: Accelerator
    channel: Any
    """A torch.distributed.ProcessGroup; None for one process."""

    @property
    def num_processes(self) -> int:
        return int(self.accelerator.num_processes)

    @property
    def rank(self) -> int:
        return int(self.accelerator.process_index)

    @property
    def device(self) -> torch.device:
        return torch.device(self.accelerator.device)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def sums(self, *columns: Sequence[float]) -> list[float]:
        """The sum of each column over its values on all processes, correctly rounded: the same on
        any number of processes. Each process gives as many values as the others."""
        rows = self._rows([value for column in columns for value in column])
        parts = torch.split(rows, [len(column) for column in columns], dim=1)
        return [_sum(part.flatten().tolist()) for part in parts]

    def everywhere(self, value: float) -> list[float]:
        """The value of each process, on all of them."""
        return self._rows([value])[:, 0].tolist()

    def _rows(self, values: Sequence[float]) -> Tensor:
        """(P, len(values)) float64: a row a process. Each gives as many as the others."""
        own = torch.tensor(values, dtype=torch.float64)
        if self.channel is None:
            return own[None]
        rows = own.new_empty(self.num_processes, len(own))
        dist.all_gather(list(rows), own, group=self.channel)
        return rows

    def gather(self, value: Any) -> list[Any]:
        """One value a process, in order of rank, on the main process; [] elsewhere."""
        if self.channel is None:
            return [value]
        gathered = [None] * self.num_processes if self.is_main else None
        dist.gather_object(value, gathered, dst=0, group=self.channel)
        return gathered or []

    def from_main(self, value: Any) -> Any:
        """The main process's value, on every process."""
        if self.channel is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.channel)
        return box[0]

    def say(self, message: str) -> None:
        """Print a line, once for all processes."""
        if self.is_main:
            print(message, flush=True)


def start(config: RunConfig) -> Hardware:
    """Check the launch, then make the Accelerator. Raises LaunchError."""
    check_settings(os.environ, config.precision)
    if config.reproducibility == "bitwise":
        _use_deterministic_kernels()
    # torch 2.13 renames it; Accelerate does not know the new name yet.
    warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated")
    no_accelerator = not torch.accelerator.is_available() and not is_torch_xla_available(True)
    plugins = _strategy_plugins(config, rehearsed=no_accelerator)
    accelerator = Accelerator(
        **plugins,
        cpu=no_accelerator and "deepspeed_plugin" not in plugins,
        mixed_precision="no",  # autocast is ours: a strategy must not change the precision
        dataloader_config=DataLoaderConfiguration(even_batches=False, non_blocking=True),
        # A plugin, since ACCELERATE_GRADIENT_ACCUMULATION_STEPS beats the plain argument; 1, since
        # the loop counts micro-batches itself; and no sync at the end of a loader, which would end
        # an accumulation early when micro-batches are read ahead.
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=1, sync_with_dataloader=False
        ),
        # Without find_unused_parameters a parameter that some micro-batch does not use (LayerDrop)
        # would keep the gradient of its own process, and DDP would notice a step too late.
        kwargs_handlers=[
            DistributedDataParallelKwargs(broadcast_buffers=False, find_unused_parameters=True),
            InitProcessGroupKwargs(timeout=config.collective_timeout),
        ],
    )
    check_processes(os.environ, accelerator.num_processes)
    if config.reproducibility == "bitwise":
        check_bitwise(accelerator)
    torch.set_num_threads(_num_threads(config))  # after the Accelerator, which sets it to 1
    timeout = config.collective_timeout
    channel = None
    if accelerator.num_processes > 1:
        channel = dist.new_group(backend="gloo", timeout=timeout)
        atexit.register(let_threads_finish)
    hardware = Hardware(accelerator, channel)
    if no_accelerator and not _meant_for_cpu(os.environ):
        alone = "no accelerator on this machine: training on its CPU"
        hardware.say(_REHEARSAL.format(hardware.num_processes) if channel else alone)
    return hardware


def check_settings(environ: Mapping[str, str], precision: str) -> None:
    """What decides results belongs to the run config; a hardware file that differs is refused."""
    asked = environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if asked not in ("no", precision):
        raise LaunchError(
            f"the hardware file asks for mixed_precision {asked!r}, the run config for precision "
            f"{precision!r}; precision decides the result: remove it from the hardware file and "
            f"put `precision: {asked}` into the run config if you want it"
        )
    backend = environ.get("ACCELERATE_DYNAMO_BACKEND", "NO")
    if backend.upper() != "NO":
        raise LaunchError(
            f"the hardware file asks for dynamo_backend {backend!r}; compiled kernels round "
            "differently: remove it, and put `compile: true` into the run config if you want it"
        )
    fsdp2.check_mesh(environ)
    if _asks_for("FSDP", environ):
        fsdp2.check(environ)
    if _asks_for("DEEPSPEED", environ):
        zero_setup.check(environ, precision)
    steps = environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
    if steps != "1":
        raise LaunchError(
            f"the hardware file asks for {steps} gradient_accumulation_steps; accumulation follows "
            "from global_batch_size, micro_batch_size and the number of processes: remove it, and "
            "put `global_batch_size` and `micro_batch_size` into the run config"
        )


def check_processes(environ: Mapping[str, str], num_processes: int) -> None:
    """Raises LaunchError when the launcher meant another number of processes than there are."""
    if "WORLD_SIZE" not in environ and "MASTER_ADDR" in environ:
        raise LaunchError(
            "the launcher was asked for several processes but started one (a MULTI_CPU file, or "
            "--cpu with --num_processes, does that): use `accelerate launch --config_file "
            "accelerate_configs/cpu_2.yaml train.py`, which runs on the CPU as well"
        )
    world_size = int(environ.get("WORLD_SIZE", "1"))
    if world_size != num_processes:
        raise LaunchError(
            f"{world_size} processes were launched, but each sees {num_processes}: launch with "
            "`accelerate launch --config_file accelerate_configs/multi_gpu.yaml --num_processes "
            f"{world_size} train.py`"
        )


def check_bitwise(accelerator: Accelerator) -> None:
    """Raises LaunchError where gradients cannot be added in the order of a binary tree."""
    strategy = accelerator.distributed_type.value
    if strategy in ("FSDP", "DEEPSPEED", "XLA"):
        raise LaunchError(
            f"reproducibility: bitwise is kept on 1 process and under DDP; {strategy} adds "
            "gradients in an order of its own: use accelerate_configs/multi_gpu.yaml, or "
            "reproducibility: rounding"
        )
    if (count := accelerator.num_processes).bit_count() != 1:
        raise LaunchError(
            f"reproducibility: bitwise adds in a binary tree, which {count} processes cannot share "
            f"evenly: launch a power of two ({1 << (count.bit_length() - 1)} or "
            f"{1 << count.bit_length()}), or set reproducibility: rounding"
        )


def _asks_for(strategy: str, environ: Mapping[str, str]) -> bool:
    return environ.get(f"ACCELERATE_USE_{strategy}", "false").lower() == "true"


def _strategy_plugins(config: RunConfig, *, rehearsed: bool) -> dict[str, Any]:
    """What makes the Accelerator use FSDP2 or DeepSpeed; without an accelerator, on CPU processes.

    Left to itself, Accelerate then takes DDP for FSDP, and one process for DeepSpeed. A
    PartialState made before the Accelerator stays.
    """
    if _asks_for("FSDP", os.environ):
        if rehearsed and "LOCAL_RANK" in os.environ:
            PartialState(cpu=True, timeout=config.collective_timeout)
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        return {"fsdp_plugin": fsdp2.plugin(rehearsed=rehearsed)}
    if _asks_for("DEEPSPEED", os.environ):
        if rehearsed:
            os.environ["DS_ACCELERATOR"] = "cpu"  # read at the first import of deepspeed
            os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
        plugin = zero_setup.plugin(config.precision)  # before the processes are connected
        if rehearsed:
            PartialState(backend="gloo", timeout=config.collective_timeout)
        return {"deepspeed_plugin": plugin}
    return {}


def _meant_for_cpu(environ: Mapping[str, str]) -> bool:
    """cpu.yaml sets ACCELERATE_USE_CPU; cpu_2.yaml and cpu_4.yaml hide the GPUs instead."""
    use_cpu = environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")
    return use_cpu or environ.get("CUDA_VISIBLE_DEVICES", "").startswith("-1")


def _num_threads(config: RunConfig) -> int:
    """CPU threads of this process. They decide the bits of sums inside a matrix product, so that
    bitwise mode has the same number on any machine and for any number of processes."""
    if config.cpu_threads != "auto":
        return config.cpu_threads
    if config.reproducibility == "bitwise":
        return BITWISE_THREADS
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, (cores or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _use_deterministic_kernels() -> None:
    """An operation that has none raises an error that names it."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False  # which times kernels, and takes the fastest today
    # It costs time, and hides nothing here.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _sum(values: Sequence[float]) -> float:
    """math.fsum, which refuses infinities of both signs."""
    return math.fsum(values) if all(map(math.isfinite, values)) else sum(values)
