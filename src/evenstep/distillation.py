"""Distillation: a network learns from the outputs of a trained one, its teacher.

The teacher is no part of the model: no strategy wraps it, no checkpoint holds it, nothing trains
it. Every process keeps all of it, on its device and in the precision of the student's logits.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evenstep.classification import logits_of, target_weights
from evenstep.sections import Section

import torch
import torch.nn.functional as F
from pydantic import Field, field_validator
from torch import Tensor, nn


class TeacherConfig(Section):
    name: str
    """The folder `final/` of a finished run, or a hub id of transformers."""

    revision: str | None = None
    """Commit, tag or branch of a hub model; a commit makes the run repeatable."""

    @field_validator("name")
    @classmethod
    def _is_final(cls, name: str) -> str:
        folder = Path(name).expanduser()
        if (name.startswith((".", "~", "/")) or name.count("/") > 1) and not folder.is_dir():
            raise ValueError("there is no such folder, and it is no hub id")
        if (folder / "final").is_dir():
            raise ValueError(f"a run's trained network is in {Path(name) / 'final'}")
        return name

    alpha: float = Field(default=0.5, gt=0, le=1)
    """Share of the teacher in the loss; the labels have the rest."""

    temperature: float = Field(default=4.0, gt=0)
    """Divides the logits of both; the higher, the more the unlikely classes count."""


def divergence(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """(N,): T^2 KL(teacher || student) of logits (N, classes) divided by T. The factor keeps its
    gradient as large as that of the labels (Hinton et al., "Distilling the Knowledge in a Neural
    Network", 2015, section 2)."""
    ours, theirs = ((logits / temperature).log_softmax(1) for logits in (student, teacher))
    return F.kl_div(ours, theirs, reduction="none", log_target=True).sum(1) * temperature**2


@dataclass(frozen=True)
class Teacher(ABC):
    """Holds no weights, so that a task that is sent to a worker process takes none along.

    Raises ValueError for a teacher that cannot be read, or that does not know a class.
    """

    config: TeacherConfig
    classes: Sequence[str]
    """Of the student."""

    def __post_init__(self) -> None:
        _, known = self.read()
        if unknown := [name for name in self.classes if name not in known]:
            raise ValueError(
                f"the teacher {self.config.name} does not know the class(es) {unknown[:5]}; those "
                f"it knows: {list(known)[:10]}"
            )

    @abstractmethod
    def read(self) -> tuple[nn.Module, Sequence[str]]:
        """The network, `frozen`, the same each time, and the classes that it knows."""

    @abstractmethod
    def output(self, network: nn.Module, inputs: Any) -> Any:
        """What the network makes of the inputs of the student."""

    @torch.no_grad()
    def logits(self, inputs: Any, like: Tensor) -> Tensor:
        """(B, classes of the student), computed on the device and in the precision of `like`."""
        network, known = self.read()
        network.to(like.device, like.dtype)
        columns = [known.index(name) for name in self.classes]
        return logits_of(self.output(network, inputs))[:, columns]

    def fingerprint(self) -> str:
        """Of its weights."""
        digest = hashlib.sha256()
        for _, tensor in sorted(self.read()[0].state_dict().items()):
            digest.update(tensor.cpu().numpy().tobytes())
        return digest.hexdigest()[:16]


def taught(
    teacher: Teacher | None,
    supervised: Tensor,
    inputs: Any,
    logits: Tensor,
    labels: Tensor,
    class_weights: Tensor | None,
) -> Tensor:
    """The summed loss of the labels, `supervised`, and the teacher's share of alpha: the summed
    divergence from what it makes of the inputs, each weighing as much as its label."""
    if teacher is None:
        return supervised
    alpha, temperature = teacher.config.alpha, teacher.config.temperature
    divergences = divergence(logits, teacher.logits(inputs, logits), temperature)
    divergences = divergences * target_weights(labels, class_weights)
    return (1 - alpha) * supervised + alpha * divergences.sum()


def frozen(network: nn.Module) -> nn.Module:
    """In eval mode, so that BatchNorm normalises by what it has learned, and without gradients."""
    return network.eval().requires_grad_(False)


def is_of_transformers(folder: Path) -> bool:
    file = folder / "config.json"
    return file.is_file() and "model_type" in json.loads(file.read_text())
