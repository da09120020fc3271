"""The tensors of a checkpoint: what is in it, under which names, and how it is read and written.

The names are those of the model as its author wrote it, whatever DDP, FSDP2 or torch.compile
wrap around it: `model.<name>`, `optimizer.<parameter>.<key>`, `ema.<parameter>`. The files are
safetensors: reading them executes no code. Each process writes and reads its own share.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from evenstep.average import Average

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
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.optim import Optimizer

State = dict[str, Any]  # nested dicts of tensors


def collect(model: nn.Module, optimizer: Optimizer, ema: Average | None) -> State:
    """The live tensors of a run, by section: reading into them restores it.

    An optimizer that has not stepped has no section: asking DCP for it would make one by a step.
    """
    state: State = {"model": get_model_state_dict(model)}
    if optimizer.state:
        state["optimizer"] = get_optimizer_state_dict(model, optimizer)["state"]
    if ema is not None:
        state["ema"] = dict(ema.tensors)
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


def write(directory: Path, tensors: dict[str, Tensor], group: Any = None) -> None:
    """Write each process's share, over `group`. A process that fails raises RuntimeError on all."""
    writer = HuggingFaceStorageWriter(str(directory), save_distributed=True)
    planner = _OwnMemory()
    with _dcp():
        state_dict_saver.save(tensors, storage_writer=writer, planner=planner, process_group=group)


def targets(directory: Path, model: nn.Module, optimizer: Optimizer, ema: Average | None) -> State:
    """What to read a checkpoint into. Raises ValueError, naming tensors, if it does not fit."""
    stored = _stored(directory, device="meta")
    keys = (name.removeprefix("optimizer.") for name in stored if name.startswith("optimizer."))
    _make_optimizer_state(model, optimizer, {key.rpartition(".")[0] for key in keys})
    state = collect(model, optimizer, ema)
    check_fit(directory, flatten(state), stored)
    return state


def read(directory: Path, state: State, model: nn.Module) -> None:
    """Fill the tensors of `state`, each process those that it holds."""
    with _dcp():
        reader = HuggingFaceStorageReader(str(directory))
        state_dict_loader.load(flatten(state), storage_reader=reader)
    # For modules with hooks, whose `state_dict` is not their live tensors.
    set_model_state_dict(model, state["model"])


def read_whole(directory: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint, whole, on the CPU of each process."""
    whole = _stored(directory, device="cpu")
    with _dcp():
        state_dict_loader.load(whole, storage_reader=HuggingFaceStorageReader(str(directory)))
    return whole


def full_weights(model: nn.Module) -> dict[str, Tensor]:
    """The whole state of the model, on the CPU of the main process; {} elsewhere.

    To be called on all processes, which gather what each of them holds a share of.
    """
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    whole = flatten(get_model_state_dict(model, options=options))
    # One that is whole and on the CPU already would be the live one, which is going to change.
    return {name: tensor.clone() for name, tensor in whole.items()}


def _stored(directory: Path, device: str) -> dict[str, Tensor]:
    """Empty tensors with the names, shapes and dtypes of those of a checkpoint."""
    metadata: Any = HuggingFaceStorageReader(str(directory)).read_metadata().state_dict_metadata
    return {
        name: torch.empty(tuple(each.size), dtype=each.properties.dtype, device=device)
        for name, each in metadata.items()
    }


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


def check_fit(directory: Path, tensors: Mapping[str, Tensor], stored: Mapping[str, Tensor]) -> None:
    """Raises ValueError, naming the first tensors that differ in name, shape or dtype."""
    here, there = (
        {name: f"{tuple(tensor.shape)} {tensor.dtype}" for name, tensor in named.items()}
        for named in (tensors, stored)
    )
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
