"""Memory: what to do when a micro-batch does not fit, and finding the largest that does.

The global batch stays what the user states, and the size of a running run's micro-batches never
changes: it decides the result (each micro-batch has its own dropout and BatchNorm statistics).
"""

from __future__ import annotations

import os
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from evenstep.config import RunConfig
from evenstep.data import loaders, make_plan
from evenstep.hardware import Hardware
from evenstep.learner import Learner
from evenstep.plan import Plan, divisors
from evenstep.task import Task

import psutil
import torch
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size


class OutOfMemory(RuntimeError):
    """A micro-batch did not fit; the text names those to try."""


def is_out_of_memory(error: Exception) -> bool:
    """Of any device, by the words of its allocator or library."""
    return (
        isinstance(error, MemoryError | torch.OutOfMemoryError)
        or should_reduce_batch_size(error)
        or any(words in str(error) for words in ("_STATUS_ALLOC_FAILED", "std::bad_alloc"))
    )


def candidates(global_batch_size: int, num_processes: int) -> list[int]:
    """The micro-batch sizes, from small to large, that `num_processes` processes can share."""
    share, rest = divmod(global_batch_size, num_processes)
    if rest:
        raise ValueError(
            f"global_batch_size {global_batch_size} cannot be shared evenly by {num_processes} "
            f"processes: make it a multiple of {num_processes}"
        )
    return divisors(share)


@contextmanager
def explained(plan: Plan, num_processes: int) -> Iterator[None]:
    """Around a run: turns an error for lack of memory into OutOfMemory."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemory(_advice(plan, num_processes)) from error


def _advice(plan: Plan, num_processes: int) -> str:
    sizes = candidates(plan.global_batch_size, num_processes)
    smaller = [size for size in sizes if size < plan.micro_batch_size][:-4:-1]
    if not smaller:
        return (
            f"out of memory at micro_batch_size {plan.micro_batch_size}, and there is none below: "
            "use accelerate_configs/fsdp2.yaml on several processes, or a smaller model"
        )
    return (
        f"out of memory at micro_batch_size {plan.micro_batch_size}: start a new run with "
        f"micro_batch_size={smaller[0]} (the next that fit into global_batch_size "
        f"{plan.global_batch_size}: {', '.join(map(str, smaller))}), or with auto; this run keeps "
        "its size, which decides the result, and goes on only where there is more memory"
    )


def check_auto(config: RunConfig, hardware: Hardware) -> None:
    """Raises ValueError where no size can be tried, or none would do."""
    strategy = hardware.accelerator.distributed_type.value
    sizes = candidates(config.global_batch_size, hardware.num_processes)
    if strategy in ("FSDP", "DEEPSPEED"):
        raise ValueError(
            f"micro_batch_size: auto cannot be found under {strategy}, where a forward needs all "
            "processes and one that runs out of memory would leave the others waiting; give a "
            f"number: {sizes}"
        )


def settled(
    config: RunConfig,
    task: Task,
    learner: Learner,
    hardware: Hardware,
    accumulate: Callable[[list[Any]], object],
) -> RunConfig:
    """The run config with the largest micro-batch size that fits; see `find_micro_batch_size`.

    `accumulate(batches)` adds up the gradients of this process's share of a step.
    """

    def trial(size: int) -> None:
        plan = make_plan(config.model_copy(update={"micro_batch_size": size}), task, hardware)
        batches, _ = loaders(task, plan, hardware, config, range(1, 2), {})
        accumulate(list(batches))

    size = find_micro_batch_size(config.global_batch_size, learner, hardware, trial)
    if config.compile:
        torch.compiler.reset()  # else kernels for any size, made for the trials, would be used
    hardware.say(f"micro_batch_size: auto found {size}; config.yaml keeps it for every resume")
    return config.model_copy(update={"micro_batch_size": size})


def find_micro_batch_size(
    global_batch_size: int, learner: Learner, hardware: Hardware, trial: Callable[[int], object]
) -> int:
    """The largest micro-batch size that fits into the memory of every process.

    `trial(size)` adds up the gradients of a step of micro-batches of that size, without talking
    to another process: one that fails would leave the others waiting. The learner is then as it
    was. Where samples differ in size, the first step may not hold the largest.

    Raises ValueError where no size fits.
    """
    sizes = candidates(global_batch_size, hardware.num_processes)

    def too_large(size: int) -> bool:
        (failures,) = hardware.sums([not _fits(size, learner, hardware.device, trial)])
        return failures > 0

    count = bisect_left(sizes, True, key=too_large)
    if not count:
        raise ValueError(f"no micro-batch fits into memory, not even one of {sizes[0]} sample(s)")
    return sizes[count - 1]


def _fits(
    size: int, learner: Learner, device: torch.device, trial: Callable[[int], object]
) -> bool:
    buffers = {buffer: buffer.clone() for buffer in learner.bare.buffers()}
    fits = True
    try:
        with _limited_to_free_memory(device):
            _allocate_state(learner.strategy.optimizer)
            trial(size)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        fits = False
    # Not in the `except`: there, the error's traceback still holds the tensors of the trial.
    learner.strategy.start()  # drops the gradients
    learner.strategy.optimizer.state.clear()
    with torch.no_grad():
        for buffer, before in buffers.items():
            buffer.copy_(before)
    clear_device_cache(garbage_collection=True)
    return fits


def _allocate_state(optimizer: torch.optim.Optimizer) -> None:
    """Gradients, and all that the optimizer will hold: a step of zeros at lr 0 moves no weight."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


@contextmanager
def _limited_to_free_memory(device: torch.device) -> Iterator[None]:
    """On the CPU, let an allocation fail where the kernel would kill a process for the memory."""
    if device.type != "cpu" or sys.platform != "linux":
        yield
        return
    import resource  # not on Windows

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    share = psutil.virtual_memory().available // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    limit = psutil.Process().memory_info().vms + share
    stricter = [bound for bound in (soft, limit) if bound != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(stricter), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
