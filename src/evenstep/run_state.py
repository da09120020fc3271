"""What a run carries from step to step beside its tensors, and how it is saved and resumed."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from evenstep import checkpoint, checkpoint_files
from evenstep.config import RunConfig
from evenstep.config_file import difference, to_yaml
from evenstep.hardware import Hardware
from evenstep.learner import Learner
from evenstep.run_directory import RunDirectory


@dataclass
class RunState:
    """One mutable number, the step; and what has been counted and measured up to it."""

    step: int = 0
    skipped_steps: int = 0
    seconds: float = 0.0
    """Spent on training steps, over all launches."""
    metrics: dict[str, Any] = field(default_factory=dict)
    """Of the last evaluation."""
    best: dict[str, Any] | None = None
    """The best evaluation so far: metric, value, step."""

    @contextmanager
    def training(self, step: int) -> Iterator[None]:
        """Around the work of a step: it is done, and its time counted, at the end."""
        started = time.perf_counter()
        yield
        self.step = step
        self.seconds += time.perf_counter() - started

    @property
    def is_best(self) -> bool:
        return self.best is not None and self.best["step"] == self.step

    def evaluated(self, metrics: dict[str, Any], best_metric: str, higher_is_better: bool) -> None:
        """Take over an evaluation at this step."""
        self.metrics = metrics
        value = float(metrics[best_metric])
        before = self.best["value"] if self.best else math.inf * (-1 if higher_is_better else 1)
        if value > before if higher_is_better else value < before:  # never true of a NaN
            self.best = {"metric": best_metric, "value": value, "step": self.step}


def save(
    state: RunState, learner: Learner, config: RunConfig, directory: Path, hardware: Hardware
) -> None:
    """Save a checkpoint of this step; then drop those that `keep_checkpoints` does not keep."""
    checkpoint.save(
        directory,
        state.step,
        accelerator=hardware.accelerator,
        model=learner.model,
        optimizer=learner.optimizer,
        ema=learner.ema,
        state={**asdict(state), "scaler": learner.scaler.state_dict()},
        config_yaml=to_yaml(config),
    )
    if hardware.is_main:
        best_step = state.best["step"] if state.best else None
        if best_step == state.step:
            checkpoint_files.point_best(directory, state.step)
        checkpoint_files.prune(directory, config.keep_checkpoints, best_step)


def restore(
    learner: Learner, config: RunConfig, directory: RunDirectory, hardware: Hardware
) -> RunState:
    """The state to go on from, the learner's tensors restored to it; a new one for a new run.

    Raises ValueError, with what differs, if a key that decides the result has changed.
    """
    if directory.saved_config is not None:
        refuse_changes(directory.path, yaml.safe_load(directory.saved_config), config)
    path = checkpoint.find(directory.path, config.resume, hardware.accelerator)
    if path is None:
        return RunState()
    refuse_changes(path, yaml.safe_load((path / "config.yaml").read_text()), config)
    saved = checkpoint.load(
        path,
        accelerator=hardware.accelerator,
        model=learner.model,
        optimizer=learner.optimizer,
        ema=learner.ema,
    )
    learner.scaler.load_state_dict(saved.pop("scaler"))
    hardware.say(f"resuming from {path}")
    if hardware.is_main:
        checkpoint_files.abandon_newer(directory.path, saved["step"])
    return RunState(**saved)


def refuse_changes(where: Path, saved: Mapping[str, Any], config: RunConfig) -> None:
    if changed := difference(saved, config):
        changes = "\n  ".join(changed)
        raise ValueError(
            f"{where} was started with another run config, and a run is a function of its run "
            f"config:\n  {changes}\nGive the values it was started with, or start a new run with "
            "another name"
        )
