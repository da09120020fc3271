"""Train a model. This file is the program, read top to bottom; the loop stands in `main`.

    accelerate launch train.py                                   configs/digits.yaml, this machine
    accelerate launch --config_file accelerate_configs/cpu_2.yaml train.py configs/digits.yaml
    accelerate launch train.py configs/cifar10.yaml seed=1 optimizer.lr=3e-4
    python train.py configs/cifar10.yaml --help                  every key of that run config

The run config decides the result, the hardware file the speed.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from evenstep import (
    checkpoint,
    data,
    environment,
    evaluation,
    learner,
    nonfinite,
    progress,
    run_directory,
    run_state,
)
from evenstep.config import RunConfig
from evenstep.config_file import load, resolved
from evenstep.hardware import Hardware, start
from evenstep.learner import Learner
from evenstep.model_checks import FirstStep
from evenstep.plan import Plan, seed_of
from evenstep.precision import autocast
from evenstep.program import run_program
from evenstep.run_directory import RunDirectory
from evenstep.run_state import RunState
from evenstep.schedule import due, lr_factor
from evenstep.seeding import seed_everything
from evenstep.stop import STOPPED, StopRequest
from evenstep.task import Batch, Task, find_module
from evenstep.tracking import Tracking

import torch
from torch import Tensor

MicroBatches = Sequence[tuple[float, Batch]]  # (number of targets, batch) of each


def main(argv: Sequence[str]) -> int:
    """Train; returns the exit code. Raises ValueError for what the user has to mend."""
    config, config_file = load(argv)
    hardware = start(config.precision)
    stop = StopRequest()
    task = find_module("tasks", config.task.name).build(config.task)
    plan = Plan(
        len(task.train_dataset), config.global_batch_size, config.micro_batch_size, config.seed
    )
    steps = config.in_steps(plan.steps_per_epoch)
    hardware.say(plan.describe(hardware.num_processes, steps.last))

    with ExitStack() as lifetimes:
        directory = run_state.open_directory(config, config_file.stem)
        lifetimes.enter_context(directory)
        if directory.finished:
            hardware.say(f"{directory.path} is finished; give another name to train anew")
            return 0
        run = Run(config, hardware, task, plan, learner.build(config, task, hardware))
        state = run_state.restore(run.learner, config, directory)
        console, tracking = open_outputs(lifetimes, run, state, directory, steps.last)
        train_batches, eval_batches = data.loaders(
            task, plan, hardware, config, first_step=state.step + 1, last_step=steps.last
        )
        accumulation = plan.accumulation(hardware.num_processes)
        pace, first_step = progress.Pace(state.step, state.seconds), FirstStep(run.learner.bare)

        for step in range(state.step + 1, steps.last + 1):
            with state.training(step):
                batches = list(islice(train_batches, accumulation))
                # One message a step: what to divide the loss by, and whether anyone is to stop.
                targets, stopping = hardware.sum(sum(n for n, _ in batches), stop.requested)
                lr = config.optimizer.lr * lr_factor(step, steps.last, **steps.schedule)
                result = train_step(run, step, batches, targets=targets, lr=lr)
            console.advance(step)
            first_step.check()
            if not result.finite:
                state.skipped_steps += 1
                again = partial(forward_backward, run, step, batches=batches, targets=targets)
                nonfinite.stop_or_skip(config, step, result.losses, again, run.learner, hardware)
            row: dict[str, Any] = {}
            if due(step, steps.log_every, steps.last):
                row |= training_row(run, state, result, lr, pace)
            if eval_batches and due(step, steps.eval_every, steps.last):
                row |= evaluate(run, state, eval_batches, directory.path)
            if row:
                tracking.log(step, row)
                console.log(step, row)
            if due(step, steps.save_every, steps.last) or state.is_best or stopping:
                run_state.save(state, run.learner, config, directory.path)
            if stopping:
                break
        return finish(run, state, directory, tracking, done=state.step == steps.last)


@dataclass(frozen=True)
class Run:
    """What a step needs."""

    config: RunConfig
    hardware: Hardware
    task: Task
    plan: Plan
    learner: Learner


@dataclass(frozen=True)
class StepResult:
    losses: list[Tensor]
    """The summed loss of each micro-batch of this process."""
    targets: float
    """Of the global batch."""
    grad_norm: Tensor
    """Of the mean loss over the global batch, before clipping."""
    finite: bool
    """If not, nothing has moved."""


def train_step(
    run: Run, step: int, batches: MicroBatches, *, targets: float, lr: float
) -> StepResult:
    """One optimizer step; `batches` are this process's share, `targets` those of all processes."""
    learner, accelerator = run.learner, run.hardware.accelerator
    learner.optimizer.zero_grad()
    learner.batchnorm.start()
    losses = []
    for turn in range(len(batches)):
        is_last = turn == len(batches) - 1
        with nullcontext() if is_last else accelerator.no_sync(learner.model):
            losses.append(forward_backward(run, step, turn, batches, targets))
        learner.batchnorm.collect()
    learner.scaler.unscale_(learner.optimizer)
    max_norm = run.config.optimizer.max_grad_norm or math.inf
    grad_norm = torch.nn.utils.clip_grad_norm_(learner.parameters, max_norm)
    # Gradients are summed over the processes: one that is not finite is so on all of them.
    finite = math.isfinite(grad_norm)
    if finite:
        for group in learner.optimizer.param_groups:
            group["lr"] = lr
        learner.scaler.step(learner.optimizer)
        learner.batchnorm.commit(accelerator)
        if learner.ema:
            learner.ema.update_parameters(learner.bare)
    else:
        learner.batchnorm.discard()
    learner.scaler.update()
    return StepResult(losses, targets, grad_norm, finite)


