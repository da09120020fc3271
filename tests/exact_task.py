"""A small task that uses all that makes training depend on hardware when done carelessly:
dropout, augmentation, BatchNorm, and samples with different numbers of targets.

Named in a run config as `task.name=exact_task`, with tests/ on PYTHONPATH. If EXACT_TRACE names a
folder, each process appends the sample indices of every micro-batch it trains on to a file there.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evenstep.task import Batch, Table, Task

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn


class Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    name: str = "exact_task"
    num_samples: int = 50
    num_eval: int = 10
    dropout: float = 0.3
    batchnorm: bool = True
    augment: bool = True
    nan_at_index: int | None = None  # this sample's loss is NaN
    nan_gradient: bool = False  # ... or finite, with a NaN gradient
    layer_drop: bool = False  # a layer that a forward uses or not
    layer_swap: bool = False  # two layers in any order
    draws: bool = False  # from random and numpy too: in the model, its weights and the eval split
    weighted: bool = False  # targets count 0.7 each
    fail_on_rank: int | None = None
    fail_with: str = ""
    hang_on_rank: int | None = None
    oom_above: int | None = None  # samples of a micro-batch; forward and backward need memory
    seconds_per_batch: float = 0.0


class Sequences:
    """Sample i: x (5, 8), labels (5,), of which the first 1 + i % 5 count."""

    def __init__(self, num_samples: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(num_samples, 5, 8, generator=generator)
        self.y = torch.randint(3, (num_samples, 5), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Any]:
        counted = torch.arange(5) <= index % 5
        return {"x": self.x[index], "y": self.y[index], "mask": counted, "index": index}


class NoisySequences(Sequences):
    """Draws when it is read, as an evaluation split should not, but may."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = super().__getitem__(index)
        return {**sample, "x": sample["x"] + torch.randn(5, 8)}


class Network(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        # With a bias before BatchNorm its gradient would be rounding alone, which Adam scales up.
        self.inner = nn.Linear(8, 16, bias=not config.batchnorm)
        self.norm = nn.BatchNorm1d(16) if config.batchnorm else nn.Identity()
        self.drop = nn.Dropout(config.dropout)
        self.outer = nn.Linear(16, 3)
        self.extra = nn.Linear(16, 16) if config.layer_drop else None
        self.swapped = nn.ModuleList(
            nn.Linear(16, 16) for _ in range(2 if config.layer_swap else 0)
        )
        self.draws = config.draws
        if config.draws:
            self.outer.weight.data += torch.from_numpy(np.random.randn(3, 16)).float() / 10

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inner(x)
        hidden = self.norm(hidden.flatten(0, 1)).view_as(hidden).relu()
        if self.extra is not None and torch.rand(()) < 0.5:
            hidden = hidden + self.extra(hidden)
        if self.swapped:
            first = int(torch.rand(()) < 0.5)
            hidden = hidden + self.swapped[1 - first](self.swapped[first](hidden).relu())
        if self.draws and self.training:
            hidden = hidden * (1 + 0.1 * random.random() + 0.1 * np.random.rand())
        return self.outer(self.drop(hidden))


def build(config: Config) -> Task:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        trace(batch)
        time.sleep(config.seconds_per_batch)
        if config.fail_on_rank == int(os.environ.get("RANK", "0")):
            raise RuntimeError(f"this rank fails {config.fail_with}")
        if config.hang_on_rank == int(os.environ.get("RANK", "0")):
            time.sleep(3600)
        if config.oom_above is not None and len(batch["index"]) > config.oom_above:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        losses = token_losses(model, batch)
        if config.nan_at_index in batch["index"].tolist():
            zero = losses.flatten()[0] * 0
            losses = losses + (zero.sqrt() - zero.detach() if config.nan_gradient else zero / zero)
        return (losses * batch["mask"]).sum() * (0.7 if config.weighted else 1)

    def score(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        losses = token_losses(model, batch) * batch["mask"]
        return {"value": batch["index"], "loss": losses.sum(1), "targets": batch["mask"].sum(1)}

    def summarize(table: Table) -> dict[str, float]:
        return {
            "value": float(table["value"].mean()),
            "rows": float(len(table["index"])),
            "loss": float(table["loss"].sum() / table["targets"].sum()),
        }

    held_out = (NoisySequences if config.draws else Sequences)(config.num_eval, seed=2)
    return Task(
        model=lambda: Network(config),
        train_dataset=Sequences(config.num_samples, seed=1),
        eval_dataset=held_out if config.num_eval else None,
        collate=collate,
        count=lambda batch: batch["mask"].sum() * (0.7 if config.weighted else 1),
        loss=loss,
        score=score,
        summarize=summarize,
        best_metric="loss",
        higher_is_better=False,
        augment=add_noise if config.augment else None,
    )


def collate(samples: Sequence[dict[str, Any]]) -> Batch:
    return {
        "index": torch.tensor([s["index"] for s in samples]),
        **{key: torch.stack([s[key] for s in samples]) for key in ("x", "y", "mask")},
    }


def add_noise(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "x": sample["x"] + 0.1 * torch.randn(5, 8)}


def token_losses(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(batch["x"])
    return nn.functional.cross_entropy(
        logits.flatten(0, 1), batch["y"].flatten(), reduction="none"
    ).view(-1, 5)


def trace(batch: Batch) -> None:
    if folder := os.environ.get("EXACT_TRACE"):
        with (Path(folder) / f"rank-{os.environ.get('RANK', '0')}.jsonl").open("a") as file:
            file.write(json.dumps(batch["index"].tolist()) + "\n")
