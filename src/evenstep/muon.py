"""Muon for the matrices inside a model, AdamW for all else, as one optimizer.

Muon (Jordan et al., 2024, https://kellerjordan.github.io/posts/muon/; torch.optim.Muon) steps along
the orthogonalised momentum of a matrix. It orthogonalises in bfloat16, whatever the precision of
the weights, so that float rounding of a gradient may become one of bfloat16 in the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer


class Combined(Optimizer):
    """Several optimizers as one, each with groups of its own; the state is one for all of them."""

    def __init__(self, *parts: Optimizer) -> None:
        self._parts: Sequence[Optimizer] = parts
        for number, part in enumerate(parts):
            for group in part.param_groups:
                group["part"] = number
        super().__init__([group for part in parts for group in part.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """`closure` is None: it is in the signature for torch's checkpoints, which name it."""
        for number, part in enumerate(self._parts):
            # Handed over anew: a `load_state_dict`, as in Accelerate, replaces groups and state.
            part.param_groups = [g for g in self.param_groups if g["part"] == number]
            part.state = self.state
            part.step()
