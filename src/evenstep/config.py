"""The run config: everything that decides the result of a run, typed, with a sentence a key.

Keys, types, defaults and rules stand here and nowhere else. `config_file` reads them from YAML
and the command line, `config_help` prints them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal

from evenstep.plan import check_batch_sizes
from evenstep.schedule import Duration, ScheduleName
from evenstep.sections import Housekeeping, Section
from evenstep.task import Named

from pydantic import (
    Discriminator,
    Field,
    PlainSerializer,
    PlainValidator,
    Tag,
    ValidationInfo,
    field_validator,
)


def _parsed(value: Any) -> Duration:
    return value if isinstance(value, Duration) else Duration.parse(value)


def _written(duration: Duration) -> int | str:
    return int(duration.value) if duration.unit == "steps" else str(duration)


DurationField = Annotated[Duration, PlainValidator(_parsed), PlainSerializer(_written)]
Time = Annotated[timedelta, Field(gt=timedelta(0))]
# Told apart before validation: a plain union would report a problem for each of its types.
CountOrAuto = Annotated[
    Annotated[Literal["auto"], Tag("auto")] | Annotated[int, Field(ge=1), Tag("count")],
    Discriminator(lambda given: "auto" if given == "auto" else "count"),
]
Beta = Annotated[float, Field(ge=0, lt=1)]


class Optimizer(Section):
    """What the optimizers share."""

    name: str

    lr: float = Field(default=1e-3, gt=0, title="learning rate")
    """Peak learning rate."""

    weight_decay: float = Field(default=0.0, ge=0)
    """Weight decay of matrices and filters; norms and biases (1-D parameters) never decay."""

    max_grad_norm: float | None = Field(default=None, gt=0)
    """Gradients of a larger norm are scaled down to it; null for no clipping."""


class AdamW(Optimizer):
    name: Literal["adamw"] = "adamw"
    """Picks the optimizer: adamw or sgd."""

    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Decay a step of the running means of the gradient and of its square."""

    eps: float = Field(default=1e-8, gt=0)
    """Added to the denominator of the update."""


class SGD(Optimizer):
    name: Literal["sgd"] = "sgd"
    """Picks the optimizer: adamw or sgd."""

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


class Tracking(Section):
    with_: tuple[str, ...] = Field(default=("wandb",), alias="with")
    """Where metrics go, beside metrics.jsonl; [] for nowhere else."""

    project: str = "evenstep"
    """Project that the run belongs to."""

    entity: str | None = None
    """User or team that the run belongs to; null for your default one."""

    mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    """auto is online where there is a key and a network, else offline."""

    tags: tuple[str, ...] = ()
    """Tags of the run."""

    group: str | None = None
    """Runs of a group are shown together."""


@dataclass(frozen=True)
class Steps:
    """The durations of a run config in steps; 0 stands for "only at the end"."""

    last: int
    log_every: int
    eval_every: int
    save_every: int
    schedule: dict[str, Any]
    """Keyword arguments of `schedule.lr_factor`."""


