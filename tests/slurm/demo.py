"""SLURM for real: a cluster of one node, on which launch/slurm.sbatch is stopped and goes on.

    apt-get install slurm-wlm munge
    python tests/slurm/demo.py

As root, about four minutes. A run on two processes is stopped by the signal before its time limit
and preempted by an urgent job, goes on by itself both times, and ends with the hash of one
process that nobody stopped; another run is cancelled for good. Prints what happened; all of it
lives in a temporary folder, and ends with the script. Not a part of pytest: it needs daemons, and
minutes to a time limit.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from launching import ROOT, environment, metrics, summary, train, write_config

ENDED = ("PENDING", "COMPLETED", "FAILED", "TIMEOUT", "NODE_FAIL")
STEPS = 600
NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "srun")


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # end the daemons too
    missing = [program for program in NEEDED if shutil.which(program) is None]
    if missing or os.geteuid() != 0:
        print(f"SKIPPED: needs root, and slurm-wlm and munge (missing: {missing or 'nothing'})")
        return 0
    with tempfile.TemporaryDirectory() as name, cluster(Path(name)):
        folder = Path(name)
        exact = {"reproducibility": "bitwise", "precision": "fp32", "cpu_threads": 1}
        write_config(folder, steps=STEPS, save_every=None, eval_every=None, **exact)
        alone = train(folder, "alone", 1)
        stopped = stop_twice(folder)
        compare(alone, stopped)
        cancel(folder)
    return 0


@contextmanager
def cluster(folder: Path) -> Iterator[None]:
    """munged, slurmctld and slurmd, with all their files in `folder`."""
    text = (Path(__file__).parent / "slurm.conf").read_text()
    host, (port, node_port) = socket.gethostname().partition(".")[0], free_ports(2)
    conf = folder / "slurm.conf"
    conf.write_text(text.format(host=host, folder=folder, port=port, node_port=node_port))
    os.environ["SLURM_CONF"] = str(conf)
    folder.chmod(0o755)  # munged wants its socket reachable
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    munge = {"key-file": key, "socket": folder / "munge.socket", "pid-file": folder / "munge.pid"}
    munge |= {"log-file": folder / "munge.log", "seed-file": folder / "munge.seed"}
    with ExitStack() as daemons:
        options = [f"--{option}={path}" for option, path in munge.items()]
        daemons.enter_context(daemon("munged", "--foreground", "--force", *options))
        wait_until(lambda: (folder / "munge.socket").exists(), "munged", 20)
        daemons.enter_context(daemon("slurmctld", "-D"))
        daemons.enter_context(daemon("slurmd", "-D"))
        wait_until(lambda: "idle" in output("sinfo", "-h", "-o", "%T"), "the node", 60)
        try:
            yield
        finally:
            output("scancel", "--me", "--signal=KILL", "--full")


def free_ports(count: int) -> list[int]:
    with ExitStack() as sockets:
        found = [sockets.enter_context(socket.socket()) for _ in range(count)]
        for each in found:
            each.bind(("", 0))
        return [each.getsockname()[1] for each in found]


@contextmanager
def daemon(*command: str) -> Iterator[None]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()


def stop_twice(folder: Path) -> Path:
    """Returns the run directory of the finished run."""
    log = folder / "job.log"
    job = Job(submit(folder, log), log)
    job.wait_until(lambda: job.log_has("SIGUSR1: stopping"), "the signal before the time limit")
    job.wait_until(lambda: job.restarts == 1, "the requeue")
    output("scontrol", "update", f"JobId={job.number}", "TimeLimit=30")  # no signal but the next
    job.start_again()
    steps = job.step
    job.wait_until(lambda: job.step > steps + 20, "20 steps more")
    urgent = output("sbatch", "--parsable", "--partition=urgent", "--cpus-per-task=2",
                    f"--output={folder}/urgent.log", "--wrap=sleep 5")  # fmt: skip
    say(f"submitted job {urgent} to the urgent partition")
    job.wait_until(lambda: job.log_has("SIGTERM: stopping"), "the SIGTERM of the preemption")
    job.wait_until(lambda: job.restarts == 2, "the requeue")
    job.wait_until(lambda: "COMPLETED" in show(urgent), "the end of the urgent job")
    job.start_again()
    job.wait_until(lambda: job.state in ENDED, "the end")
    print(f"--- {log.name}, but for the lines of single steps")
    print(re.sub(r"(?m)^step .*\n", "", log.read_text()))
    print("--- scontrol show job")
    print(job.shown)
    return folder / "runs" / f"slurm-{job.number}"


def cancel(folder: Path) -> None:
    log = folder / "cancelled.log"
    job = Job(submit(folder, log), log)
    job.wait_until(lambda: job.step > 20, "20 steps")
    output("scancel", job.number)
    job.wait_until(lambda: job.state in (*ENDED, "CANCELLED"), "the end after scancel")
    assert job.state == "CANCELLED"
    assert summary(folder / "runs" / f"slurm-{job.number}")["status"] == "stopped"
    say("OK: scancel ends a run for good, with a checkpoint")


def submit(folder: Path, log: Path) -> str:
    """sbatch with the shipped script: two processes, three minutes, the signal a minute earlier."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return output(
        "sbatch", "--parsable", "--cpus-per-task=2", "--time=3", "--signal=USR1@60",
        f"--output={log}", "launch/slurm.sbatch", str(folder / "exact.yaml"),
        "task.seconds_per_batch=0.1", "save_every=null",
        **environment(PROCESSES_PER_MACHINE="2", PATH=path, SLURM_CONF=os.environ["SLURM_CONF"]),
    )  # fmt: skip


