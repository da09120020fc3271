"""Schedule-free AdamW (Defazio et al., "The Road Less Scheduled", 2024) as schedulefree has it.

It trains at y, between the weights of its inner steps, z, and their average, x, which is evaluated.
The run's warmup takes the place of its own. Traps of schedulefree 1.4 (read in its source):

- Its count of steps and its sum of weights are in the groups, where no checkpoint finds them.
- `eval` and `train` move the weights by arithmetic, which does not give the same bits back.
- `eval` and `train` make an empty state for parameters that never had a gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from schedulefree import AdamWScheduleFree  # type: ignore[import-untyped]
from torch import Tensor

_FIRST: dict[str, Any] = {"k": 0, "weight_sum": 0.0, "lr_max": -1.0}


class ScheduleFree(AdamWScheduleFree):  # type: ignore[misc]
    """In training mode; its numbers are kept in the state of each parameter."""

    def __init__(self, groups: list[dict[str, Any]], **options: Any) -> None:
        super().__init__(groups, **options)
        for group in self.param_groups:
            group["train_mode"] = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group |= self._numbers(group)
        super().step(closure)
        for group in self.param_groups:
            numbers = {key: torch.tensor(group[key], dtype=torch.float64) for key in _FIRST}
            for state in self._states(group):
                state.update({key: number.clone() for key, number in numbers.items()})

    def _numbers(self, group: dict[str, Any]) -> dict[str, Any]:
        """Of the last step of a group: all of its parameters that have taken one agree."""
        for state in self._states(group):
            return {key: type(first)(state[key].item()) for key, first in _FIRST.items()}
        return _FIRST

    def _states(self, group: dict[str, Any]) -> list[dict[str, Tensor]]:
        states = (self.state.get(parameter, {}) for parameter in group["params"])
        return [state for state in states if "z" in state]

    @contextmanager
    @torch.no_grad()
    def in_place(self) -> Iterator[None]:
        """The parameters hold the average; at exit they get back what they held, bit for bit."""
        averaged = [
            (parameter, parameter.clone(), 1 - 1 / group["betas"][0])
            for group in self.param_groups
            for parameter in group["params"]
            if "z" in self.state.get(parameter, {})
        ]
        for parameter, _, weight in averaged:
            parameter.lerp_(self.state[parameter]["z"], weight)
        try:
            yield
        finally:
            for parameter, held, _ in averaged:
                parameter.copy_(held)
