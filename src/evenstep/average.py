"""Averaged weights (EMA, SWA): an average of each parameter, which moves once a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import get_ema_multi_avg_fn, get_swa_multi_avg_fn


class Average:
    """With `decay`, average = decay * average + (1 - decay) * parameter after each step, starting
    from the initial weights (EMA). Without, the mean of the parameters after each step but the
    first `start` (SWA, Izmailov et al., 2018); up to there, the parameters themselves.

    Each process averages what it holds of a parameter: all of it, or its share (a DTensor, or a
    plain tensor). Buffers have no average: evaluation takes the model's own.
    """

    tensors: dict[str, Tensor]
    """The averages by the parameters' names; DTensors where the parameters are."""

    count: int
    """Steps so far, but those left out after the start; a checkpoint has to keep it."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        decay: float | None,
        *,
        start: int = 0,
        swapped: Callable[[], None] = lambda: None,
    ) -> None:
        """`swapped` is called whenever the parameters have changed places with the averages: for
        a strategy that may still hold weights gathered from them."""
        self._parameters = list(parameters.values())
        self.tensors = {name: p.detach().clone() for name, p in parameters.items()}
        self._move: Callable[[list[Tensor], list[Tensor], int], None] = (
            get_swa_multi_avg_fn() if decay is None else get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
        )
        self._start, self.count = start, 0
        self._swapped = swapped

    def update(self) -> None:
        """After each step that is not left out."""
        num_averaged = max(0, self.count - self._start)
        self._move(_local(self.tensors.values()), _local(self._parameters), num_averaged)
        self.count += 1

    def skip(self) -> None:
        """After each step that is left out: it brings the start nearer, and is averaged nowhere."""
        self.count += self.count < self._start

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The parameters hold the averages; at exit they get back what they held, bit for bit."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        averages, parameters = _local(self.tensors.values()), _local(self._parameters)
        for average, parameter in zip(averages, parameters, strict=True):
            held = parameter.clone()  # one at a time: no third copy of the model
            parameter.copy_(average)
            average.copy_(held)
        self._swapped()


def _local(tensors: Iterable[Tensor]) -> list[Tensor]:
    """What this process holds of them, in the same memory."""
    bare = (tensor.detach() for tensor in tensors)
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in bare]
