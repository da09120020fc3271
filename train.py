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
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

from evenstep import checkpoint, data, evaluation, learner, memory, run_directory, run_state
from evenstep.config import RunConfig, Steps
from evenstep.config_file import load
from evenstep.early_stopping import check_rule
from evenstep.hardware import Hardware, start
from evenstep.learner import Learner, new_model
from evenstep.lora import exporting
from evenstep.model_checks import FirstStep
from evenstep.nonfinite import stop_or_skip
from evenstep.outputs import Outputs, open_outputs
from evenstep.plan import seed_of
from evenstep.precision import autocast
from evenstep.processes import on_main
from evenstep.program import run_program
from evenstep.progress import Pace
from evenstep.run_directory import RunDirectory
from evenstep.run_state import RunState
from evenstep.sample_check import check_samples
from evenstep.schedule import due, lr_factor
from evenstep.seeding import seed_everything
from evenstep.stop import STOPPED, StopRequest
from evenstep.task import Batch, Task, find_module
from evenstep.trial import try_evaluation

import torch
from torch import Tensor

MicroBatches = Sequence[tuple[float, Batch]]  # (number of targets, batch) of each


def main(argv: Sequence[str]) -> int:
    """Train; returns the exit code. Raises ValueError for what the user has to mend."""
    config, config_file = load(argv)
    hardware = start(config)
    stop = StopRequest()
    task = find_module("tasks", config.task.name).build(config.task)
    steps = config.in_steps(data.steps_per_epoch(config, task))
    # What cannot be run is refused before anything is written.
    check_rule(config.early_stopping, task, eval_every=steps.eval_every, last_step=steps.last)
    if config.micro_batch_size == "auto":
        memory.check_auto(config, hardware)
    else:
        data.make_plan(config, task, hardware)
    check_samples(task, config, hardware)

    with ExitStack() as lifetimes:
        directory, config = run_state.open_directory(config, config_file.stem)
        lifetimes.enter_context(directory)
        if directory.finished:
            hardware.say(f"{directory.path} is finished; give another name to train anew")
            return 0
        stop.watch(directory.path, is_main=hardware.is_main, time_limit=config.time_limit)
        run = make_run(config, hardware, task, directory, steps)
        config, plan = run.config, data.make_plan(run.config, task, hardware)
        hardware.say(plan.describe(hardware.num_processes, steps.last))
        state = run_state.restore(run.learner, config, directory)
        out = open_outputs(lifetimes, config, hardware, task, directory, state, steps.last)
        lifetimes.enter_context(memory.explained(plan, hardware.num_processes))
        try_evaluation(task, run.learner, config, plan, hardware)
        train_batches, eval_batches = data.loaders(
            task, plan, hardware, config, range(state.step + 1, steps.last + 1), state.streams
        )
        accumulation = plan.accumulation(hardware.num_processes)
        pace, first_step = Pace(state.step, state.seconds), FirstStep(run.learner.bare)

        for step in state.remaining(steps.last):
            with state.training(step):
                batches = list(islice(train_batches, accumulation))
                # One message a step: what to divide the loss by, and whether anyone is to stop.
                targets, stopping = hardware.sums([n for n, _ in batches], [stop.requested])
                lr = config.optimizer.lr * lr_factor(step, steps.last, **steps.schedule)
                result = train_step(run, step, batches, targets=targets, lr=lr)
            out.alive(step)
            first_step.check()
            if not result.finite:
                state.skipped_steps += 1
                again = partial(forward, run, step, batches=batches)
                stop_or_skip(config, step, result.losses, again, run.learner, hardware)
            row: dict[str, Any] = {}
            if due(step, steps.log_every, steps.last):
                row |= training_row(run, state, result, pace)
            if eval_batches and due(step, steps.eval_every, steps.last):
                row |= evaluate(run, state, eval_batches, out, steps.last)
                stopping = stopping or bool(state.stopped_early)
            if row:
                out.log(step, row)
            if due(step, steps.save_every, steps.last) or state.is_best or stopping:
                run_state.save(state, run.learner, config, out.saver, hardware)
            if stopping:
                break
        return finish(run, state, directory, out, done=not state.remaining(steps.last))


@dataclass(frozen=True)
class Run:
    """What a step needs."""

    config: RunConfig
    hardware: Hardware
    task: Task
    learner: Learner


def make_run(
    config: RunConfig, hardware: Hardware, task: Task, directory: RunDirectory, steps: Steps
) -> Run:
    """Build the model, and find the micro-batch size if the run config leaves it open."""
    built = learner.build(config, task, hardware, swa_start=steps.swa_start)
    run = Run(config, hardware, task, built)
    if config.micro_batch_size != "auto":
        return run
    trial = partial(accumulate, run, 1, targets=1, join=False)
    config = memory.settled(config, task, run.learner, hardware, trial)
    run_state.record(config, directory)
    return replace(run, config=config)