def forward_backward(
    run: Run, step: int, turn: int, batches: MicroBatches, targets: float
) -> Tensor:
    """Add the gradient of one micro-batch to the step's; returns its summed loss."""
    hardware = run.hardware
    number = hardware.rank + turn * hardware.num_processes
    seed_everything(seed_of("forward", run.config.seed, step, number), hardware.device)
    with autocast(run.config.precision, hardware.device):
        loss = run.task.loss(run.learner.model, batches[turn][1])
    # DDP averages gradients over P processes: P times the mean over all targets gives their sum.
    # `* 0` is 0, but NaN for a loss that is not finite: its gradient will tell all processes.
    weight = loss.detach() * 0 + hardware.num_processes / max(targets, 1)
    loss.backward(run.learner.scaler.scale(weight))  # type: ignore[no-untyped-call]
    return loss.detach()


def training_row(
    run: Run, state: RunState, result: StepResult, lr: float, pace: progress.Pace
) -> dict[str, Any]:
    """What is logged of a step: the loss that it minimised, over all processes."""
    total = run.hardware.accelerator.reduce(torch.stack(result.losses).sum(), "sum")
    return {
        "train/loss": float(total) / max(result.targets, 1),
        "train/grad_norm": float(result.grad_norm),
        "train/lr": lr,
        "train/epoch": state.step / run.plan.steps_per_epoch,
        "train/targets": result.targets,
        "train/skipped_steps": state.skipped_steps,
        "train/samples_per_second": run.config.global_batch_size
        * pace.lap(state.step, state.seconds),
    }


@torch.no_grad()
def evaluate(run: Run, state: RunState, batches: Any, directory: Path) -> dict[str, Any]:
    """Score every sample of the evaluation split once; returns the metrics, alike everywhere."""
    model = run.learner.evaluated.eval()
    rows = evaluation.Rows()
    for indices, batch in batches:
        seed_everything(seed_of("score", indices[0]), run.hardware.device)
        with autocast(run.config.precision, run.hardware.device):
            rows.add(indices, run.task.score(model, batch))
    run.learner.train()
    metrics: dict[str, Any] = {}
    if parts := run.hardware.gather(rows.columns()):  # on the main process
        table = evaluation.merge(parts)
        evaluation.write_predictions(directory / "predictions.parquet", table)
        metrics = {f"eval/{name}": value for name, value in run.task.summarize(table).items()}
    metrics = run.hardware.from_main(metrics)
    state.evaluated(metrics, f"eval/{run.task.best_metric}", run.task.higher_is_better)
    return metrics


def open_outputs(
    lifetimes: ExitStack, run: Run, state: RunState, directory: RunDirectory, last: int
) -> tuple[progress.Progress, Tracking]:
    """Where a run tells what it does; closed, and told of a failure, at the end of `lifetimes`."""
    lifetimes.push(partial(directory.record_failure, state))
    environment.record(directory.path, run.hardware, run.task.data_identity)
    console = progress.create(last, state.step, is_main=run.hardware.is_main)
    lifetimes.enter_context(console)
    trackers = {"say": console.say, **dict(run.config.tracking)}
    accelerator, config = run.hardware.accelerator, resolved(run.config)
    tracking = Tracking(accelerator, directory.path, config, **trackers)
    return console, lifetimes.enter_context(tracking)


def finish(
    run: Run, state: RunState, directory: RunDirectory, tracking: Tracking, *, done: bool
) -> int:
    """Write `final/` if the run is done, and `summary.json`; returns the exit code."""
    if done:
        checkpoint.export(directory.path, run.learner.evaluated, task_export=run.task.export)
    status: run_directory.Status = "finished" if done else "stopped"
    weights = checkpoint.weights_sha256(run.learner.bare)
    summary = directory.write_summary(status, state, weights_sha256=weights)
    tracking.finish(summary)
    if done:
        return 0
    run.hardware.say(f"stopped at step {state.step}: the same command goes on from there")
    return STOPPED


if __name__ == "__main__":
    sys.exit(run_program(main, sys.argv[1:]))
