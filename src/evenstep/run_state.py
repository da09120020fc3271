"""What a run carries from step to step beside its tensors, and how it is saved and resumed."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from evenstep import checkpoint, checkpoint_files
from evenstep.config import RunConfig
from evenstep.config_file import difference, to_yaml
from evenstep.learner import Learner
from evenstep.processes import on_main
from evenstep.run_directory import RunDirectory, create

import yaml


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
    def best_step(self) -> int | None:
        return self.best["step"] if self.best else None

    @property
    def is_best(self) -> bool:
        return self.best_step == self.step

    def evaluated(self, metrics: dict[str, Any], best_metric: str, higher_is_better: bool) -> None:
        """Take over an evaluation at this step."""
        if best_metric not in metrics:
            raise ValueError(
                f"best_metric {best_metric!r} is not in what summarize gave: {', '.join(metrics)}"
            )
        self.metrics = metrics
        value = float(metrics[best_metric])
        before = self.best["value"] if self.best else math.inf * (-1 if higher_is_better else 1)
        if value > before if higher_is_better else value < before:  # never true of a NaN
            self.best = {"metric": best_metric, "value": value, "step": self.step}


def open_directory(config: RunConfig, stem: str) -> RunDirectory:
    """The run directory, new or not. Raises ValueError if it belongs to another run config."""
    text = to_yaml(config)
    directory = create(config.output_dir, config.name, stem, config.resume, text)
    if directory.saved_config is not None:
        _refuse_changes(directory.path, directory.saved_config, config)
    return directory


def save(state: RunState, learner: Learner, config: RunConfig, directory: Path) -> None:
    """Save a checkpoint of this step; then drop those that `keep_checkpoints` does not keep."""
    checkpoint.save(
        directory,
        state.step,
        model=learner.model,
        optimizer=learner.optimizer,
        ema=learner.ema,
        state={**asdict(state), "scaler": learner.scaler.state_dict()},
        config_yaml=to_yaml(config),
    )
    on_main(lambda: _tidy(state, config, directory))


def _tidy(state: RunState, config: RunConfig, directory: Path) -> None:
    checkpoint_files.point_best(directory, state.best_step)
    checkpoint_files.prune(directory, config.keep_checkpoints, state.best_step)


def restore(learner: Learner, config: RunConfig, directory: RunDirectory) -> RunState:
    """The state to go on from, the learner's tensors restored to it; a new one for a new run.

    Raises ValueError, with what differs, if a key that decides the result has changed.
    """
    path = checkpoint.find(directory.path, config.resume) if config.resume != "never" else None
    state = RunState()
    if path is not None:
        _refuse_changes(path, (path / "config.yaml").read_text(encoding="utf-8"), config)
        saved = checkpoint.load(
            path, model=learner.model, optimizer=learner.optimizer, ema=learner.ema
        )
        learner.scaler.load_state_dict(saved.pop("scaler"))
        state = RunState(**saved)
    on_main(lambda: _say_and_abandon(path, state, directory.path))
    return state


def _say_and_abandon(path: Path | None, state: RunState, directory: Path) -> None:
    if path is not None:
        print(f"resuming from {path}", flush=True)
    checkpoint_files.abandon_newer(directory, state.step)
    checkpoint_files.point_best(directory, state.best_step)


def _refuse_changes(where: Path, saved: str, config: RunConfig) -> None:
    """Raise ValueError if a key that decides the result differs from a saved `config.yaml`."""
    try:
        old = dict(yaml.safe_load(saved))
    except (yaml.YAMLError, TypeError, ValueError) as error:
        raise ValueError(f"{where}/config.yaml is damaged; give the run another name") from error
    if changed := difference(old, config):
        changes = "\n  ".join(changed)
        raise ValueError(
            f"{where} was started with another run config, and a run is a function of its run "
            f"config:\n  {changes}\nGive the values it was started with, or start a new run with "
            "another name"
        )
