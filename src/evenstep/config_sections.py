"""Sections of the run config that any task can use: optimizer, schedule, early stopping.

An optimizer or a schedule is picked by its name; each class holds the keys of one.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from evenstep.schedule import Duration, ScheduleName
from evenstep.sections import Section

from pydantic import Field, PlainSerializer, PlainValidator, ValidationInfo, field_validator


def _parsed(value: Any) -> Duration:
    return value if isinstance(value, Duration) else Duration.parse(value)


def _written(duration: Duration) -> int | str:
    return int(duration.value) if duration.unit == "steps" else str(duration)


DurationField = Annotated[Duration, PlainValidator(_parsed), PlainSerializer(_written)]
Beta = Annotated[float, Field(ge=0, lt=1)]
PositiveBeta = Annotated[float, Field(gt=0, lt=1)]


class Optimizer(Section):
    """What the optimizers share."""

    name: str

    lr: float = Field(default=1e-3, gt=0, title="learning rate")
    """Peak learning rate."""

    weight_decay: float = Field(default=0.0, ge=0)
    """Weight decay of matrices and filters; norms and biases (1-D parameters) never decay."""

    layer_decay: float | None = Field(default=None, gt=0, le=1)
    """The learning rate of each block of layers is this share of the next block's; embeddings come
    before the first block, the head after the last. null for one learning rate."""

    max_grad_norm: float | None = Field(default=None, gt=0)
    """Gradients of a larger norm are scaled down to it; null for no clipping."""


class Adam(Optimizer):
    """What the optimizers that scale by the gradient's size share."""

    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Decay a step of the running means of the gradient and of its square."""

    eps: float = Field(default=1e-8, gt=0)
    """Added to the denominator of the update."""


class AdamW(Adam):
    name: Literal["adamw"] = "adamw"
    """Picks the optimizer: adamw, sgd, muon or schedule_free."""


class SGD(Optimizer):
    name: Literal["sgd"] = "sgd"
    """Picks the optimizer: adamw, sgd, muon or schedule_free."""

    momentum: float = Field(default=0.0, ge=0, lt=1)
    """Share of the last update that is added to the next."""

    nesterov: bool = False
    """Nesterov's momentum; needs a momentum above 0."""

    @field_validator("nesterov")
    @classmethod
    def _needs_momentum(cls, nesterov: bool, info: ValidationInfo) -> bool:
        if nesterov and info.data.get("momentum") == 0:
            raise ValueError("nesterov needs a momentum above 0, e.g. optimizer.momentum=0.9")
        return nesterov


class Muon(Adam):
    name: Literal["muon"] = "muon"
    """Picks the optimizer: adamw, sgd, muon or schedule_free. Muon steps the matrices within the
    model's repeated blocks, AdamW (betas, eps) all else: embeddings, head, norms, biases."""

    adamw_lr: float | None = Field(default=None, gt=0)
    """Peak learning rate of what AdamW steps; null for lr. Both follow the schedule."""

    momentum: Beta = 0.95
    """Decay a step of Muon's running mean of the gradient (Nesterov's)."""

    adjust_lr: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """How Muon's step depends on a matrix's shape (A, B). match_rms_adamw: 0.2 sqrt(max(A, B)), so
    that an lr for AdamW fits; original: sqrt(max(1, A/B))."""


class ScheduleFree(Adam):
    name: Literal["schedule_free"] = "schedule_free"
    """Picks the optimizer: adamw, sgd, muon or schedule_free: AdamW with an average of its own
    weights, which is evaluated, in place of a schedule."""

    betas: tuple[PositiveBeta, Beta] = (0.9, 0.999)
    """How near to the average of the weights gradients are taken; and the decay a step of the
    running mean of the gradient's square."""


class Schedule(Section):
    """What the schedules share. The fields are named like the arguments of `lr_factor`."""

    name: ScheduleName

    warmup: DurationField = Duration.parse(0)
    """The learning rate rises linearly to its peak over this duration."""

    def in_steps(self, steps_per_epoch: float, total_steps: int) -> dict[str, Any]:
        """Keyword arguments of `schedule.lr_factor`; ValueError if they do not fit into the run."""
        arguments = {
            key: value.steps(steps_per_epoch, total_steps) if isinstance(value, Duration) else value
            for key, value in self
        }
        rest = total_steps - arguments["warmup"]
        if arguments.get("decay", 0) == rest + 1:
            arguments["decay"] = rest  # 50% and 50% of 3 steps, both rounded up
        if arguments.get("decay", 0) > rest or rest < 0:
            raise ValueError(
                f"schedule.warmup ({self.warmup}) and decay do not fit into {total_steps} steps: "
                "shorten them or train longer"
            )
        return arguments


class Constant(Schedule):
    name: Literal["constant"] = "constant"
    """Picks the schedule: cosine, linear, constant, or wsd (stable, then decay)."""


class Decaying(Schedule):
    """What the schedules that end in a decay share."""

    final: float = Field(default=0.0, ge=0, le=1)
    """Share of the peak learning rate that is left at the end."""


class Cosine(Decaying):
    name: Literal["cosine"] = "cosine"
    """Picks the schedule: cosine, linear, constant, or wsd (stable, then decay)."""


class Linear(Decaying):
    name: Literal["linear"] = "linear"
    """Picks the schedule: cosine, linear, constant, or wsd (stable, then decay)."""


class WarmupStableDecay(Decaying):
    name: Literal["wsd"] = "wsd"
    """Picks the schedule: cosine, linear, constant, or wsd (stable, then decay)."""

    decay: DurationField = Duration.parse("20%")
    """The learning rate falls linearly over this duration at the end."""


class EarlyStopping(Section):
    metric: str | None = None
    """A metric of the evaluation, such as loss; null for the task's best_metric."""

    higher_is_better: bool | None = None
    """Whether the metric should rise; null where it is the task's best_metric, which tells."""

    patience: int = Field(default=3, ge=1)
    """The run ends with so many evaluations in a row that are no better than the best before."""

    min_delta: float = Field(default=0.0, ge=0)
    """A value is better than the best if it is by more than this."""
