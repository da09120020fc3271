"""evenstep.launch returns what the script returned and passes signals on; two machines give the
result of one process. (SLURM for real: tests/slurm/demo.py.)"""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from launching import ROOT, command, metrics, run, started, summary, train, write_config

pytestmark = pytest.mark.processes

ACCELERATE = ["-m", "accelerate.commands.launch"]


def launch(processes, *arguments):
    """`python -m evenstep.launch` with what `accelerate launch` would get."""
    hardware = "cpu" if processes == 1 else "cpu_2"
    python, *rest = command(processes, *arguments, hardware=hardware)
    assert rest[:2] == ACCELERATE
    return [python, "-m", "evenstep.launch", *rest[2:]]


@contextmanager
def two_machines(*arguments):
    """Two launchers on the loopback address, each taking itself for a machine of its own."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    script = str(ROOT / "launch" / "multi_node.sh")
    environ = {
        "NUM_MACHINES": "2",
        "PROCESSES_PER_MACHINE": "1",
        "MAIN_ADDRESS": "127.0.0.1",
        "MAIN_PORT": str(port),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    first = started(["bash", script, *arguments], **environ, MACHINE_RANK="0")
    second = started(["bash", script, *arguments], **environ, MACHINE_RANK="1")
    with first as main, second as other:
        yield main, other


def wait_until(condition, process, seconds=90):
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "nothing happened in time"
        time.sleep(0.05)


def has_logged(run_dir):
    return (run_dir / "metrics.jsonl").exists() and len(metrics(run_dir)) > 3


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1], ids=lambda n: n.name)
def test_a_stopped_run_returns_75_and_leaves_no_process(tmp_path, processes, number):
    config = str(write_config(tmp_path, save_every=None, steps=4000))
    run_dir = tmp_path / "runs" / "stopped"
    with started(launch(processes, config, "name=stopped")) as process:
        wait_until(lambda: has_logged(run_dir), process)
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 75, output
        assert not [child for child in children if child.is_running()]
    assert "Traceback" not in output
    stopped = summary(run_dir)
    assert stopped["status"] == "stopped"
    assert (run_dir / "checkpoints" / f"step-{stopped['step']:08d}").is_dir()


def test_a_signal_before_there_is_anything_to_stop_returns_75(tmp_path):
    """SIGUSR1 would kill a launcher that is still importing, or training that is."""
    with started(launch(1, str(write_config(tmp_path)), "name=early")) as process:
        wait_until(lambda: psutil.Process(process.pid).children(), process)
        process.send_signal(signal.SIGUSR1)
        assert process.wait(timeout=60) == 75


@pytest.mark.parametrize("processes", [1, 2])
def test_a_bad_key_returns_2(tmp_path, processes):
    code, output = run(launch(processes, str(write_config(tmp_path)), "learning_rte=1"))
    assert code == 2, output
    assert "learning_rte" in output
    assert "Traceback" not in output


def test_a_finished_run_returns_0(tmp_path):
    config = str(write_config(tmp_path, steps=2))
    code, output = run(launch(2, config, "name=done"))
    assert code == 0, output


def test_a_failing_rank_returns_1(tmp_path):
    arguments = [str(write_config(tmp_path)), "name=failed", "task.fail_on_rank=1"]
    code, output = run(launch(2, *arguments))
    assert code == 1, output
    assert "this rank fails" in output


def test_a_process_that_is_killed_returns_128_and_its_signal(tmp_path):
    config = str(write_config(tmp_path, steps=4000))
    with started(launch(1, config, "name=killed")) as process:
        wait_until(lambda: has_logged(tmp_path / "runs" / "killed"), process)
        psutil.Process(process.pid).children()[0].kill()
        assert process.wait(timeout=60) == 128 + signal.SIGKILL


def test_a_tpu_without_torch_xla_says_why_it_cannot_be(tmp_path):
    hardware = str(ROOT / "accelerate_configs" / "tpu.yaml")
    launcher = [sys.executable, "-m", "evenstep.launch", "--config_file", hardware]
    code, output = run([*launcher, "train.py", str(write_config(tmp_path))])
    assert code == 2
    assert "torch_xla" in output
    assert "cannot be rehearsed" in output
    assert "Traceback" not in output


def test_two_machines_give_the_hash_of_one_process(tmp_path):
    write_config(tmp_path, reproducibility="bitwise", precision="fp32", cpu_threads=1)
    alone = train(tmp_path, "alone", 1)
    together = tmp_path / "runs" / "machines"
    with two_machines(str(tmp_path / "exact.yaml"), f"name={together.name}") as machines:
        outputs = [machine.communicate(timeout=120)[0] for machine in machines]
        assert [machine.returncode for machine in machines] == [0, 0], outputs
    assert "2 process(es)" in outputs[0]
    assert summary(together)["weights_sha256"] == summary(alone)["weights_sha256"]


def test_a_signal_to_one_machine_stops_all_of_them(tmp_path):
    config = str(write_config(tmp_path, save_every=None, steps=4000))
    with two_machines(config, "name=stopped") as machines:
        wait_until(lambda: has_logged(tmp_path / "runs" / "stopped"), machines[0])
        machines[1].send_signal(signal.SIGUSR1)
        outputs = [machine.communicate(timeout=60)[0] for machine in machines]
        assert [machine.returncode for machine in machines] == [75, 75], outputs
    assert summary(tmp_path / "runs" / "stopped")["status"] == "stopped"


def test_the_scripts_are_valid_bash():
    for script in (ROOT / "launch").glob("*.s*"):
        subprocess.run(["bash", "-n", str(script)], check=True)
