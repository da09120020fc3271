"""A small task on streams, whose samples are numbers that it can tell of.

Rows 0 to n - 1 lie in shards; the transformation of a block leaves out a row in five, and gives two
samples for one in seven. Augmentation, collate and dropout draw. If STREAM_TRACE names a folder,
each process appends the samples of every micro-batch it trains on to a file there.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evenstep.streams import Streams
from evenstep.task import Task

import torch
from pydantic import BaseModel, ConfigDict
from torch import nn


class Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    name: str = "stream_task"
    rows: int = 100
    shards: int = 3
    seconds_per_batch: float = 0.0


def numbers(rows: int, shards: int, first: int = 0) -> Any:
    from datasets import Dataset

    column = list(range(first, first + rows))
    return Dataset.from_dict({"number": column}).to_iterable_dataset(num_shards=shards)


def samples_of(rows: list[dict[str, int]]) -> list[int]:
    kept = [row["number"] for row in rows if row["number"] % 5 != 0]
    return [number for number in kept for _ in range(2 if number % 7 == 0 else 1)]


def build(config: Config) -> Task:
    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        time.sleep(config.seconds_per_batch)
        trace(batch["number"].tolist())
        return (model(batch["x"]) - batch["y"]).square().sum()

    return Task(
        model=lambda: nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.2), nn.Linear(8, 1)),
        train_dataset=Streams(
            [numbers(config.rows, config.shards), numbers(30, 1, first=1000)],
            weights=[0.8, 0.2],
            transform=samples_of,
            shuffle_buffer=16,
        ),
        eval_dataset=list(range(5)),
        augment=lambda number: (number, torch.randn(2)),
        collate=collate,
        count=lambda batch: len(batch["number"]),
        loss=loss,
        score=lambda model, batch: {"error": (model(batch["x"]) - batch["y"])[:, 0]},
        summarize=lambda table: {"mse": float((table["error"] ** 2).mean())},
        best_metric="mse",
        higher_is_better=False,
    )


def collate(samples: Sequence[Any]) -> dict[str, torch.Tensor]:
    if not isinstance(samples[0], tuple):  # of the evaluation split: not augmented
        samples = [(number, torch.ones(2)) for number in samples]
    drawn, noise = zip(*samples, strict=True)
    number = torch.tensor(drawn)
    x = torch.stack(noise) + 0.1 * torch.randn(len(samples), 2)
    return {"number": number, "x": x, "y": (number[:, None] % 10) / 10.0}


def trace(drawn: list[int]) -> None:
    if folder := os.environ.get("STREAM_TRACE"):
        with (Path(folder) / f"rank-{os.environ.get('RANK', '0')}.jsonl").open("a") as file:
            file.write(json.dumps(drawn) + "\n")