class Job:
    """What scontrol and its log say of a job, and waiting for it; says what it saw."""

    def __init__(self, number: str, log: Path) -> None:
        self.number, self.log = number, log
        say(f"submitted job {number}")

    @property
    def shown(self) -> str:
        return show(self.number)

    @property
    def state(self) -> str:
        return field("JobState", self.shown)

    @property
    def restarts(self) -> int:
        return int(field("Restarts", self.shown))

    @property
    def step(self) -> int:
        """The last one that the log tells of."""
        found = re.findall(r"(?m)^step (\d+)/", self.log.read_text()) if self.log.exists() else []
        return int(found[-1]) if found else 0

    def log_has(self, text: str) -> bool:
        return self.log.exists() and text in self.log.read_text()

    def wait_until(self, condition: Callable[[], bool], what: str, seconds: float = 300) -> None:
        wait_until(condition, what, seconds)
        say(f"saw {what}: job {self.number} is {self.state}, restarts {self.restarts}, "
            f"logged step {self.step}")  # fmt: skip

    def start_again(self) -> None:
        """A requeued job waits two minutes; we only wait until SLURM has let go of its credential,
        which fails a job that starts in the second in which it was requeued."""
        output("scontrol", "update", f"JobId={self.number}", "StartTime=now+5")
        self.wait_until(lambda: self.state != "PENDING", "the start after the requeue")


def compare(alone: Path, stopped: Path) -> None:
    assert summary(stopped)["status"] == "finished"
    assert [row["step"] for row in metrics(stopped)] == list(range(1, STEPS + 1))
    hashes = [summary(run_dir)["weights_sha256"] for run_dir in (alone, stopped)]
    say(f"SHA-256 of the weights: one process {hashes[0]}, the job {hashes[1]}")
    assert hashes[0] == hashes[1]
    say(f"OK: one hash after {STEPS} steps")


def show(job: str) -> str:
    return output("scontrol", "show", "job", job)


def field(name: str, shown: str) -> str:
    found = re.search(rf"\b{name}=(\S+)", shown)
    assert found, shown
    return found[1]


def output(*command: str, **environ: str) -> str:
    env = environ or None
    done = subprocess.run(command, env=env, cwd=ROOT, text=True, capture_output=True)
    if done.returncode != 0:
        raise RuntimeError(f"{command[0]}: {done.stderr}")
    return done.stdout.strip()


def wait_until(condition: Callable[[], bool], what: str, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not come within {seconds} s")
        time.sleep(0.5)


def say(message: str) -> None:
    print(time.strftime("%H:%M:%S"), message, flush=True)


if __name__ == "__main__":
    sys.exit(main())
