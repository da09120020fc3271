"""The promise, with real processes: the run config decides the result, the hardware does not."""

import json
import random
import re
import shutil
import time
from pathlib import Path

from evenstep.plan import Plan

import pytest
import torch
from launching import command, kill_session, metrics, run, started, summary, train, write_config
from safetensors.torch import load_file

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("exact")]  # one makes the fixture
NOT_COMPARED = "train/samples_per_second"


def assert_same(run_dir, reference, tolerance):
    """Every logged number, every metric of the summary, and every weight."""
    rows, expected = metrics(run_dir), metrics(reference)
    assert [row["step"] for row in rows] == [row["step"] for row in expected]
    for row, other in zip(rows, expected, strict=True):
        assert row.keys() == other.keys()
        for key in row.keys() - {NOT_COMPARED}:
            assert row[key] == pytest.approx(other[key], rel=tolerance, abs=tolerance), (key, row)
    assert summary(run_dir)["best"]["step"] == summary(reference)["best"]["step"]
    weights, others = (load_file(d / "final" / "model.safetensors") for d in (run_dir, reference))
    assert weights.keys() == others.keys()
    for name, weight in weights.items():
        assert (weight - others[name]).abs().max() <= tolerance, name


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """40 steps in float64 with dropout, augmentation, BatchNorm, uneven targets, clipping and EMA,
    on one process and without a stop; with the indices of the samples it saw."""
    directory = tmp_path_factory.mktemp("reference")
    (directory / "trace").mkdir()
    write_config(directory, ema_decay=0.9)
    train(directory, "one", 1, EXACT_TRACE=str(directory / "trace"))
    return directory