@dataclass(frozen=True)
class StepResult:
    losses: list[Tensor]
    """The summed loss of each micro-batch of this process, by number."""
    targets: float
    """Of the global batch."""
    grad_norm: float
    """Of the mean loss over the global batch, before clipping."""
    lr: float
    finite: bool
    """If not, nothing has moved."""


def train_step(
    run: Run, step: int, batches: MicroBatches, *, targets: float, lr: float
) -> StepResult:
    """One optimizer step; `batches` are this process's share, `targets` those of all processes."""
    losses = accumulate(run, step, batches, targets=targets)
    grad_norm = run.learner.strategy.clip(run.config.optimizer.max_grad_norm or math.inf)
    # Gradients are summed over the processes: one that is not finite is so on all of them.
    finite = math.isfinite(grad_norm)
    if finite:
        run.learner.step(lr)
    else:
        run.learner.discard()
    return StepResult(losses, targets, grad_norm, lr, finite)


def accumulate(
    run: Run, step: int, batches: MicroBatches, *, targets: float, join: bool = True
) -> list[Tensor]:
    """Add up the gradients of the step's loss, and `join` those of all processes; returns the
    summed loss of each micro-batch of this process, by number."""
    learner, strategy = run.learner, run.learner.strategy
    strategy.start()
    learner.batchnorm.start()
    losses = [torch.empty(())] * len(batches)
    order = strategy.visits(len(batches))
    for turn in order:
        with strategy.micro_batch(is_last=join and turn == order[-1]):
            loss = forward(run, step, turn, batches)
            # `* 0` is 0, but NaN for a loss that is not finite: its gradient tells all processes.
            strategy.backward(loss, loss.detach() * 0 + 1 / (targets or 1))
        learner.batchnorm.collect(turn)
        losses[turn] = loss.detach()
    return losses


def forward(run: Run, step: int, turn: int, batches: MicroBatches) -> Tensor:
    """The summed loss of this process's micro-batch `turn` of a step."""
    hardware = run.hardware
    number = hardware.rank + turn * hardware.num_processes
    seed_everything(seed_of("forward", run.config.seed, step, number), hardware.device)
    with autocast(run.config.precision, hardware.device):
        return run.task.loss(run.learner.strategy.model, batches[turn][1])


def training_row(run: Run, state: RunState, result: StepResult, pace: Pace) -> dict[str, Any]:
    """What is logged of a step: the loss that it minimised, over all processes."""
    total, passes = run.hardware.sums(torch.stack(result.losses).tolist(), state.passes)
    return {
        "train/loss": total / (result.targets or 1),
        "train/grad_norm": result.grad_norm,
        "train/lr": result.lr,
        "train/epoch": data.epochs(run.config, run.task, state.step, passes),
        "train/targets": result.targets,
        "train/skipped_steps": state.skipped_steps,
        "train/samples_per_second": run.config.global_batch_size
        * pace.lap(state.step, state.seconds),
    }


@torch.no_grad()
def evaluate(run: Run, state: RunState, batches: Any, out: Outputs, last: int) -> dict[str, Any]:
    """Score every sample of the evaluation split once; returns the metrics, alike everywhere."""
    rows = evaluation.Rows()
    score = partial(evaluation.score, run.task, run.config.precision, run.hardware.device)
    with run.learner.evaluating() as model:
        for indices, batch in batches:
            rows.add(indices, score(model, indices, batch))
            out.alive(state.step)
        seed_everything(seed_of("sample", run.config.seed, state.step), run.hardware.device)
        with autocast(run.config.precision, run.hardware.device):
            sample = {"eval/sample": run.task.sample(model)} if run.task.sample else {}
    metrics = evaluation.summarize(rows, run.task, run.hardware, out.directory) | sample
    early_stopping = run.config.early_stopping if state.step < last else None
    state.evaluated(metrics, run.task, early_stopping)
    return metrics


def finish(run: Run, state: RunState, directory: RunDirectory, out: Outputs, *, done: bool) -> int:
    """Write `final/` if the run is done, and `summary.json`; returns the exit code."""
    out.saver.wait()  # before the summary tells that all is well
    own = run.learner.strategy.full_weights()
    if done:
        weights = run.learner.evaluated_weights() if run.learner.averaged else own
        model = partial(new_model, run.config, run.task, weights)
        checkpoint.export(directory.path, model, task_export=exporting(run.task.export))
    sha256 = on_main(lambda: checkpoint.weights_sha256(own))
    status: run_directory.Status = "finished" if done else "stopped"
    summary = directory.write_summary(status, state, weights_sha256=sha256)
    out.tracking.finish(summary)
    if not done:
        run.hardware.say(f"stopped at step {state.step}: the same command goes on from there")
    elif state.stopped_early:
        run.hardware.say(f"stopped early at step {state.step}: {state.stopped_early}")
    return 0 if done else STOPPED


if __name__ == "__main__":
    sys.exit(run_program(main, sys.argv[1:]))
