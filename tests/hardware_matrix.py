"""Every hardware file against one process, and every checkpoint under every hardware.

    python tests/hardware_matrix.py           about a quarter of an hour on 2 cores
    python tests/hardware_matrix.py --files   the hardware files alone
    python tests/hardware_matrix.py --cells   the 36 pairs of saving and resuming alone

Trains a small network with dropout, BatchNorm, augmentation, uneven target counts, clipping,
accumulation and an average of the weights for 20 steps, with the real strategies; where there is no
accelerator, on CPU processes. Prints the largest difference to one process, never stopped, in loss
and gradient norm of any step and in any weight; ends with 1 if one is above 1e-9 in float64, or
above 1e-4 in float32, which is all that DeepSpeed has.
"""

from __future__ import annotations

import shutil
import socket
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from launching import ROOT, command, metrics, run, started, write_config
from safetensors.torch import load_file

LIMITS = {"fp64": 1e-9, "fp32": 1e-4}
SETUPS = {  # name: (processes, hardware file)
    "1 process": (1, "cpu"),
    "DDP 2": (2, "cpu_2"),
    "DDP 4": (4, "cpu_4"),
    "FSDP2 2": (2, "fsdp2"),
    "ZeRO-2 2": (2, "zero2"),
    "ZeRO-3 2": (2, "zero3"),
}
PROCESSES = {"cpu": 1, "one_gpu": 1, "mps": 1, "cpu_4": 4, "hybrid_shard": 4}  # of the others: 2
LAST, HALF = 20, 10
Numbers = dict[str, Any]


def train(directory: Path, name: str, processes: int, hardware: str, precision: str) -> Path:
    """Train to step 20, from the newest checkpoint of `name` if there is one."""
    config = str(directory / "exact.yaml")
    arguments = (config, f"name={name}", f"precision={precision}")
    if hardware == "multi_node":
        two_nodes(arguments)
    else:
        code, output = run(command(processes, *arguments, hardware=hardware), timeout=300)
        if code:
            raise SystemExit(output)
    return directory / "runs" / name


def two_nodes(arguments: tuple[str, ...]) -> None:
    """One launcher for each of two machines, on the loopback device."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    with ExitStack() as stack:
        nodes = []
        for rank in ("0", "1"):
            launch = command(1, *arguments, hardware="multi_node")
            address = ["--main_process_ip", "127.0.0.1", "--main_process_port", port]
            where = launch.index(str(ROOT / "train.py"))
            launch[where:where] = ["--machine_rank", rank, "--num_processes", "2", *address]
            nodes.append(stack.enter_context(started(launch)))
        for node in nodes:
            output, _ = node.communicate(timeout=300)
            if node.returncode:
                raise SystemExit(output)


def numbers(run_dir: Path) -> Numbers:
    keys = ("train/loss", "train/grad_norm", "eval/loss")
    rows = {
        f"{row['step']} {key}": row[key] for row in metrics(run_dir) for key in keys if key in row
    }
    return rows | load_file(run_dir / "final" / "model.safetensors")


def compare(run_dir: Path, reference: Numbers, precision: str) -> tuple[str, bool]:
    found = numbers(run_dir)
    assert found.keys() == reference.keys()
    largest = max(
        float(abs(value - reference[name]).max())
        if hasattr(value, "max")
        else abs(value - reference[name])
        for name, value in found.items()
    )
    return f"{largest:.0e} {precision}", largest <= LIMITS[precision]


def precisions(*hardware: str) -> str:
    return "fp32" if any(file.startswith("zero") for file in hardware) else "fp64"


def files(directory: Path, references: dict[str, Numbers]) -> bool:
    good = True
    for path in sorted((ROOT / "accelerate_configs").glob("*.yaml")):
        if path.stem == "tpu":
            print(f"{path.name:22} not run: PyTorch/XLA needs a TPU", flush=True)
            continue
        precision = precisions(path.stem)
        processes = PROCESSES.get(path.stem, 2)
        run_dir = train(directory, path.stem, processes, path.stem, precision)
        text, fits = compare(run_dir, references[precision], precision)
        print(f"{path.name:22} {processes} processes  {text}", flush=True)
        good &= fits
    return good


def cells(directory: Path, references: dict[str, Numbers]) -> bool:
    print(f"{'saved on / resumed on':22}" + "".join(f"{name:>12}" for name in SETUPS), flush=True)
    good = True
    for saved, (processes, hardware) in SETUPS.items():
        halves = {
            precision: half(directory, f"{saved} {precision}", processes, hardware, precision)
            for precision in {precisions(hardware), "fp32"}
        }
        print(f"{saved:22}", end="", flush=True)
        for resumed, (others, other) in SETUPS.items():
            precision = precisions(hardware, other)
            name = f"{saved}-{resumed}".replace(" ", "-")
            shutil.copytree(halves[precision], directory / "runs" / name)
            run_dir = train(directory, name, others, other, precision)
            text, fits = compare(run_dir, references[precision], precision)
            print(f"{text:>12}", end="", flush=True)
            good &= fits
        print()
    return good


def half(directory: Path, name: str, processes: int, hardware: str, precision: str) -> Path:
    """A run as a kill after the checkpoint of step 10 would leave it."""
    run_dir = train(directory, name.replace(" ", "-"), processes, hardware, precision)
    shutil.rmtree(run_dir / "checkpoints" / f"step-{LAST:08d}")
    shutil.rmtree(run_dir / "final")
    (run_dir / "summary.json").unlink()
    kept = (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)[:HALF]
    (run_dir / "metrics.jsonl").write_text("".join(kept))
    return run_dir


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        write_config(directory, steps=LAST, save_every=HALF, eval_every=HALF, ema_decay=0.9)
        references = {p: numbers(train(directory, p, 1, "cpu", p)) for p in LIMITS}
        wanted = sys.argv[1:] or ["--files", "--cells"]
        good = "--files" not in wanted or files(directory, references)
        good &= "--cells" not in wanted or cells(directory, references)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
