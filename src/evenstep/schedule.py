"""Schedules as pure functions of the step: the learning rate, durations, and what is due when."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

ScheduleName = Literal["cosine", "linear", "constant", "wsd"]
Unit = Literal["steps", "epochs", "percent"]

_DURATION = re.compile(r"(\d{1,15}(?:\.\d+)?)\s*(steps?|epochs?|%)?")


@dataclass(frozen=True)
class Duration:
    """A length of training: `100` or "100 steps", "2 epochs", "5%" of all steps."""

    value: float
    unit: Unit

    @classmethod
    def parse(cls, text: int | str) -> Duration:
        """Raises ValueError for anything but `N`, "N steps", "N epochs" or "N%"."""
        match = _DURATION.fullmatch(str(text).strip()) if not isinstance(text, bool) else None
        if match is None:
            raise ValueError(f'{text!r} is not a duration: write 100, "2 epochs" or "5%"')
        value, suffix = float(match[1]), (match[2] or "steps")
        unit: Unit = "percent" if suffix == "%" else "epochs" if suffix[0] == "e" else "steps"
        if unit == "steps" and value != int(value):
            raise ValueError(f"{text!r} is not a duration: steps are whole numbers")
        if unit == "percent" and value > 100:
            raise ValueError(f"{text!r} is not a duration: at most 100%")
        return cls(value, unit)

    def steps(self, steps_per_epoch: float, total_steps: int) -> int:
        """The nearest whole number of steps; at least 1 unless the duration is 0."""
        if self.value == 0:
            return 0
        scale = {"steps": 1.0, "epochs": steps_per_epoch, "percent": total_steps / 100}[self.unit]
        return max(1, round(self.value * scale))

    def __str__(self) -> str:
        number = f"{self.value:.15g}"
        if self.unit == "percent":
            return f"{number}%"
        return number if self.unit == "steps" else f"{number} epoch{'s' * (self.value != 1)}"


def lr_factor(
    step: int,
    total_steps: int,
    name: ScheduleName,
    warmup: int = 0,
    decay: int = 0,
    final: float = 0.0,
) -> float:
    """The factor on the peak learning rate that step `step` (from 1) uses.

    `warmup` steps rise linearly to 1. Then "cosine" and "linear" fall to `final` at the step after
    the last; "constant" stays at 1; "wsd" (warmup-stable-decay) stays at 1 and falls linearly
    over the last `decay` steps.
    """
    done = step - 1
    if done < warmup:
        return step / warmup
    if name == "constant":
        return 1.0
    start = total_steps - decay if name == "wsd" else warmup
    if done < start:
        return 1.0
    progress = min(1.0, (done - start) / max(1, total_steps - start))
    remaining = (1 + math.cos(math.pi * progress)) / 2 if name == "cosine" else 1 - progress
    return final + (1 - final) * remaining


def due(step: int, every: int, last: int) -> bool:
    """Whether something done every `every` steps, and after the last step, is due after `step`.

    `every` 0 means only after the last step.
    """
    return step == last or (every > 0 and step % every == 0)
