"""Checkpoints: `<run_dir>/checkpoints/step-00000100/`, the same whatever hardware wrote them.

A checkpoint holds tensors (`*.safetensors`: weights, optimizer state, EMA), `state.json` (the
step and other numbers), `config.yaml` (the resolved run config) and `manifest.json`. No sampler,
scheduler, worker or generator state: these are functions of the config and the step.
All functions with an `accelerator` are called on all processes together, and fail on all together.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import broadcast_object_list, gather_object
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from evenstep import checkpoint_files as files

T = TypeVar("T")


def save(
    run_dir: Path,
    step: int,
    *,
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Optimizer,
    ema: AveragedModel | None,
    state: Mapping[str, Any],
    config_yaml: str,
) -> Path:
    """Write the checkpoint of `step`, atomically; `state` is plain JSON.

    Raises RuntimeError on every process, naming the one that failed (a full disk, say); the
    checkpoints that were there are untouched. One of the same step is replaced.
    """
    from evenstep import checkpoint_tensors

    def collect() -> dict[str, Tensor]:
        raw = _without_accelerate(optimizer)
        return checkpoint_tensors.flatten(checkpoint_tensors.collect(model, raw, ema))

    def complete() -> None:
        numbers = json.dumps({"step": step, **state}, indent=2)
        (tmp / "state.json").write_text(numbers + "\n", encoding="utf-8")
        (tmp / "config.yaml").write_text(config_yaml, encoding="utf-8")
        files.complete(tmp, final)

    final = files.directory(run_dir, step)
    tmp = files.temporary(final)
    try:
        _on_main(accelerator, lambda: files.begin(tmp))
        checkpoint_tensors.write(tmp, _together(accelerator, collect))
        _on_main(accelerator, complete)
    except Exception as error:
        if accelerator.is_main_process:
            shutil.rmtree(tmp, ignore_errors=True)  # it may fill the disk
        raise RuntimeError(f"could not save {final}: {error}") from error
    return final


def find(run_dir: Path, resume: str, accelerator: Accelerator) -> Path | None:
    """The checkpoint to resume from, the same on every process.

    `resume` is "auto" (the newest one that is complete and undamaged, or None), or the path of a
    checkpoint or of a run's `best` file: ValueError, naming the file, if that one is broken.
    """
    path: Path | None = None
    problem = ""
    if accelerator.is_main_process:
        try:
            path = files.newest(run_dir) if resume == "auto" else files.resolve(Path(resume))
        except (OSError, ValueError) as error:
            problem = f"resume: {resume}: {error}"
    path, problem = broadcast_object_list([path, problem])
    if problem:
        raise ValueError(problem)
    return path


def load(
    path: Path,
    *,
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Optimizer,
    ema: AveragedModel | None,
) -> dict[str, Any]:
    """Restore model, optimizer and EMA in place; returns the saved `state`, with its "step".

    Raises ValueError, naming the first keys, if the checkpoint does not fit.
    """
    from evenstep import checkpoint_tensors

    raw = _without_accelerate(optimizer)

    def prepare() -> tuple[checkpoint_tensors.State, dict[str, Any]]:
        numbers = json.loads((path / "state.json").read_bytes())
        return checkpoint_tensors.targets(path, model, raw, ema), numbers

    tensors, numbers = _together(accelerator, prepare)
    checkpoint_tensors.read(path, tensors, model, ema)
    return numbers


def weights_sha256(model: nn.Module) -> str:
    """SHA-256 over the sorted names, dtypes, shapes and bytes of the model's state.

    Names and values are those of the model without DDP, FSDP2 or torch.compile around it.
    """
    from torch.distributed.checkpoint.state_dict import get_model_state_dict
    from torch.distributed.tensor import DTensor

    from evenstep.checkpoint_tensors import flatten

    digest = hashlib.sha256()
    for name, tensor in sorted(flatten(get_model_state_dict(model)).items()):
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.cpu().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def export(
    run_dir: Path,
    model: nn.Module,
    *,
    accelerator: Accelerator,
    task_export: Callable[[nn.Module, Path], None] | None,
) -> Path:
    """Write `<run_dir>/final/`, atomically: `model.safetensors`, config, and the task's own files.

    `task_export` gets the model without wrappers and a directory. Where it writes safetensors
    itself (as `save_pretrained` does), these are the weights.
    """
    from safetensors.torch import save_model

    def write() -> None:
        files.begin(tmp)
        if task_export:
            task_export(unwrap(model), tmp)
        if not any(tmp.glob("*.safetensors")):
            save_model(unwrap(model), str(tmp / "model.safetensors"))
        shutil.copy(run_dir / "config.yaml", tmp)
        files.publish(tmp, final)

    final = run_dir / "final"
    tmp = files.temporary(final)
    _on_main(accelerator, write)
    return final


def unwrap(model: nn.Module) -> nn.Module:
    """The model as its author wrote it, without DDP and torch.compile in any order."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif isinstance(model, torch._dynamo.OptimizedModule):
            model = model._orig_mod
        else:
            return model


def _without_accelerate(optimizer: Optimizer) -> Optimizer:
    return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer


def _together(accelerator: Accelerator, action: Callable[[], T]) -> T:
    """`action()`, called on every process. If one fails, all raise, and none waits for it."""
    if accelerator.num_processes == 1:
        return action()
    failure: Exception | None = None
    try:
        result = action()
    except Exception as error:
        failure = error
    errors = gather_object([repr(failure) if failure else ""])
    if failure:
        raise failure
    if any(errors):
        named = (f"process {rank}: {error}" for rank, error in enumerate(errors) if error)
        raise RuntimeError("; ".join(named))
    return result


def _on_main(accelerator: Accelerator, action: Callable[[], None]) -> None:
    """`action()` on the main process, while the others wait; if it fails, all raise."""
    _together(accelerator, lambda: action() if accelerator.is_main_process else None)
