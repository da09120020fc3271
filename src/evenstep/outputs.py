"""Where a run tells what it does: the console, trackers, checkpoints, and why it ended."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from evenstep import environment, progress, replay
from evenstep.checkpoint import Saver
from evenstep.config import RunConfig
from evenstep.config_file import resolved
from evenstep.hardware import Hardware
from evenstep.run_directory import RunDirectory
from evenstep.run_state import RunState
from evenstep.task import Task
from evenstep.tracking import Tracking
from evenstep.watchdog import Watchdog


@dataclass(frozen=True)
class Outputs:
    directory: Path
    """The run directory."""
    console: progress.Progress
    tracking: Tracking
    saver: Saver
    watchdog: Watchdog

    def alive(self, step: int) -> None:
        """Step `step` is done, or something after it goes on. Cheap."""
        self.watchdog.alive(step)
        self.console.advance(step)

    def log(self, step: int, row: dict[str, Any]) -> None:
        """All there is to tell of a step, in one call."""
        self.tracking.log(step, row)
        self.console.log(step, row)


def open_outputs(
    lifetimes: ExitStack,
    config: RunConfig,
    hardware: Hardware,
    task: Task,
    directory: RunDirectory,
    state: RunState,
    last_step: int,
) -> Outputs:
    """Closed at the end of `lifetimes`, the last one first, and told of a failure."""
    lifetimes.push(partial(directory.record_failure, state))
    environment.record(directory.path, hardware, task.data_identity)
    console = lifetimes.enter_context(
        progress.create(last_step, state.step, is_main=hardware.is_main)
    )
    rounding = replay.rounding(config.precision, config.reproducibility)
    trackers = {"say": console.say, "rounding": rounding, **dict(config.tracking)}
    tracking = Tracking(hardware.accelerator, directory.path, resolved(config), **trackers)
    timeout = config.collective_timeout
    saver = Saver(
        directory.path,
        keep=config.keep_checkpoints,
        background=config.async_save,
        timeout=timeout,
    )
    return Outputs(
        directory.path,
        console,
        lifetimes.enter_context(tracking),
        lifetimes.enter_context(saver),
        lifetimes.enter_context(Watchdog(directory.path, hardware.rank, timeout)),
    )
