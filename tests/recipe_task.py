"""A small classification task with a model of repeated blocks, for the recipes of training.

Named in a run config as `task.name=recipe_task`, with tests/ on PYTHONPATH.
"""

from __future__ import annotations

from evenstep.lora import Lora, adapted
from evenstep.sections import Section
from evenstep.task import Task

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

VIT = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "hidden_dropout_prob": 0.1,
    "image_size": 8,
    "patch_size": 4,
    "num_channels": 1,
    "num_labels": 3,
}


class Config(Section):
    name: str = "recipe_task"
    lora: Lora | None = None  # on a vision transformer, instead of Blocks


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.linear = nn.Linear(width, width)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.linear(self.norm(x)).tanh())


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(64, 16)
        self.blocks = nn.ModuleList(Block(16) for _ in range(3))
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(**VIT))


def build(config: Config) -> Task:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(60, 64, generator=generator)
    labels = torch.randint(3, (60,), generator=generator)
    rows = list(zip(images, labels, strict=True))

    def logits(model: nn.Module, x: Tensor) -> Tensor:
        return model(x.view(-1, 1, 8, 8)).logits if config.lora else model(x)

    return Task(
        model=lambda: adapted(vit(), config.lora) if config.lora else Blocks(),
        train_dataset=rows[:50],
        eval_dataset=rows[50:],
        collate=lambda samples: tuple(map(torch.stack, zip(*samples, strict=True))),
        count=lambda batch: len(batch[1]),
        loss=lambda model, batch: cross_entropy(logits(model, batch[0]), batch[1], reduction="sum"),
        score=lambda model, batch: {
            "loss": cross_entropy(logits(model, batch[0]), batch[1], reduction="none")
        },
        summarize=lambda table: {"loss": float(table["loss"].mean())},
        best_metric="loss",
        higher_is_better=False,
        export=(lambda model, folder: model.save_pretrained(folder)) if config.lora else None,
    )
