"""A process that hangs leaves its stacks behind; one that works does not."""

import os
import platform
import time
import timeit
from datetime import timedelta

from evenstep.watchdog import Watchdog

import pytest
from launching import ROOT, command, run, summary, write_config


def hangs_in_this_function(seconds):
    time.sleep(seconds)


def test_a_hang_is_written_down_with_who_where_and_when(tmp_path, capfd):
    with Watchdog(tmp_path, rank=3, timeout=timedelta(seconds=0.5)) as watchdog:
        watchdog.alive(17)
        hangs_in_this_function(0.9)
    text = (tmp_path / "stacks" / "rank-3.txt").read_text()
    who = f"rank 3, process {os.getpid()} on {platform.node()}"
    assert text.count(who) == 1, "one hang is one entry"
    assert "nothing for 0 s after step 17" in text
    assert "in hangs_in_this_function" in text
    assert text.count("hread 0x") >= 2, "all threads"
    line = capfd.readouterr().err
    assert line == f"{who} hangs after step 17: its stacks are in {watchdog.file}\n"


def test_a_process_that_gives_signs_of_life_is_left_alone(tmp_path, capfd):
    with Watchdog(tmp_path, rank=0, timeout=timedelta(seconds=0.5)) as watchdog:
        for _ in range(18):
            time.sleep(0.05)
            watchdog.alive()
    assert not (tmp_path / "stacks").exists()
    assert not capfd.readouterr().err


def test_after_a_false_alarm_a_process_is_watched_on(tmp_path):
    with Watchdog(tmp_path, rank=0, timeout=timedelta(seconds=0.4)) as watchdog:
        for step in (1, 2):
            watchdog.alive(step)
            time.sleep(0.6)
    text = (tmp_path / "stacks" / "rank-0.txt").read_text()
    assert [text.count(f"s after step {step}\n") for step in (1, 2)] == [1, 1]


def test_a_sign_of_life_costs_less_than_5_microseconds(tmp_path):
    watchdog = Watchdog(tmp_path, rank=0, timeout=timedelta(minutes=10))
    assert min(timeit.repeat(lambda: watchdog.alive(1), number=1000, repeat=5)) / 1000 < 5e-6


@pytest.mark.processes
def test_a_hanging_rank_ends_the_run_with_all_stacks_on_disk(tmp_path):
    """CASES 18."""
    config = str(write_config(tmp_path, collective_timeout=10))
    arguments = [config, "name=hung", "task.hang_on_rank=1"]
    code, output = run(command(2, *arguments), timeout=120)
    assert code not in (0, 75), output
    run_dir = tmp_path / "runs" / "hung"
    stacks = [(run_dir / "stacks" / f"rank-{rank}.txt").read_text() for rank in (0, 1)]
    assert "exact_task.py" in stacks[1], "where it hangs"
    assert all(f"rank {rank}" in text for rank, text in enumerate(stacks))
    assert str(ROOT / "train.py") in stacks[0]
    assert output.count("its stacks are in") == 2
    assert summary(run_dir)["status"] == "failed"
    cause = summary(run_dir)["cause"].lower()  # gloo's words for it
    assert "timed out" in cause or "timeout" in cause or "closed" in cause
