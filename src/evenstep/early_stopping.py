"""Early stopping: the end of a run whose evaluations no longer improve."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from evenstep.config_sections import EarlyStopping
from evenstep.task import Task


@dataclass(frozen=True)
class Watched:
    """The metric that decides."""

    name: str
    higher_is_better: bool
    rule: EarlyStopping

    def value(self, metrics: Mapping[str, Any]) -> float:
        """Its value in an evaluation, whose keys are eval/<name>. Raises ValueError, with the
        metrics that there are, if it is none of them."""
        value = metrics.get(f"eval/{self.name}")
        if not isinstance(value, int | float):
            numbers = [k[5:] for k, v in metrics.items() if isinstance(v, int | float)]
            raise ValueError(
                f"early_stopping.metric {self.name!r} is no metric that is a number: give one of "
                f"{', '.join(numbers)}"
            )
        return float(value)

    def improves(self, value: float, best: float | None) -> bool:
        """Whether a value is better than the best by more than min_delta. What is not finite never
        is; nor would a checkpoint hold it."""
        if best is None or not math.isfinite(value):
            return math.isfinite(value)
        gain = value - best if self.higher_is_better else best - value
        return gain > self.rule.min_delta


def check_rule(rule: EarlyStopping | None, task: Task, *, eval_every: int, last_step: int) -> None:
    """Raises ValueError for a rule that cannot decide, or that could end no run of `last_step`
    steps with an evaluation every `eval_every` (0: only at the end)."""
    if watched(rule, task) is None:
        return
    assert rule is not None
    before_the_end = (last_step - 1) // eval_every if eval_every else 0
    if rule.patience >= before_the_end:
        raise ValueError(
            f"early_stopping.patience={rule.patience} cannot end this run early: its {last_step} "
            f"steps have {before_the_end} evaluation(s) before the last step, and the first of "
            "them is the best so far; make patience or eval_every smaller"
        )


def watched(rule: EarlyStopping | None, task: Task) -> Watched | None:
    """Raises ValueError where it cannot be known what an improvement is."""
    if rule is None:
        return None
    name = (rule.metric or task.best_metric).removeprefix("eval/")
    if task.eval_dataset is None:
        raise ValueError(
            "early_stopping needs evaluations, and there is no evaluation split: give the data "
            "one, or early_stopping=null"
        )
    if rule.higher_is_better is None and name != task.best_metric:
        raise ValueError(
            f"early_stopping.metric is {name}: give early_stopping.higher_is_better as well, which "
            f"the task tells of {task.best_metric} alone"
        )
    higher = task.higher_is_better if rule.higher_is_better is None else rule.higher_is_better
    return Watched(name, higher, rule)
