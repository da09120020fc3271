"""What the loop costs: evenstep against a bare PyTorch loop, side by side in one process.

    python benchmarks/overhead.py            about a minute on 2 cores; prints the ratio

Both train the same 3-layer convolution network of width 16 on scikit-learn's digits, batch 64,
with AdamW, clipping and a falling learning rate, on 2 threads, and log nothing. The time is that
from one forward to the next, so it holds all that a loop does in a step. The two take turns, and
each turn gives a ratio: machines are noisy, their noise is shared.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from evenstep.datasets import digits

import torch
from tiny_model import Network, starts
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

sys.path.append(str(Path(__file__).parent.parent))
import train

STEPS, WARMUP, TURNS = 400, 50, 9


def bare() -> None:
    """The loop of a tutorial."""
    data = digits.build(digits.Config(name="digits")).train
    images, labels = data.images.float() / 255, torch.tensor(data.labels)
    mean, std = images.mean(), images.std()
    loader = DataLoader(
        TensorDataset((images - mean) / std, labels), batch_size=64, shuffle=True, drop_last=True
    )
    model = Network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / STEPS)
    step = 0
    while step < STEPS:
        for x, y in loader:
            if step == STEPS:
                break
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            step += 1


def even() -> None:
    with tempfile.TemporaryDirectory() as directory:
        train.main(
            [
                "configs/digits.yaml",
                f"output_dir={directory}",
                "task.model={name: tiny_model}",
                "task.augment=[]",
                "global_batch_size=64",
                "micro_batch_size=64",
                "epochs=null",
                f"steps={STEPS}",
                "optimizer={name: adamw, lr: 1e-3, weight_decay: 0.05, max_grad_norm: 1.0}",
                "schedule={name: linear}",
                "log_every=null",
                "eval_every=null",
                "save_every=null",
                "tracking.with=[]",
            ]
        )


def milliseconds_per_step(loop: Callable[[], None]) -> float:
    starts.clear()
    loop()
    return (starts[STEPS - 1] - starts[WARMUP]) / (STEPS - 1 - WARMUP) * 1e3


def main() -> None:
    torch.set_num_threads(2)
    pairs = [(milliseconds_per_step(bare), milliseconds_per_step(even)) for _ in range(TURNS)]
    for number, (theirs, ours) in enumerate(pairs):
        print(f"turn {number}: bare {theirs:.3f} ms  evenstep {ours:.3f} ms  {ours / theirs:.3f}")
    ratio = statistics.median(ours / theirs for theirs, ours in pairs)
    print(f"median ratio evenstep / bare: {ratio:.3f}")


if __name__ == "__main__":
    main()
