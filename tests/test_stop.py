"""What asks a run to stop: signals, a file, the clock."""

import os
import signal
import sys
import time
from datetime import timedelta

from evenstep.stop import StopRequest

import pytest
from launching import ROOT, command, metrics, run, started, summary, write_config

HOUR = timedelta(hours=1)


@pytest.fixture
def stop():
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    handlers = {number: signal.getsignal(number) for number in numbers}
    yield StopRequest()
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_asks_and_is_named_in_one_line(stop, number, capfd):
    assert not stop.requested
    for _ in range(2):  # launchers repeat it at once
        os.kill(os.getpid(), number)
    assert stop.requested
    assert stop.reason == signal.Signals(number).name
    assert capfd.readouterr().err == (
        f"{stop.reason}: stopping after this step, with a checkpoint\n"
    )


def test_a_second_ctrl_c_two_seconds_later_ends_the_process(stop, monkeypatch):
    os.kill(os.getpid(), signal.SIGINT)
    later = time.monotonic() + 2.1
    monkeypatch.setattr(time, "monotonic", lambda: later)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def test_a_stop_file_asks_once_and_is_gone(stop, tmp_path, monkeypatch, capfd):
    stop.watch(tmp_path, is_main=True, time_limit=None)
    assert not stop.requested
    (tmp_path / "STOP").touch()
    assert not stop.requested, "looked at the disk again within a second"
    later = time.monotonic() + 1.1
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert stop.requested
    assert not (tmp_path / "STOP").exists()
    assert stop.requested
    assert capfd.readouterr().err.count("STOP: stopping after this step") == 1


def test_a_stop_file_that_was_there_before_the_launch_counts(stop, tmp_path):
    (tmp_path / "STOP").touch()
    stop.watch(tmp_path, is_main=True, time_limit=HOUR)
    assert stop.requested
    assert not (tmp_path / "STOP").exists()


def test_the_time_limit_asks_once_it_has_passed(stop, tmp_path, monkeypatch, capfd):
    stop.watch(tmp_path, is_main=True, time_limit=HOUR)
    launched = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: launched + 3590)
    assert not stop.requested
    monkeypatch.setattr(time, "monotonic", lambda: launched + 3601)
    assert stop.requested
    assert "time_limit 1:00:00: stopping" in capfd.readouterr().err


def test_only_the_main_process_looks_at_the_file_and_the_clock(stop, tmp_path):
    (tmp_path / "STOP").touch()
    stop.watch(tmp_path, is_main=False, time_limit=timedelta(microseconds=1))
    assert not stop.requested
    assert (tmp_path / "STOP").exists()


@pytest.mark.processes
def test_a_stop_file_stops_all_processes_and_the_same_command_goes_on(tmp_path):
    config = str(write_config(tmp_path, save_every=None, steps=60))
    run_dir = tmp_path / "runs" / "stopped"
    again = command(2, config, "name=stopped", "task.seconds_per_batch=0.05")
    with started(again) as process:
        deadline = time.monotonic() + 60
        while not (run_dir / "metrics.jsonl").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        (run_dir / "STOP").touch()
        output, _ = process.communicate(timeout=90)
    assert process.returncode != 0
    assert output.count("STOP: stopping after this step") == 1
    assert summary(run_dir)["status"] == "stopped"
    assert (run_dir / "checkpoints" / f"step-{summary(run_dir)['step']:08d}").is_dir()
    code, output = run(again)
    assert code == 0, output
    assert [row["step"] for row in metrics(run_dir)] == list(range(1, 61))


@pytest.mark.processes
def test_a_time_limit_stops_a_launch_with_a_checkpoint(tmp_path):
    config = str(write_config(tmp_path, save_every=None, steps=4000, time_limit=3))
    run_dir = tmp_path / "runs" / "limited"
    code, output = run([sys.executable, str(ROOT / "train.py"), config, "name=limited"])
    assert code == 75, output
    assert output.count("time_limit 0:00:03: stopping after this step") == 1
    assert summary(run_dir)["status"] == "stopped"
    assert (run_dir / "checkpoints" / f"step-{summary(run_dir)['step']:08d}").is_dir()
