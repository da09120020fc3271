"""A run in small, for tests: model, optimizer and EMA that train, save and load."""

from __future__ import annotations

import copy
import hashlib
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from evenstep import checkpoint
from evenstep import checkpoint_files as files
from evenstep.average import Average
from evenstep.checkpoint import PlainTensors, Saver

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from launching import run
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

ADAMW = {"cls": torch.optim.AdamW, "lr": 0.1, "weight_decay": 0.1}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": ADAMW,
    "adamw foreach": ADAMW | {"foreach": True},
    "adamw fused": ADAMW | {"fused": True},
    "sgd": {"cls": torch.optim.SGD, "lr": 0.1},
    "sgd momentum": {"cls": torch.optim.SGD, "lr": 0.1, "momentum": 0.9, "weight_decay": 0.1},
    "sgd momentum fused": {"cls": torch.optim.SGD, "lr": 0.1, "momentum": 0.9, "fused": True},
}


class Net(nn.Module):
    """Convolution, BatchNorm, tied weights, a frozen and an unused parameter."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 3)
        self.norm = nn.BatchNorm2d(6)
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.unused = nn.Linear(2, 2)
        self.frozen = nn.Parameter(torch.randn(6), requires_grad=False)
        self.to(dtype)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.norm(self.conv(images)).mean((2, 3))
        return self.second(self.first(hidden)) * self.frozen


class Run:
    """A model, optimizer and EMA, as `train.py` makes them, that can train a step."""

    def __init__(
        self,
        seed: int,
        *,
        model: Net | None = None,
        optimizer: str = "adamw",
        dtype: torch.dtype = torch.float32,
        wrap: Callable[[nn.Module], Any] = lambda model: model,
    ) -> None:
        torch.manual_seed(seed)
        unused = DistributedDataParallelKwargs(find_unused_parameters=True)
        self.accelerator = Accelerator(cpu=True, kwargs_handlers=[unused])
        self.plain = model or Net(dtype)
        self.ema = Average(dict(self.plain.named_parameters()), 0.9)
        settings = dict(OPTIMIZERS[optimizer])
        raw = settings.pop("cls")(self.plain.parameters(), **settings)
        self.model, prepared = self.accelerator.prepare(wrap(self.plain), raw)
        self.optimizer = prepared.optimizer
        self.images = torch.randn(8, 1, 5, 5, dtype=dtype)

    def train(self, steps: int) -> Run:
        for step in range(steps):
            torch.manual_seed(step)
            self.model(torch.randn_like(self.images)).square().sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.ema.update()
        return self

    @property
    def tensors(self) -> PlainTensors:
        return PlainTensors(self.model, self.optimizer, self.ema)

    def save(self, run_dir: Path, step: int = 1, **state: Any) -> Path:
        with Saver(run_dir, keep=9) as saver:
            saver.save(step, self.tensors, state=state, config_yaml="seed: 0\n", best_step=None)
        return files.directory(run_dir, step)

    def load(self, path: Path) -> dict[str, Any]:
        return checkpoint.load(path, self.tensors)

    def state(self) -> dict[str, Any]:
        """Everything that decides how training goes on; made without the module under test."""
        names = {id(p): name for name, p in self.plain.named_parameters()}
        state = self.optimizer.state
        return copy.deepcopy(
            {
                **{f"model {k}": v for k, v in self.plain.state_dict().items()},
                **{f"ema {k}": v for k, v in self.ema.tensors.items()},
                **{f"optimizer {names[id(p)]} {k}": v for p in state for k, v in state[p].items()},
            }
        )


def assert_same(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype, name
        assert torch.equal(actual[name], tensor), name


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


def names(run_dir: Path) -> list[str]:
    return sorted(p.name for p in (run_dir / "checkpoints").iterdir())


def weights_sha256(model: nn.Module) -> str:
    return checkpoint.weights_sha256(get_model_state_dict(model))


def digest(run: Run) -> str:
    """What `assert_same` compares, for runs in different processes."""
    state = run.state()
    parts = [f"{name} {state[name].dtype} {state[name].tolist()}" for name in sorted(state)]
    return hashlib.sha256("".join(parts).encode()).hexdigest()


def stored_keys(path: Path) -> set[str]:
    from safetensors import safe_open

    keys: set[str] = set()
    for file in path.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            keys |= set(opened.keys())
    return keys


def script(tmp_path: Path, body: str, *, processes: int = 1) -> tuple[int, str]:
    """(return code, output) of Python code that sees this module, on CPU processes."""
    prelude = f"""
        import atexit, os, resource, shutil, signal, sys, threading
        import pytest
        from checkpoint_run import *
        from evenstep.processes import let_threads_finish
        torch.set_num_threads(1)
        atexit.register(let_threads_finish)
        run_dir = Path({str(tmp_path / "run")!r})
    """
    file = tmp_path / "script.py"
    file.write_text(textwrap.dedent(prelude) + textwrap.dedent(body))
    options = f"--multi_gpu --num_processes {processes} --num_machines 1 --main_process_port 0"
    launcher = ["-m", "accelerate.commands.launch", *options.split(), "--mixed_precision", "no"]
    launched = [*launcher, "--dynamo_backend", "no"] if processes > 1 else []
    return run([sys.executable, *launched, str(file)], timeout=150)
