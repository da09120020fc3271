"""One directory for all processes, one live run in it, every file whole; and its environment."""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from evenstep import environment, run_directory
from evenstep.files import to_json, write_atomically
from evenstep.run_state import RunState

import pytest
import torch


def create(output_dir, name="a", resume="auto", config_text="seed: 0\n"):
    return run_directory.create(output_dir, name, "digits", resume, config_text)


def start(tmp_path, code):
    """Run `code` in another process until it prints a line."""
    prelude = f"""
import os, sys, time
from pathlib import Path
from evenstep import run_directory
run = run_directory.create(Path({str(tmp_path)!r}), "a", "digits", "auto", "")
"""
    child = subprocess.Popen([sys.executable, "-c", prelude + code], stdout=subprocess.PIPE)
    line = child.stdout.readline().decode().strip()
    return child, line


def test_a_new_run_without_a_name_is_named_by_config_and_time(tmp_path):
    with create(tmp_path / "runs", name=None) as run:
        stem, _, stamp = run.path.name.partition("-")
        assert stem == "digits"
        assert abs(time.mktime(time.strptime(stamp, "%Y%m%d-%H%M%S")) - time.time()) < 60
        assert (run.path / "config.yaml").read_text() == "seed: 0\n"
        assert run.saved_config is None
        assert not run.finished


def test_runs_launched_in_the_same_second_get_a_directory_each(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "strftime", lambda form: "20260101-000000")
    with ThreadPoolExecutor(8) as pool:
        runs = list(pool.map(lambda _: create(tmp_path, name=None), range(8)))
    assert len({run.path for run in runs}) == len(list(tmp_path.iterdir())) == 8


@pytest.mark.processes
def test_two_processes_agree_on_exactly_one_directory_and_on_errors(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(f"""
import torch.distributed as dist
from pathlib import Path
from evenstep import run_directory
dist.init_process_group("gloo")
out = Path({str(tmp_path / "runs")!r})
run = run_directory.create(out, None, "digits", "auto", "")
try:
    run_directory.create(out, run.path.name, "digits", "never", "")
except ValueError as error:
    outcome = "refused" if "resume=auto" in str(error) else str(error)
record = Path({str(tmp_path)!r}, f"rank{{dist.get_rank()}}")
record.write_text(f"{{run.path}} {{run.is_main}} {{outcome}}")
dist.destroy_process_group()
""")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", str(script)]
    subprocess.run(command, check=True, timeout=120, capture_output=True)
    (path,) = (tmp_path / "runs").iterdir()
    assert (tmp_path / "rank0").read_text() == f"{path} True refused"
    assert (tmp_path / "rank1").read_text() == f"{path} False refused"


def test_resume_auto_goes_on_and_hands_back_the_saved_config(tmp_path):
    with create(tmp_path) as run:
        (run.path / "metrics.jsonl").write_text('{"step": 1}\n')
    with create(tmp_path, config_text="seed: 1\n") as run:
        assert run.saved_config == "seed: 0\n"
        assert (run.path / "config.yaml").read_text() == "seed: 0\n"
        assert not run.finished
        run.write_summary("stopped", RunState(step=1))
    with create(tmp_path) as run:
        assert not run.finished
        run.write_summary("finished", RunState(step=2))
    with create(tmp_path) as run:
        assert run.finished


def test_a_run_that_never_trained_takes_a_mended_config(tmp_path):
    with create(tmp_path) as run:
        run.write_summary("failed", RunState())
        (run.path / "metrics.jsonl").touch()
    with create(tmp_path, config_text="seed: 1\n") as run:
        assert run.saved_config is None
        assert (run.path / "config.yaml").read_text() == "seed: 1\n"
        assert not (run.path / "summary.json").exists()


def test_resume_never_refuses_a_directory_that_exists(tmp_path):
    with create(tmp_path, resume="never"):
        pass
    with pytest.raises(ValueError, match=r"a exists.*another name.*resume=auto"):
        create(tmp_path, resume="never")


@pytest.mark.parametrize("name", ["../a", "a/b", "..", "."])
def test_a_name_cannot_lead_out_of_the_output_directory(tmp_path, name):
    with pytest.raises(ValueError, match="no plain directory name"):
        create(tmp_path / "runs", name=name)


def test_a_second_live_run_is_refused_until_kill_9_frees_the_directory(tmp_path):
    # The forked grandchild stands for a loader worker: it outlives the run for a while.
    child, worker = start(
        tmp_path, "pid = os.fork()\nif pid: print(pid, flush=True)\ntime.sleep(60)"
    )
    try:
        with pytest.raises(ValueError, match=rf"in use by process {child.pid} .*name="):
            create(tmp_path)
        child.send_signal(signal.SIGKILL)
        child.wait()
        os.kill(int(worker), 0)  # the worker lives
        with create(tmp_path):
            pass
    finally:
        child.kill()
        os.kill(int(worker), signal.SIGKILL)


def test_leaving_the_block_frees_the_directory(tmp_path):
    child, _ = start(tmp_path, "with run: pass\nprint(flush=True)\ntime.sleep(60)")
    try:
        with create(tmp_path):
            pass
    finally:
        child.kill()


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "summary.json"
    write_atomically(path, "old")

    def disk_full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", disk_full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, "new")
    assert path.read_text() == "old"


def test_a_failed_summary_is_strict_json_with_the_cause_masked(tmp_path):
    with create(tmp_path) as run:
        metrics = {"eval/loss": float("nan"), "eval/matrix": torch.eye(2), "eval/f1": 0.1 + 0.2}
        cause = RuntimeError("no access with hf_abcdefghijklmnopqrst")
        returned = run.write_summary("failed", RunState(metrics=metrics), cause=cause)
    summary = json.loads((run.path / "summary.json").read_text(), parse_constant=pytest.fail)
    assert summary["cause"] == returned["cause"]
    assert summary["status"] == "failed"
    assert summary["cause"] == "RuntimeError: no access with ***"
    assert summary["metrics"] == {
        "eval/loss": None,
        "eval/matrix": [[1.0, 0.0], [0.0, 1.0]],
        "eval/f1": 0.30000000000000004,
    }


def test_an_error_of_one_process_alone_is_told_once(tmp_path, capsys):
    with create(tmp_path) as run:
        for process in (replace(run, lock=None), replace(run, lock=None), run):
            process.record_failure(RunState(), ValueError, ValueError("row 7 is broken"), None)
    assert capsys.readouterr().err == "error: row 7 is broken\n"


def test_infinity_anywhere_becomes_null():
    assert to_json({"a": [float("inf"), (1, -float("inf"))]}) == '{"a": [null, [1, null]]}'


# environment.json


def git(directory, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "-C", directory, *identity, *arguments], check=True, capture_output=True)


