"""Checkpoints: `<run_dir>/checkpoints/step-00000100/`, the same whatever hardware wrote them.

A checkpoint holds tensors (`*.safetensors`: weights, optimizer state, EMA), `state.json` (the
step and other numbers), `config.yaml` (the resolved run config) and `manifest.json`. No sampler,
scheduler, worker or generator state: these are functions of the config and the step.
Except `unwrap`, all of it is called on all processes together, and fails on all together.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from evenstep import checkpoint_files as files
from evenstep.files import to_json
from evenstep.processes import is_main, on_main, together

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel


def save(
    run_dir: Path,
    step: int,
    *,
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
        return checkpoint_tensors.flatten(checkpoint_tensors.collect(model, optimizer, ema))

    def complete() -> None:
        numbers = to_json({"step": step, **state}, indent=2)
        (tmp / "state.json").write_text(numbers + "\n", encoding="utf-8")
        (tmp / "config.yaml").write_text(config_yaml, encoding="utf-8")
        files.complete(tmp, final)

    final = files.directory(run_dir, step)
    tmp = files.temporary(final)
    try:
        on_main(lambda: files.begin(tmp))
        checkpoint_tensors.write(tmp, together(collect))
        on_main(complete)
    except Exception as error:
        if is_main():
            shutil.rmtree(tmp, ignore_errors=True)  # it may fill the disk
        raise RuntimeError(f"could not save {final}: {error}") from error
    return final


def find(run_dir: Path, resume: str) -> Path | None:
    """The checkpoint to resume from, the same on every process.

    `resume` is "auto" (the newest one that is complete and undamaged, or None), "best", or the path
    of a checkpoint or of a run's `best` file: ValueError, naming the file, if that one is broken.
    """

    def look() -> Path | None:
        if resume == "auto":
            return files.newest(run_dir)
        try:
            return files.resolve(run_dir / files.BEST if resume == "best" else Path(resume))
        except (OSError, ValueError) as error:
            raise ValueError(f"resume: {resume}: {error}") from error

    return on_main(look)


def load(
    path: Path,
    *,
    model: nn.Module,
    optimizer: Optimizer,
    ema: AveragedModel | None,
) -> dict[str, Any]:
    """Restore model, optimizer and EMA in place; returns the saved `state`, with its "step".

    Raises ValueError, naming the first keys, if the checkpoint does not fit.
    """
    from evenstep import checkpoint_tensors

    def prepare() -> tuple[checkpoint_tensors.State, dict[str, Any]]:
        numbers = json.loads((path / "state.json").read_bytes())
        return checkpoint_tensors.targets(path, model, optimizer, ema), numbers

    tensors, numbers = together(prepare)
    checkpoint_tensors.read(path, tensors, model, ema)
    return numbers


def weights_sha256(model: nn.Module) -> str:
    """SHA-256 over the sorted names, dtypes, shapes and bytes of the model's state.

    Names and values are those of the model without DDP, FSDP2 or torch.compile around it.
    """
    from evenstep.checkpoint_tensors import flatten

    from torch.distributed.checkpoint.state_dict import get_model_state_dict
    from torch.distributed.tensor import DTensor

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
    on_main(write)
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
