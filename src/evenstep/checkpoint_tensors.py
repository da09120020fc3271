"""The tensors of a checkpoint: what is in it, under which names, and how it is read and written.

The names are those of the model as its author wrote it, whatever DDP, FSDP2 or torch.compile
wrap around it: `model.<name>`, `optimizer.<parameter>.<key>`, `ema.<name>`. The files are
safetensors: reading them executes no code. Each process writes and reads its own share.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

State = dict[str, Any]  # nested dicts of tensors


def collect(model: nn.Module, optimizer: Optimizer, ema: AveragedModel | None) -> State:
    """The live tensors of a run, by section: reading into them restores it.

    An optimizer that has not stepped has no section: asking DCP for it would make one by a step.
    """
    state: State = {"model": get_model_state_dict(model)}
    if optimizer.state:
        state["optimizer"] = get_optimizer_state_dict(model, optimizer)["state"]
    if ema is not None:
        state["ema"] = {**get_model_state_dict(ema.module), "n_averaged": ema.n_averaged}
    return state


def flatten(state: Mapping[str, Any], prefix: str = "") -> dict[str, Tensor]:
    """{"model.0.weight": tensor, ...}. Raises ValueError for a leaf that is not a tensor."""
    flat: dict[str, Tensor] = {}
    for key, value in state.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            flat |= flatten(value, f"{name}.")
        elif isinstance(value, Tensor):
            flat[name] = value
        else:
            raise ValueError(f"{name} is a {type(value).__name__}; a checkpoint holds only tensors")
    return flat


def write(directory: Path, tensors: dict[str, Tensor]) -> None:
    """Write each process's share. A process that fails raises RuntimeError on all of them."""
    writer = HuggingFaceStorageWriter(str(directory), save_distributed=True)
    with _dcp():
        state_dict_saver.save(tensors, storage_writer=writer, planner=_OwnMemory())


def targets(
    directory: Path, model: nn.Module, optimizer: Optimizer, ema: AveragedModel | None
) -> State:
    """What to read a checkpoint into. Raises ValueError, naming tensors, if it does not fit."""
    stored = HuggingFaceStorageReader(str(directory)).read_metadata().state_dict_metadata
    keys = (name.removeprefix("optimizer.") for name in stored if name.startswith("optimizer."))
    _make_optimizer_state(model, optimizer, {key.rpartition(".")[0] for key in keys})
    state = collect(model, optimizer, ema)
    _check_fit(directory, flatten(state), stored)
    return state


def read(directory: Path, state: State, model: nn.Module, ema: AveragedModel | None) -> None:
    """Fill the tensors of `state`, each process those that it holds."""
    with _dcp():
        reader = HuggingFaceStorageReader(str(directory))
        state_dict_loader.load(flatten(state), storage_reader=reader)
    # For modules with hooks, whose `state_dict` is not their live tensors.
    set_model_state_dict(model, state["model"])
    if ema is not None:
        del state["ema"]["n_averaged"]
        set_model_state_dict(ema.module, state["ema"])


def _make_optimizer_state(model: nn.Module, optimizer: Optimizer, names: set[str]) -> None:
    """Give the optimizer fresh state, to read into, for the parameters named."""
    optimizer.state.clear()
    optimizer.zero_grad()
    # Without state and gradients, DCP makes state for all parameters, by a step with lr 0. One that
    # never had a gradient has none in the checkpoint, and must have none here.
    groups: list[Any] = list(get_optimizer_state_dict(model, optimizer)["param_groups"])
    for group, named in zip(optimizer.param_groups, groups, strict=True):
        for parameter, name in zip(group["params"], named["params"], strict=True):
            if name not in names:
                optimizer.state.pop(parameter, None)


def _check_fit(directory: Path, tensors: dict[str, Tensor], stored: Mapping[str, Any]) -> None:
    here = {name: f"{tuple(t.shape)} {t.dtype}" for name, t in tensors.items()}
    there = {name: f"{tuple(m.size)} {m.properties.dtype}" for name, m in stored.items()}
    problems = [
        f"{name} is {there.get(name, 'missing')} in the checkpoint and {here.get(name, 'missing')}"
        " in this run"
        for name in sorted({**here, **there}, key=lambda name: (name[:6] != "model.", name))
        if here.get(name) != there.get(name)
    ]
    if problems:
        more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise ValueError(f"{directory} does not fit: {'; '.join(problems[:3])}{more}")


class _OwnMemory(DefaultSavePlanner):
    """Copies each tensor: safetensors refuses tied weights and strides (channels_last)."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        return object.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


@contextmanager
def _dcp() -> Iterator[None]:
    """DCP without its warning about a single process, and with an error that can be caught:
    CheckpointException is a BaseException, which `except Exception` lets through."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            yield
        except CheckpointException as failure:
            errors = (f"process {rank}: {error[0]!r}" for rank, error in failure.failures.items())
            raise RuntimeError("; ".join(errors)) from failure
