"""Distillation: a network learns from the outputs of a trained one, its teacher.

The teacher is no part of the model: no strategy wraps it, no checkpoint holds it, nothing trains
it. Every process keeps all of it, on its device and in the precision of the images.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from evenstep.classification import logits_of
from evenstep.image_models import Inputs, read_final
from evenstep.images import fingerprint
from evenstep.models._transformers import TransformersConfig, pretrained, read_config
from evenstep.sections import Section

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn


class TeacherConfig(Section):
    name: str
    """The folder `final/` of a finished run, or a hub id of transformers."""

    revision: str | None = None
    """Commit, tag or branch of a hub model; a commit makes the run repeatable."""

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
class Teacher:
    """Holds no weights, so that a task that is sent to a worker process takes none along.

    Raises ValueError for a teacher that cannot be read, or that does not fit the data.
    """

    config: TeacherConfig
    inputs: Inputs
    """What the student sees, and what its outputs stand for."""

    def __post_init__(self) -> None:
        _, seen = _read(self.config.name, self.config.revision)
        if seen.channels != self.inputs.channels:
            raise ValueError(
                f"the teacher {self.config.name} sees images of {seen.channels} channel(s): set "
                f"task.channels={seen.channels}"
            )
        if unknown := [name for name in self.inputs.classes if name not in seen.classes]:
            raise ValueError(
                f"the teacher {self.config.name} does not know the class(es) {unknown[:5]}; those "
                f"it knows: {list(seen.classes)[:10]}"
            )

    @torch.no_grad()
    def logits(self, images: Tensor) -> Tensor:
        """(B, classes of the student) of the images (B, C, H, W) that the student sees, resized and
        normalised as the teacher knows them."""
        network, seen = _read(self.config.name, self.config.revision)
        network.to(images.device, images.dtype)
        columns = [seen.classes.index(name) for name in self.inputs.classes]
        return logits_of(network(_as_seen(images, self.inputs, seen)))[:, columns]

    def fingerprint(self) -> str:
        """Of its weights."""
        network, _ = _read(self.config.name, self.config.revision)
        weights = network.state_dict()
        return fingerprint(*(weights[name].cpu().numpy().tobytes() for name in sorted(weights)))


def _as_seen(images: Tensor, given: Inputs, wanted: Inputs) -> Tensor:
    if wanted.image_size != given.image_size:
        size = (wanted.image_size, wanted.image_size)
        images = F.interpolate(images, size, mode="bilinear", antialias=True)
    mean, std, new_mean, new_std = (
        images.new_tensor(values).view(-1, 1, 1)
        for values in (given.mean, given.std, wanted.mean, wanted.std)
    )
    return (images * std + (mean - new_mean)) / new_std


@lru_cache(maxsize=1)  # one teacher a run; checked, then used at each step
def _read(name: str, revision: str | None) -> tuple[nn.Module, Inputs]:
    """In eval mode, so that its BatchNorm normalises by what it has learned, and without gradients;
    with what it sees."""
    folder = Path(name).expanduser()
    own = folder.is_dir() and not _is_of_transformers(folder)
    network, seen = read_final(folder) if own else _of_transformers(name, revision)
    return network.eval().requires_grad_(False), seen


def _is_of_transformers(folder: Path) -> bool:
    file = folder / "config.json"
    return file.is_file() and "model_type" in json.loads(file.read_text())


def _of_transformers(name: str, revision: str | None) -> tuple[nn.Module, Inputs]:
    from transformers import AutoImageProcessor, AutoModelForImageClassification

    section = TransformersConfig(name=name, revision=revision)
    model_config = read_config(section)
    network = pretrained(section, AutoModelForImageClassification, model_config)
    processor: Any = AutoImageProcessor.from_pretrained(name, revision=revision)
    classes = [model_config.id2label[number] for number in range(model_config.num_labels)]
    size = getattr(processor, "crop_size", None) or processor.size
    return network, Inputs(
        classes=classes,
        channels=len(processor.image_mean),
        image_size=size["height"] or size["shortest_edge"],
        resizes=processor.do_resize,
        mean=processor.image_mean,
        std=processor.image_std,
    )
