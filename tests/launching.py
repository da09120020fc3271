"""Start real training runs from tests, each with a time limit that ends all of its processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import yaml

ROOT = Path(__file__).parent.parent
EXACT = {
    "task": {"name": "exact_task"},
    "seed": 3,
    "global_batch_size": 8,
    "micro_batch_size": 2,
    "steps": 40,
    "precision": "fp64",
    "optimizer": {"name": "adamw", "lr": 0.01, "weight_decay": 0.05, "max_grad_norm": 1.0},
    "schedule": {"name": "cosine", "warmup": "10%"},
    "log_every": 1,
    "eval_every": 10,
    "save_every": 10,
    "tracking": {"with": []},
}


def command(
    processes: int, *arguments: str, hardware: str = "", script: Path = ROOT / "train.py"
) -> list[str]:
    """`accelerate launch` of P processes with a shipped hardware file, by default on the CPU; one
    process without a hardware file is the script alone, which spares the launcher's start-up."""
    if processes == 1 and not hardware:
        return ["env", "ACCELERATE_USE_CPU=true", sys.executable, str(script), *arguments]
    name = hardware or "cpu_2"
    file = ROOT / "accelerate_configs" / f"{name}.yaml"
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(file)]
    several = ["--num_processes", str(processes), "--main_process_port", "0"]
    return [*launcher, *(several if processes > 1 else []), str(script), *arguments]


def environment(**extra: str) -> dict[str, str]:
    inherited = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    # passive: processes that share cores should not spin while they wait for their threads
    inherited["OMP_WAIT_POLICY"] = "passive"
    return {**inherited, "PYTHONPATH": str(ROOT / "tests"), "HF_HUB_OFFLINE": "1", **extra}


@contextmanager
def started(arguments: list[str], **environ: str) -> Iterator[subprocess.Popen[str]]:
    """The process; what is left of it and of its children is killed at exit."""
    process = subprocess.Popen(
        arguments,
        env=environment(**environ),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        kill_session(process)


def kill_session(process: subprocess.Popen[str]) -> None:
    """kill -9 for the launcher and its workers, which torchrun puts into sessions of their own."""
    with suppress(psutil.NoSuchProcess):
        parent = psutil.Process(process.pid)
        for each in [parent, *parent.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                each.kill()
    process.wait()


def run(arguments: list[str], timeout: float = 120, **environ: str) -> tuple[int, str]:
    """(return code, output) of a command."""
    with started(arguments, **environ) as process:
        output, _ = process.communicate(timeout=timeout)
        return process.returncode, output


def write_config(directory: Path, **changes: Any) -> Path:
    """A run config for exact_task in `directory`, with top-level keys changed."""
    path = directory / "exact.yaml"
    path.write_text(yaml.safe_dump({**EXACT, "output_dir": str(directory / "runs"), **changes}))
    return path


def train(directory: Path, name: str, processes: int, *overrides: str, **environ: str) -> Path:
    """Train to the end; returns the run directory. Fails with the output if rc is not 0."""
    config = directory / "exact.yaml"
    if not config.exists():
        write_config(directory)
    code, output = run(command(processes, str(config), f"name={name}", *overrides), **environ)
    assert code == 0, output
    return directory / "runs" / name


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def summary(run_dir: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    return loaded