def traced(folder, rank):
    lines = (folder / f"rank-{rank}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def planned(first_step=1):
    plan = Plan(num_samples=50, global_batch_size=8, micro_batch_size=2, seed=3)
    ranges = plan.micro_batches(first_step, 40)
    return [[index for _, index in plan.samples(positions)] for positions in ranges]


def test_the_samples_are_those_of_the_plan(reference):
    assert traced(reference / "trace", 0) == planned()


def test_the_final_weights_are_the_averaged_ones(reference):
    run_dir = reference / "runs" / "one"
    final = load_file(run_dir / "final" / "model.safetensors")
    (file,) = (run_dir / "checkpoints" / "step-00000040").glob("*.safetensors")
    saved = load_file(file)
    for name in ("inner.weight", "norm.bias", "outer.weight"):
        assert final[name].equal(saved[f"ema.{name}"])
        assert not final[name].equal(saved[f"model.{name}"])


@pytest.mark.parametrize("processes", [2, 4])
def test_more_processes_change_nothing(reference, processes):
    assert_same(train(reference, f"on-{processes}", processes), reference / "runs" / "one", 1e-9)


def test_kills_and_resumes_on_other_processes_change_nothing(reference, tmp_path):
    """kill -9 on 4 processes, again on 1, to the end on 2; after each the samples go on exactly
    where the checkpoint was."""
    slow = ("task.seconds_per_batch=0.03", "save_every=3", "name=killed")
    config = str(reference / "exact.yaml")
    run_dir = reference / "runs" / "killed"
    for processes in (4, 1):
        folder = tmp_path / f"trace-{processes}"
        folder.mkdir()
        with started(command(processes, config, *slow), EXACT_TRACE=str(folder)) as process:
            wait_for_step(run_dir, newest_step(run_dir) + 6, process)
            time.sleep(random.random() * 0.5)
            kill_session(process)
            output = process.stdout.read()
        # Not the newest directory before the launch: a complete save that the kill left without its
        # name gets it at the resume.
        resumed = re.search(r"resuming from .*step-(\d+)", output)
        start = int(resumed[1]) if resumed else 0
        # 4 processes compute every fourth micro-batch each, one process all of them
        for rank in range(processes):
            seen = traced(folder, rank)
            assert seen == planned(start + 1)[rank::processes][: len(seen)]
    code, output = run(
        command(2, config, "task.seconds_per_batch=0.03", "save_every=3", "name=killed")
    )
    assert code == 0, output
    assert "resuming from" in output
    assert_same(run_dir, reference / "runs" / "one", 1e-9)


def newest_step(run_dir):
    names = [path.name for path in (run_dir / "checkpoints").glob("step-*")]
    return max((int(name.removeprefix("step-")) for name in names), default=0)


def wait_for_step(run_dir, step, process, seconds=90):
    deadline = time.monotonic() + seconds
    while newest_step(run_dir) < step:
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline, "no checkpoint in time"
        time.sleep(0.02)


@pytest.mark.parametrize("processes", [1, 2])
def test_evaluating_and_saving_more_often_changes_no_weight(reference, processes):
    """CASES 19: the same bits."""
    often = train(reference, f"often-{processes}", processes, "eval_every=1", "save_every=7")
    rarely = train(reference, f"rarely-{processes}", processes, "eval_every=100", "log_every=null")
    assert summary(often)["weights_sha256"] == summary(rarely)["weights_sha256"]


def test_models_and_tasks_that_make_it_hard(tmp_path):
    """Layers used or not at random, draws from `random` and numpy in the model, its weights and the
    evaluation split, and targets with weights."""
    write_config(tmp_path, steps=20)
    hard = ("task.layer_drop=true", "task.draws=true", "task.weighted=true")
    one = train(tmp_path, "one", 1, *hard)
    assert_same(train(tmp_path, "two", 2, *hard), one, 1e-9)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_with_an_average_and_a_resume(tmp_path, precision):
    """The resume has the same bits: loss scale, average and optimizer state come back."""
    write_config(
        tmp_path, steps=12, save_every=6, precision=precision, ema_decay=0.9, keep_checkpoints=9
    )
    whole = train(tmp_path, "whole", 1)
    part = train(tmp_path, "part", 1)
    for name in ("step-00000012", "step-00000010"):  # the last, and the best if it is that one
        shutil.rmtree(part / "checkpoints" / name, ignore_errors=True)
    (part / "summary.json").unlink()
    code, output = run(command(1, str(tmp_path / "exact.yaml"), "name=part"))
    assert code == 0, output
    assert "resuming from" in output
    assert summary(part)["weights_sha256"] == summary(whole)["weights_sha256"]
    assert_same(part, whole, 0)


def test_in_float16_the_same_steps_overflow_on_more_processes(tmp_path):
    write_config(tmp_path, steps=6, micro_batch_size=1, precision="fp16", eval_every=None)
    rows = [metrics(train(tmp_path, f"on-{processes}", processes)) for processes in (1, 4)]
    for row, other in zip(*rows, strict=True):
        assert row["train/skipped_steps"] == other["train/skipped_steps"]
        assert row["train/loss"] == pytest.approx(other["train/loss"], rel=1e-2)


@pytest.mark.parametrize(("samples", "batch"), [(10, 4), (3, 8)])
def test_epochs_that_do_not_divide_into_batches(tmp_path, samples, batch):
    """CASES 12: n = 10 with batch 4, and fewer samples than a batch."""
    write_config(tmp_path, global_batch_size=batch, steps=10, epochs=None)
    task = f"task.num_samples={samples}"
    one = train(tmp_path, "one", 1, task)
    assert_same(train(tmp_path, "two", 2, task), one, 1e-9)


def test_learning_rates_are_a_function_of_the_step(tmp_path):
    """CASES 7: 1 - k/10, on 1 and 2 processes, at any accumulation, and after a resume."""
    write_config(
        tmp_path, steps=10, optimizer={"name": "sgd", "lr": 1.0}, schedule={"name": "linear"}
    )
    for name, processes, *overrides in (("a", 1), ("b", 2), ("c", 1, "micro_batch_size=8")):
        rows = metrics(train(tmp_path, name, processes, "task.batchnorm=false", *overrides))
        assert [row["train/lr"] for row in rows] == pytest.approx([1 - k / 10 for k in range(10)])


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_every_sample_is_evaluated_once_and_in_order(tmp_path, processes):
    """CASES 16 and 17, splits smaller than the number of processes included."""
    config = str(write_config(tmp_path))
    script = Path(__file__).parent / "evaluate_rows.py"
    code, output = run(command(processes, config, script=script))
    assert code == 0, output
    for n in (1, 7, 9, 10):
        assert f"n={n} index={list(range(n))} mean={(n - 1) / 2}" in output


def test_float32_resnet_on_images(tmp_path):
    """20 steps of ResNet-18 on digits in float32: every loss and every weight to 1e-4.

    Short steps, since rounding flips the sign of some activation before a ReLU in every step, which
    changes the gradient by far more than rounding; float64 shows that nothing else differs.
    """
    overrides = (
        "steps=20",
        "epochs=null",
        "global_batch_size=64",
        "micro_batch_size=16",
        "optimizer={name: sgd, lr: 3e-4, max_grad_norm: 1.0}",
        "log_every=1",
        "save_every=null",
        "tracking.with=[]",
    )
    losses, weights = [], []
    for processes in (1, 2):
        arguments = ("configs/digits.yaml", f"output_dir={tmp_path}", f"name=on-{processes}")
        code, output = run(command(processes, *arguments, *overrides), timeout=200)
        assert code == 0, output
        run_dir = tmp_path / f"on-{processes}"
        losses.append([row["train/loss"] for row in metrics(run_dir)])
        weights.append(load_file(run_dir / "final" / "model.safetensors"))
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)
    for name, weight in weights[0].items():
        torch.testing.assert_close(weight, weights[1][name], rtol=1e-4, atol=1e-4)
