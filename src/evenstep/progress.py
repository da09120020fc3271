"""What the console shows: one live line in a terminal, one plain line a log step elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from evenstep.masking import mask

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress


class Progress:
    """Shows nothing: what every process but the main one has."""

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None: ...

    def advance(self, step: int) -> None:
        """Step `step` is done. Cheap: call it every step."""

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Show the scalars of a log step, `eval/...` ones on a line of their own, and texts."""

    def say(self, message: str) -> None:
        """Print a line, with secrets masked, without breaking the live line."""


class Pace:
    """Steps a second of training alone: what is timed leaves out evaluation and saving."""

    def __init__(self, step: int, seconds: float) -> None:
        self._step, self._seconds = step, seconds

    def lap(self, step: int, seconds: float) -> float:
        """The pace since the last lap, `seconds` having been spent on all steps up to `step`."""
        pace = (step - self._step) / max(seconds - self._seconds, 1e-9)
        self._step, self._seconds = step, seconds
        return pace


def create(total_steps: int, done: int = 0, *, is_main: bool = True) -> Progress:
    """Progress from step `done` to `total_steps`: a live line where stdout is a terminal."""
    if not is_main:
        return Progress()
    console = Console()
    # Not console.is_terminal: FORCE_COLOR, set by many CI systems, makes that true for a file.
    is_live = sys.stdout.isatty() and not console.is_dumb_terminal
    return LiveLine(total_steps, done, console) if is_live else PlainLines(total_steps, done)


class PlainLines(Progress):
    """`step 10/225  loss 1.234  lr 0.001  1234 samples/s  ETA 0:00:21`"""

    def __init__(self, total_steps: int, done: int):
        self._total, self._done, self._started = total_steps, done, time.monotonic()

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        head = f"step {step}/{self._total}"
        if train := _scalars(values, "train/"):
            self._show_train(head, _format(train), step)
        if evaluation := _scalars(values, "eval/"):
            self.say(f"{head}  eval  {_format(evaluation)}")
        for name, text in values.items():
            if isinstance(text, str):
                self.say(f"{head}  {name}  {_printable(text)}")

    def say(self, message: str) -> None:
        print(mask(message), flush=True)

    def _show_train(self, head: str, text: str, step: int) -> None:
        seconds_per_step = (time.monotonic() - self._started) / max(1, step - self._done)
        eta = timedelta(seconds=round(seconds_per_step * (self._total - step)))
        self.say(f"{head}  {text}  ETA {eta}")


class LiveLine(PlainLines):
    """A bar with step, time left and the numbers of the last log step."""

    def __init__(self, total_steps: int, done: int, console: Console):
        super().__init__(total_steps, done)
        self._rich = RichProgress(
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[numbers]}"),
            console=console,
            refresh_per_second=4,
        )
        self._task = self._rich.add_task("", total=total_steps, completed=done, numbers="")

    def __enter__(self) -> Progress:
        self._rich.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._rich.stop()

    def advance(self, step: int) -> None:
        self._rich.update(self._task, completed=step)

    def say(self, message: str) -> None:
        self._rich.console.print(mask(message), markup=False, highlight=False, soft_wrap=True)

    def _show_train(self, head: str, text: str, step: int) -> None:
        self._rich.update(self._task, completed=step, numbers=text)


def _printable(text: str) -> str:
    """Without control characters, which a young model writes and a terminal obeys."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


def _scalars(values: Mapping[str, Any], prefix: str) -> dict[str, float]:
    return {
        key.removeprefix(prefix): value
        for key, value in values.items()
        if key.startswith(prefix) and isinstance(value, (int, float))
    }


def _format(values: Mapping[str, float]) -> str:
    return "  ".join(
        f"{value:.0f} samples/s" if name == "samples_per_second" else f"{name} {value:.4g}"
        for name, value in values.items()
    )
