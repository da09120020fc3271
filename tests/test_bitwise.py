"""`reproducibility: bitwise`, with real processes: one SHA-256 of the weights on any of them."""

import random
import time

import pytest
from launching import command, kill_session, metrics, run, started, summary, train, write_config
from test_exact import NOT_COMPARED, newest_step, wait_for_step

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("bitwise")]  # one makes the fixture


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """40 float32 steps with dropout, augmentation, BatchNorm, uneven and weighted targets, layers
    used at random, clipping and an average of the weights, on one process."""
    directory = tmp_path_factory.mktemp("bitwise")
    write_config(
        directory,
        reproducibility="bitwise",
        precision="fp32",
        micro_batch_size=1,
        cpu_threads=1,
        ema_decay=0.9,
        task={"name": "exact_task", "layer_drop": True, "weighted": True},
    )
    train(directory, "one", 1)
    return directory


def rows(run_dir):
    return [{k: v for k, v in row.items() if k != NOT_COMPARED} for row in metrics(run_dir)]


@pytest.mark.parametrize("processes", [2, 4, 8])
def test_more_processes_change_no_bit(reference, processes):
    """Of the weights, of the average, of any logged number."""
    run_dir, one = train(reference, f"on-{processes}", processes), reference / "runs" / "one"
    assert summary(run_dir)["weights_sha256"] == summary(one)["weights_sha256"]
    assert rows(run_dir) == rows(one)
    finals = [directory / "final" / "model.safetensors" for directory in (run_dir, one)]
    assert finals[0].read_bytes() == finals[1].read_bytes()


def test_kills_and_resumes_on_other_processes_change_no_bit(reference):
    config = str(reference / "exact.yaml")
    overrides = ("name=killed", "save_every=3", "task.seconds_per_batch=0.02")
    run_dir = reference / "runs" / "killed"
    for processes in (4, 1, 2):
        with started(command(processes, config, *overrides)) as process:
            wait_for_step(run_dir, newest_step(run_dir) + 6, process)
            time.sleep(random.random() * 0.3)
            kill_session(process)
    code, output = run(command(4, config, *overrides))
    assert code == 0, output
    one = reference / "runs" / "one"
    assert summary(run_dir)["weights_sha256"] == summary(one)["weights_sha256"]
    assert rows(run_dir) == rows(one)


def test_three_processes_are_refused(tmp_path):
    config = str(write_config(tmp_path, reproducibility="bitwise", global_batch_size=6))
    code, output = run(command(3, config))
    assert code != 0
    assert "a power of two" in output
