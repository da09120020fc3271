"""What `reproducibility: bitwise` costs one process, against rounding mode, side by side.

    python benchmarks/bitwise.py             about three minutes on 2 cores; prints the ratio

A ResNet-18 on 32x32 images (scikit-learn's digits, enlarged), batch 64 in micro-batches of 16, on 2
threads in both modes. They take turns, and each turn gives a ratio of medians over its steps:
machines are noisy, their noise is shared.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parent.parent))
import train

STEPS, WARMUP, TURNS = 8, 2, 5


def seconds_per_step(reproducibility: str) -> float:
    torch.use_deterministic_algorithms(False)  # bitwise mode leaves it on
    with tempfile.TemporaryDirectory() as directory:
        train.main(
            [
                "configs/digits.yaml",
                f"output_dir={directory}",
                "name=run",
                f"reproducibility={reproducibility}",
                "cpu_threads=2",
                "task.image_size=32",
                "task.channels=3",
                "global_batch_size=64",
                "micro_batch_size=16",
                "epochs=null",
                f"steps={STEPS}",
                "log_every=1",
                "eval_every=null",
                "save_every=null",
                "tracking.with=[]",
            ]
        )
        lines = (Path(directory) / "run" / "metrics.jsonl").read_text().splitlines()
    paces = [json.loads(line)["train/samples_per_second"] for line in lines[WARMUP:]]
    return 64 / statistics.median(paces)


def main() -> None:
    ratios = []
    for turn in range(TURNS):
        rounding, bitwise = seconds_per_step("rounding"), seconds_per_step("bitwise")
        ratios.append(bitwise / rounding)
        print(f"turn {turn}: rounding {rounding:.3f} s  bitwise {bitwise:.3f} s  {ratios[-1]:.3f}")
    print(f"median ratio bitwise / rounding: {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    main()