class RunConfig(Section):
    """A run is a pure function of its run config."""

    name: Housekeeping[str | None] = Field(default=None, pattern=r"^\w[\w.,=+-]*$")
    """Names the run directory <output_dir>/<name>; null for the config's name and the time."""

    output_dir: Housekeeping[Path] = Path("runs")
    """Folder of the run directories."""

    seed: int = Field(default=0, ge=0)
    """Decides the first weights, the order of samples, augmentation and dropout."""

    task: Annotated[Any, Named("tasks")]
    """What is trained, on which data, and how it is judged; its name picks its keys."""

    global_batch_size: int = Field(ge=1, le=10**9, title="batch size")
    """Samples of an optimizer step, over all processes."""

    micro_batch_size: CountOrAuto
    """Samples of one forward and backward; divides global_batch_size. auto: the most that fit into
    memory, found at the first launch and kept from then on."""

    epochs: float | None = Field(default=None, gt=0, le=10**9)
    """Length of the run in passes over the data; or give steps."""

    steps: int | None = Field(default=None, ge=1, le=10**12, validate_default=True)
    """Length of the run in optimizer steps; or give epochs."""

    precision: Literal["fp32", "bf16", "fp16", "fp64"] = "fp32"
    """bf16 and fp16 compute in half the bits (autocast); fp64 is for checking equality."""

    reproducibility: Literal["rounding", "bitwise"] = "rounding"
    """rounding: other hardware changes the result by float rounding only; bitwise: another number
    of processes changes no bit of it."""

    cpu_threads: CountOrAuto = "auto"
    """Threads of a process's arithmetic on the CPU. auto: the machine's cores shared by its
    processes; under bitwise, where the number decides bits, 2."""

    compile: bool = False
    """Compile the model with torch.compile."""

    optimizer: AdamW | SGD = AdamW()
    """How gradients move the weights; its name picks its keys."""

    schedule: Cosine | Linear | Constant | WarmupStableDecay = Cosine()
    """The learning rate as a function of the step; its name picks its keys."""

    ema_decay: float | None = Field(default=None, gt=0, lt=1)
    """Decay a step of an average of the weights, which is then evaluated; null for none."""

    on_nonfinite: Literal["stop", "skip"] = "stop"
    """A loss or gradient that is not finite stops the run, or skips the step."""

    log_every: Housekeeping[DurationField | None] = Duration.parse(10)
    """How often metrics are logged; null for only at the end."""

    eval_every: Housekeeping[DurationField | None] = Duration.parse("1 epoch")
    """How often the model is evaluated; null for only at the end."""

    save_every: Housekeeping[DurationField | None] = Duration.parse("1 epoch")
    """How often a checkpoint is saved; null for only at the end."""

    keep_checkpoints: Housekeeping[int] = Field(default=2, ge=1)
    """How many of the newest checkpoints are kept, beside the best."""

    async_save: Housekeeping[bool] = False
    """Train on while a checkpoint is written."""

    resume: Housekeeping[str] = "auto"
    """auto: go on where a run of this name stopped; never: refuse a name that exists; best: go back
    to the best checkpoint; or the path of one."""

    time_limit: Housekeeping[Time | None] = None
    """A launch stops after so long: 11:30:00 (h:m:s), seconds, or PT11H30M. Leave a step, an
    evaluation and a save before a scheduler's own limit."""

    collective_timeout: Housekeeping[Time] = timedelta(minutes=10)
    """A run ends when its processes wait for one of them for so long; written like time_limit."""

    num_workers: Housekeeping[int] = Field(default=0, ge=0)
    """Processes that load data for each training process."""

    tracking: Housekeeping[Tracking] = Tracking()
    """Where metrics go, beside the run directory."""

    # A rule between two keys is checked with the second key, not with the whole config: pydantic
    # checks the whole only when every key is valid, and so would report the problems in two goes.
    @field_validator("micro_batch_size")
    @classmethod
    def _divides(cls, micro_batch_size: int | str, info: ValidationInfo) -> int | str:
        if isinstance(micro_batch_size, int) and "global_batch_size" in info.data:
            check_batch_sizes(info.data["global_batch_size"], micro_batch_size)
        return micro_batch_size

    @field_validator("steps")
    @classmethod
    def _one_length(cls, steps: int | None, info: ValidationInfo) -> int | None:
        if "epochs" in info.data and (steps is None) == (info.data["epochs"] is None):
            raise ValueError(
                "give exactly one of epochs and steps; epochs=null or steps=null drops one"
            )
        return steps

    def in_steps(self, steps_per_epoch: float) -> Steps:
        """Every duration of this config as a number of steps, for data of this size."""
        last = self.total_steps(steps_per_epoch)
        log_every, eval_every, save_every = (
            0 if duration is None else duration.steps(steps_per_epoch, last)
            for duration in (self.log_every, self.eval_every, self.save_every)
        )
        schedule = self.schedule.in_steps(steps_per_epoch, last)
        return Steps(last, log_every, eval_every, save_every, schedule)

    def total_steps(self, steps_per_epoch: float) -> int:
        """Optimizer steps of the run; with `epochs`, as many as it takes to see every sample."""
        if self.epochs is None:
            assert self.steps is not None
            return self.steps
        # 10 epochs of 1.1 steps are 11.000000000000002 steps in floats, which must not become 12.
        return math.ceil(self.epochs * steps_per_epoch * (1 - 1e-14))
