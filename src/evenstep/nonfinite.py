"""Which micro-batches of a step gave a loss, or else a gradient, that is not finite."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from evenstep.config import RunConfig
from evenstep.hardware import Hardware
from evenstep.learner import Learner

from torch import Tensor

Forward = Callable[[int], Tensor]  # the loss of this process's micro-batch number `turn`


class NonFiniteError(ArithmeticError):
    """A loss or gradient is not finite; the weights are those of the step before."""


def stop_or_skip(
    config: RunConfig,
    step: int,
    losses: Sequence[Tensor],
    forward: Forward,
    learner: Learner,
    hardware: Hardware,
) -> None:
    """Raise NonFiniteError on all processes, unless the run config wants such steps left out."""
    scaler = learner.strategy.scaler
    if scaler.is_enabled() and scaler.get_scale() >= 1:
        return  # fp16 finds its loss scale by such steps
    if config.on_nonfinite == "stop":
        where = locate(step, losses, forward, learner, hardware)
        raise NonFiniteError(f"{where}; on_nonfinite=skip leaves such steps out")


def locate(
    step: int,
    losses: Sequence[Tensor],
    forward: Forward,
    learner: Learner,
    hardware: Hardware,
) -> str:
    """A sentence, the same on all processes, after a step whose gradient was not finite.

    `losses` are those of this process's micro-batches. Where they are finite, `forward(turn)`
    computes one of them anew, as the step did.
    """
    found = []
    for turn, loss in enumerate(losses):
        number = hardware.rank + turn * hardware.num_processes
        if not loss.isfinite():
            found.append(f"the loss of micro-batch {number}")
        elif not _gradient_is_finite(forward, turn, learner):
            found.append(f"the gradient of micro-batch {number}")
    learner.batchnorm.discard()
    everywhere = [text for texts in hardware.gather(found) for text in texts]
    what = ", ".join(everywhere) or "the sum of the gradients, though no micro-batch's"
    message: str = hardware.from_main(f"step {step}: {what} is not finite")
    return message


def _gradient_is_finite(forward: Forward, turn: int, learner: Learner) -> bool:
    """True also where a strategy keeps the gradient of one micro-batch to itself."""
    strategy = learner.strategy
    if not strategy.shows_gradients:
        return True
    strategy.optimizer.zero_grad()
    with strategy.micro_batch(is_last=False):
        forward(turn).backward()  # type: ignore[no-untyped-call]
    return all(p.grad.isfinite().all() for p in strategy.parameters if p.grad is not None)
