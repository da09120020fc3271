"""The run config: everything that decides the result of a run, typed, with a sentence a key.

Keys, types, defaults and rules stand here and in `config_sections`, and nowhere else.
`config_file` reads them from YAML and the command line, `config_help` prints them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal

from evenstep.config_sections import (
    SGD,
    AdamW,
    Constant,
    Cosine,
    DurationField,
    EarlyStopping,
    Linear,
    Muon,
    ScheduleFree,
    WarmupStableDecay,
)
from evenstep.plan import check_batch_sizes
from evenstep.schedule import Duration
from evenstep.sections import Housekeeping, Section
from evenstep.task import Named

from pydantic import Discriminator, Field, Tag, ValidationInfo, field_validator

Time = Annotated[timedelta, Field(gt=timedelta(0))]
# Told apart before validation: a plain union would report a problem for each of its types.
CountOrAuto = Annotated[
    Annotated[Literal["auto"], Tag("auto")] | Annotated[int, Field(ge=1), Tag("count")],
    Discriminator(lambda given: "auto" if given == "auto" else "count"),
]


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
    swa_start: int | None
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

    gradient_checkpointing: bool = False
    """Keep only the inputs of the model's repeated blocks for the backward, which computes the rest
    anew: less memory, about a third more time, the same weights."""

    freeze: tuple[str, ...] = ()
    """Parameters that are not trained, by name or by the name of a module, * for any characters:
    ["*.embeddings", "layer1.*.bias"]. A frozen BatchNorm normalises by the statistics it has."""

    optimizer: AdamW | SGD | Muon | ScheduleFree = AdamW()
    """How gradients move the weights; its name picks its keys."""

    schedule: Cosine | Linear | Constant | WarmupStableDecay = Field(
        default=Cosine(), validate_default=True
    )
    """The learning rate as a function of the step; its name picks its keys."""

    ema_decay: float | None = Field(default=None, gt=0, lt=1)
    """Decay a step of an average of the weights, which is then evaluated; null for none. BatchNorm
    statistics are those of the weights themselves."""

    swa_start: DurationField | None = None
    """After so much of the run, evaluate the equal average of the weights of all steps from there
    on (SWA); null for none. BatchNorm statistics are those of the weights themselves."""

    early_stopping: EarlyStopping | None = None
    """End the run when a metric of the evaluation no longer improves. `final/` then holds the last
    weights, `best` names the best checkpoint."""

    on_nonfinite: Literal["stop", "skip"] = "stop"
    """A loss or gradient that is not finite stops the run, or skips the step."""

    log_every: Housekeeping[DurationField | None] = Duration.parse(10)
    """How often metrics are logged; null for only at the end."""

    eval_every: Housekeeping[DurationField | None] = Duration.parse("1 epoch")
    """How often the model is evaluated; null for only at the end. May change on a resume, except
    under early_stopping, which it decides."""

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

    @field_validator("schedule")
    @classmethod
    def _schedule_free(cls, schedule: Any, info: ValidationInfo) -> Any:
        if isinstance(info.data.get("optimizer"), ScheduleFree) and schedule.name != "constant":
            raise ValueError(
                "optimizer.name schedule_free takes the place of a decay: set schedule.name="
                "constant; schedule.warmup is as good as ever"
            )
        return schedule

    @field_validator("ema_decay", "swa_start")
    @classmethod
    def _one_average(cls, average: Any, info: ValidationInfo) -> Any:
        others = ["ema_decay"] if info.data.get("ema_decay") is not None else []
        if isinstance(info.data.get("optimizer"), ScheduleFree):
            others.append("optimizer.name schedule_free")
        if average is not None and others:
            raise ValueError(f"{others[0]} averages the weights already: drop one of the two")
        return average

    def in_steps(self, steps_per_epoch: float) -> Steps:
        """Every duration of this config as a number of steps, for data of this size."""
        last = self.total_steps(steps_per_epoch)
        if math.isinf(steps_per_epoch):  # a stream: a tenth of the run stands for an epoch
            steps_per_epoch = last / 10
        log_every, eval_every, save_every = (
            0 if duration is None else duration.steps(steps_per_epoch, last)
            for duration in (self.log_every, self.eval_every, self.save_every)
        )
        given = self.swa_start
        swa_start = None if given is None else given.steps(steps_per_epoch, last)
        if swa_start is not None and swa_start >= last:
            raise ValueError(f"swa_start {given} leaves none of {last} steps to average")
        schedule = self.schedule.in_steps(steps_per_epoch, last)
        return Steps(last, log_every, eval_every, save_every, swa_start, schedule)

    def total_steps(self, steps_per_epoch: float) -> int:
        """Optimizer steps of the run; with `epochs`, as many as it takes to see every sample."""
        if self.epochs is None:
            assert self.steps is not None
            return self.steps
        if math.isinf(steps_per_epoch):
            raise ValueError(
                f"epochs: {self.epochs:g}, but the training data is a stream, whose end is not "
                "known: give steps in its place"
            )
        # 10 epochs of 1.1 steps are 11.000000000000002 steps in floats, which must not become 12.
        return math.ceil(self.epochs * steps_per_epoch * (1 - 1e-14))