def describe(code, num_processes=1, device="cpu", fingerprint="x"):
    return environment.describe(
        num_processes=num_processes,
        device=torch.device(device),
        data_identity={"fingerprint": fingerprint, "sizes": (3, 4)},
        code=code,
    )


@pytest.fixture
def repository(tmp_path):
    git(tmp_path, "init")
    (tmp_path / "model.py").write_text("width = 1\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "first")
    return tmp_path


def test_the_environment_is_json_and_names_code_versions_and_data(repository):
    (repository / "model.py").write_text("width = 2\npassword='hunter2hunter2'\n")
    (repository / "new.py").write_text("")
    described = describe(repository)
    assert json.loads(json.dumps(described)) == described
    assert len(described["git"]["commit"]) == 40
    assert "+width = 2" in described["git"]["diff"]
    assert "hunter2" not in str(described)
    assert described["git"]["untracked"] == ["new.py"]
    assert described["versions"]["torch"] == torch.__version__.partition("+")[0]
    assert described["data"] == {"fingerprint": "x", "sizes": [3, 4]}


def test_a_directory_without_git_is_described_too(tmp_path):
    assert describe(tmp_path)["git"] is None


def test_only_what_may_change_results_is_a_change(repository):
    before = describe(repository)
    assert environment.changes(before, describe(repository, num_processes=4)) == []
    other_machine = {**before, "host": "other", "hardware_file": "x.yaml", "cpu_count": 99}
    assert environment.changes(before, other_machine) == []

    (repository / "new.py").write_text("x = 1")
    uncommitted = describe(repository)
    assert environment.changes(before, uncommitted)[0].startswith("uncommitted code")
    (repository / "new.py").write_text("x = 2")
    assert environment.changes(uncommitted, describe(repository))[0].startswith("uncommitted code")

    git(repository, "commit", "--allow-empty", "-m", "second")
    after = describe(repository, fingerprint="y")
    after["versions"]["torch"] = "1.0"
    after["device"]["type"] = "cuda"
    changes = environment.changes(uncommitted, after)
    assert [change.partition(" was ")[0] for change in changes] == [
        "device",
        "git commit",
        "uncommitted code (SHA-256)",
        "versions: torch",
        "data: fingerprint",
    ]
    assert "data: fingerprint was x and is y" in changes


def test_a_huge_diff_is_cut_at_a_line(repository):
    (repository / "model.py").write_text("x = 1\n" * environment.MAX_DIFF)
    diff = describe(repository)["git"]["diff"]
    assert len(diff) < environment.MAX_DIFF + 100
    assert diff.splitlines()[-2] == "+x = 1"
    assert diff.endswith("cut\n")


@pytest.mark.parametrize(
    "option", [["--config_file", "my file.yaml"], ["--config_file=my file.yaml"]]
)
def test_the_hardware_file_is_the_launchers(option, monkeypatch):
    code = "import time; print(flush=True); time.sleep(60)"
    command = [sys.executable, "-c", code, *option, "train.py"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as launcher:
        launcher.stdout.readline()
        monkeypatch.setattr(os, "getppid", lambda: launcher.pid)
        hardware_file = environment.hardware_file()
        launcher.kill()
    assert hardware_file == "my file.yaml"


def test_without_a_launcher_there_is_no_hardware_file(monkeypatch):
    monkeypatch.setattr(os, "getppid", lambda: 0)
    assert environment.hardware_file() is None
