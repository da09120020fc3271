"""How processes start, stop, fail and end."""

import signal
import subprocess
import sys
import time

import pytest
from launching import (
    ROOT,
    command,
    metrics,
    run,
    started,
    summary,
    train,
    write_config,
)

pytestmark = pytest.mark.processes


def logged(run_dir):
    """Rows of metrics.jsonl so far."""
    return len(metrics(run_dir)) if (run_dir / "metrics.jsonl").exists() else 0


def alive(run_dir):
    """Processes whose command line names the run directory's parent."""
    listing = subprocess.run(["ps", "-ewwo", "pid,args"], capture_output=True, text=True).stdout
    return [line for line in listing.splitlines() if str(run_dir.parent.parent) in line]


def wait_until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "nothing happened in time"
        time.sleep(0.05)


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda n: n.name)
def test_a_signal_to_the_launcher_leads_to_a_checkpoint(tmp_path, processes, number):
    """CASES 5: an agreed step, `stopped`, a return code to requeue on, no orphan; then a resume."""
    config = str(write_config(tmp_path, save_every=None, steps=80))
    run_dir = tmp_path / "runs" / "stopped"
    hardware = "cpu" if processes == 1 else "cpu_2"
    again = command(
        processes, config, "name=stopped", "task.seconds_per_batch=0.03", hardware=hardware
    )
    with started(again) as process:
        wait_until(lambda: logged(run_dir) > 3)
        process.send_signal(number)
        assert process.wait(timeout=60) != 0
        wait_until(lambda: not alive(run_dir), seconds=30)
    stopped = summary(run_dir)
    assert stopped["status"] == "stopped"
    assert stopped["step"] == logged(run_dir) < 80
    assert (run_dir / "checkpoints" / f"step-{stopped['step']:08d}").is_dir()
    code, output = run(again)
    assert code == 0, output
    assert summary(run_dir)["status"] == "finished"
    assert [row["step"] for row in metrics(run_dir)] == list(range(1, 81))


def test_a_script_started_without_a_launcher_returns_the_code_to_requeue_on(tmp_path):
    config = str(write_config(tmp_path, save_every=None, steps=4000))
    run_dir = tmp_path / "runs" / "plain"
    with started([sys.executable, str(ROOT / "train.py"), config, "name=plain"]) as process:
        wait_until(lambda: logged(run_dir) > 3)
        process.send_signal(signal.SIGUSR1)
        assert process.wait(timeout=60) == 75


def test_a_failing_rank_ends_the_run_with_its_cause(tmp_path):
    """CASES 2 and 18: rc != 0, the cause shown and recorded, no process left."""
    config = str(write_config(tmp_path))
    code, output = run(command(2, config, "name=failed", "task.fail_on_rank=1"), timeout=90)
    assert code != 0
    assert "this rank fails" in output
    run_dir = tmp_path / "runs" / "failed"
    assert summary(run_dir)["status"] == "failed"
    assert "this rank fails" in summary(run_dir)["cause"]
    wait_until(lambda: not alive(run_dir), seconds=30)


def test_a_loss_that_is_not_finite_stops_all_processes(tmp_path):
    config = str(write_config(tmp_path))
    code, output = run(command(2, config, "name=nan", "task.nan_at_index=7"), timeout=90)
    assert code != 0
    assert "micro-batch" in output
    cause = summary(tmp_path / "runs" / "nan")["cause"]
    assert "the loss of micro-batch" in cause
    assert "is not finite" in cause


def test_skipped_steps_are_counted_alike_on_all_processes(tmp_path):
    write_config(tmp_path, on_nonfinite="skip")
    rows = [metrics(train(tmp_path, f"skip-{p}", p, "task.nan_at_index=7"))[-1] for p in (1, 2)]
    assert rows[0]["train/skipped_steps"] == rows[1]["train/skipped_steps"] > 0
    assert rows[0]["eval/loss"] == pytest.approx(rows[1]["eval/loss"], rel=1e-9)


def test_two_processes_share_one_directory_and_one_log(tmp_path):
    """CASES 6, with the directory named by the time."""
    write_config(tmp_path, steps=5)
    code, output = run(command(2, str(tmp_path / "exact.yaml")))
    assert code == 0, output
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert run_dir.name.startswith("exact-20")
    assert [row["step"] for row in metrics(run_dir)] == [1, 2, 3, 4, 5]
    assert output.count("step 5/5  loss") == 1


def test_processes_started_by_torchrun_alone_know_each_other(tmp_path):
    """Without a GPU, Accelerate would let each believe to be alone (CASES 1)."""
    config = str(write_config(tmp_path, steps=5))
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    launcher = [sys.executable, *torchrun]
    code, output = run([*launcher, str(ROOT / "train.py"), config, "name=torchrun"])
    assert code == 0, output
    assert "2 process(es)" in output
    assert len(metrics(tmp_path / "runs" / "torchrun")) == 5


def test_a_second_launch_of_a_finished_run_says_so(tmp_path):
    write_config(tmp_path, steps=3)
    train(tmp_path, "done", 1)
    again = command(1, str(tmp_path / "exact.yaml"), "name=done")
    code, output = run(again)
    assert code == 0
    assert "is finished" in output
    code, output = run([*again, "optimizer.lr=0.5"])
    assert code != 0
    assert "optimizer.lr: 0.01 -> 0.5" in output


def test_a_resume_with_another_result_is_refused(tmp_path):
    write_config(tmp_path, steps=3)
    run_dir = train(tmp_path, "changed", 1)
    (run_dir / "summary.json").unlink()
    config = str(tmp_path / "exact.yaml")
    code, output = run(command(1, config, "name=changed", "optimizer.lr=0.5"))
    assert code != 0
    assert "optimizer.lr: 0.01 -> 0.5" in output
    code, output = run(command(1, config, "name=changed", "log_every=2"))
    assert code == 0, output


def test_a_secret_in_a_traceback_is_masked(tmp_path):
    config = str(write_config(tmp_path))
    secret = "hf_abcdefghijklmnopqrstuv"
    arguments = [config, "name=secret", f"task.fail_with={secret}", "task.fail_on_rank=0"]
    code, output = run([sys.executable, str(ROOT / "train.py"), *arguments], HF_TOKEN=secret)
    assert code == 1
    assert "this rank fails" in output
    files = [p for p in (tmp_path / "runs" / "secret").rglob("*") if p.is_file()]
    assert secret not in output
    assert not [path for path in files if secret.encode() in path.read_bytes()]


def test_bad_input_is_one_line_not_a_traceback(tmp_path):
    config = str(write_config(tmp_path))
    code, output = run([sys.executable, str(ROOT / "train.py"), config, "learning_rte=1"])
    assert code == 2
    assert "learning_rte" in output
    assert "Traceback" not in output


@pytest.mark.timeout(600)
def test_twenty_runs_on_two_processes_all_end_well(tmp_path):
    """CASES 2: a process group that is not taken down ends with -6 now and then."""
    write_config(tmp_path, steps=1)
    for number in range(20):
        train(tmp_path, f"run-{number}", 2)
