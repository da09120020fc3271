"""One SHA-256 of the weights on 1, 2, 4 and 8 processes, and after 20 times kill -9.

    python benchmarks/one_hash.py                       both networks, 35 minutes on 2 cores
    python benchmarks/one_hash.py --steps 60 --kills 3   shorter

Trains a ResNet-18 and a vision transformer with dropout on scikit-learn's digits with
`reproducibility: bitwise`, augmentation, clipping and an average of the weights. After each kill,
at a random moment (while saving, too), the run goes on with 1, 2 or 4 processes, drawn at random.
Prints the hashes, and ends with 1 if they are not all the same.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).parent.parent
VIT = (
    "{name: vit, config: {hidden_size: 48, num_hidden_layers: 2, num_attention_heads: 4, "
    "intermediate_size: 96, patch_size: 2, hidden_dropout_prob: 0.1}}"
)
NETWORKS = {"resnet18": "{name: resnet18}", "vit with dropout": VIT}


def command(
    output_dir: Path, name: str, model: str, steps: int, processes: int, save_every: str = "null"
) -> list[str]:
    hardware = "cpu" if processes == 1 else "cpu_2"
    several = ["--num_processes", str(processes), "--main_process_port", "0"]
    return [
        *(sys.executable, "-m", "accelerate.commands.launch"),
        *("--config_file", f"accelerate_configs/{hardware}.yaml"),
        *(several if processes > 1 else []),
        *("train.py", "configs/digits.yaml", f"output_dir={output_dir}", f"name={name}"),
        *("reproducibility=bitwise", "global_batch_size=64", "micro_batch_size=8"),
        *(f"steps={steps}", "epochs=null", f"task.model={model}", "ema_decay=0.99"),
        *(f"save_every={save_every}", "eval_every=50", "tracking.with=[]"),
    ]


def whole(output_dir: Path, model: str, steps: int, processes: int) -> str:
    """The hash of a run without a stop."""
    name = f"on-{processes}"
    started = time.perf_counter()
    finish(command(output_dir, name, model, steps, processes))
    seconds = time.perf_counter() - started
    return told(f"{processes} process(es), {seconds:.0f} s", output_dir / name)


def killed(output_dir: Path, model: str, steps: int, kills: int) -> str:
    """The hash of a run that was killed `kills` times."""
    run_dir, draw = output_dir / "killed", random.Random(0)
    launches = []
    for _ in range(kills):
        processes = draw.choice([1, 2, 4])
        launches.append(processes)
        before, launched = newest(run_dir), time.time()
        process = subprocess.Popen(
            command(output_dir, "killed", model, steps, processes, save_every="5"),
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        # One checkpoint further, so that the run gets on; a save takes a good part of this time.
        while newest(run_dir) <= before and process.poll() is None:
            assert time.time() - launched < 300, "no checkpoint in five minutes"
            time.sleep(0.05)
        time.sleep(draw.random())
        if process.poll() is not None:
            raise SystemExit(f"the run ended after {len(launches)} of {kills} kills: more --steps")
        kill(process)
    processes = draw.choice([1, 2, 4])
    finish(command(output_dir, "killed", model, steps, processes))
    return told(f"killed {kills} times, on {[*launches, processes]}", run_dir)


def finish(arguments: list[str]) -> None:
    ended = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    if ended.returncode:
        raise SystemExit(ended.stdout + ended.stderr)


def kill(launcher: subprocess.Popen[bytes]) -> None:
    """kill -9 for the launcher and, at the same moment, for all it has started."""
    parent = psutil.Process(launcher.pid)
    for process in [parent, *parent.children(recursive=True)]:
        process.kill()
    launcher.wait()


def newest(run_dir: Path) -> int:
    names = (path.name.removeprefix("step-") for path in run_dir.glob("checkpoints/step-*"))
    return max((int(name) for name in names if name.isdigit()), default=0)


def told(what: str, run_dir: Path) -> str:
    sha256: str = json.loads((run_dir / "summary.json").read_text())["weights_sha256"]
    print(f"  {sha256}  {what}", flush=True)
    return sha256


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--kills", type=int, default=20)
    options = parser.parse_args()
    hashes = []
    for title, model in NETWORKS.items():
        print(f"{title}, {options.steps} steps", flush=True)
        with tempfile.TemporaryDirectory() as directory:
            found = {whole(Path(directory), model, options.steps, p) for p in (1, 2, 4, 8)}
            found.add(killed(Path(directory), model, options.steps, options.kills))
        hashes.append(found)
    return 0 if all(len(found) == 1 for found in hashes) else 1


if __name__ == "__main__":
    sys.exit(main())
