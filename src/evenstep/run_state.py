"""What a run carries from step to step beside its tensors, and how it is saved and resumed."""

from __future__ import annotations

import math
import time
from collections import ChainMap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from evenstep import checkpoint, checkpoint_files, early_stopping
from evenstep.checkpoint import Saver
from evenstep.config import RunConfig
from evenstep.config_file import difference, to_yaml
from evenstep.config_sections import EarlyStopping
from evenstep.files import write_atomically
from evenstep.hardware import Hardware
from evenstep.learner import Learner
from evenstep.processes import on_main
from evenstep.run_directory import RunDirectory, create
from evenstep.task import Task

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
    streams: dict[str, Any] = field(default_factory=dict)
    """Where streams stand, by number: those of this process; in a checkpoint, all of them."""
    best_watched: float | None = None
    """The best value so far of the metric that early stopping watches."""
    evaluations_since: int = 0
    """Evaluations after that best one."""
    stopped_early: str | None = None
    """Why early stopping has ended the run."""

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
    def passes(self) -> list[float]:
        """Of each of this process's streams, over its data."""
        return [stream["epoch"] for stream in self.streams.values()]

    @property
    def is_best(self) -> bool:
        return self.best_step == self.step

    def remaining(self, last_step: int) -> range:
        """The steps that are still to be done."""
        return range(self.step + 1, self.step + 1 if self.stopped_early else last_step + 1)

    def evaluated(self, metrics: dict[str, Any], task: Task, rule: EarlyStopping | None) -> None:
        """Take over an evaluation at this step: is it the best, and is it time to stop early?"""
        best_metric, higher_is_better = f"eval/{task.best_metric}", task.higher_is_better
        if best_metric not in metrics:
            raise ValueError(
                f"best_metric {best_metric!r} is not in what summarize gave: {', '.join(metrics)}"
            )
        self.metrics = metrics
        value = float(metrics[best_metric])
        before = self.best["value"] if self.best else math.inf * (-1 if higher_is_better else 1)
        better = value > before if higher_is_better else value < before
        if better and math.isfinite(value):  # a checkpoint holds no infinity
            self.best = {"metric": best_metric, "value": value, "step": self.step}
        if watched := early_stopping.watched(rule, task):
            self._watch(watched)

    def _watch(self, watched: early_stopping.Watched) -> None:
        value, best = watched.value(self.metrics), self.best_watched
        if watched.improves(value, best):
            self.best_watched, self.evaluations_since = value, 0
        else:
            self.evaluations_since += 1
        if self.evaluations_since >= watched.rule.patience:
            self.stopped_early = (
                f"eval/{watched.name} has not been better than {self.best_watched} for "
                f"{self.evaluations_since} evaluation(s)"
            )


def open_directory(config: RunConfig, stem: str) -> tuple[RunDirectory, RunConfig]:
    """The run directory, new or not, and the run config, with the micro-batch size that an earlier
    launch found. Raises ValueError if the directory belongs to another run config."""
    text = to_yaml(config)
    directory = create(config.output_dir, config.name, stem, config.resume, text)
    if directory.saved_config is not None:
        old = _parsed(directory.path, directory.saved_config)
        size = old.get("micro_batch_size")
        if config.micro_batch_size == "auto":
            config = config.model_copy(update={"micro_batch_size": size})
        elif size == "auto":  # that launch ended before it had found a number
            old["micro_batch_size"] = config.micro_batch_size
            record(config, directory)
        _refuse_changes(directory.path, old, config)
    return directory, config


def record(config: RunConfig, directory: RunDirectory) -> None:
    """Keep what the run config came to in `config.yaml`."""
    on_main(lambda: write_atomically(directory.path / "config.yaml", to_yaml(config)))


def save(
    state: RunState, learner: Learner, config: RunConfig, saver: Saver, hardware: Hardware
) -> None:
    """Save a checkpoint of this step; in the background, `saver.wait` tells when it is complete."""
    # Each process has its own. A copy: training goes on while this is written in the background.
    streams = dict(ChainMap(*hardware.gather(state.streams)))
    saver.save(
        state.step,
        learner.strategy.tensors(learner.average),
        state={**asdict(state), "streams": streams, **learner.numbers()},
        config_yaml=to_yaml(config),
        best_step=state.best_step,
    )


def restore(learner: Learner, config: RunConfig, directory: RunDirectory) -> RunState:
    """The state to go on from, the learner's tensors restored to it; a new one for a new run.

    Raises ValueError, with what differs, if a key that decides the result has changed.
    """
    path = checkpoint.find(directory.path, config.resume) if config.resume != "never" else None
    state = RunState()
    if path is not None:
        text = (path / "config.yaml").read_text(encoding="utf-8")
        _refuse_changes(path, _parsed(path, text), config)
        saved = checkpoint.load(path, learner.strategy.tensors(learner.average))
        learner.restore_numbers(saved)
        state = RunState(**{key: saved[key] for key in asdict(state)})
    on_main(lambda: _say_and_abandon(path, state, directory.path))
    return state


def _say_and_abandon(path: Path | None, state: RunState, directory: Path) -> None:
    if path is not None:
        print(f"resuming from {path}", flush=True)
    # In this order, so that `best` never names a checkpoint that has just been renamed.
    checkpoint_files.point_best(directory, state.best_step)
    checkpoint_files.abandon_newer(directory, state.step)


def _parsed(where: Path, saved: str) -> dict[str, Any]:
    try:
        return dict(yaml.safe_load(saved))
    except (yaml.YAMLError, TypeError, ValueError) as error:
        raise ValueError(f"{where}/config.yaml is damaged; give the run another name") from error


def _refuse_changes(where: Path, old: dict[str, Any], config: RunConfig) -> None:
    """Raise ValueError if a key that decides the result differs from that of an earlier launch."""
    if changed := difference(old, config):
        changes = "\n  ".join(changed)
        raise ValueError(
            f"{where} was started with another run config, and a run is a function of its run "
            f"config:\n  {changes}\nGive the values it was started with, or start a new run with "
            "another name"
        )
