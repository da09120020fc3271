"""scikit-learn's digits: 1,797 grey images of 8x8 in 10 classes, installed with the package."""

from __future__ import annotations

from evenstep.images import ImageSplits, TensorImages, fingerprint
from evenstep.labels import seeded_split
from evenstep.sections import Section

import numpy as np
import torch
from pydantic import Field


class Config(Section):
    name: str
    """digits."""

    eval_fraction: float = Field(default=0.2, gt=0, lt=1)
    """Share of the images held out for evaluation, stratified."""

    split_seed: int = 0
    """Picks the held-out images; independent of the seed of the run."""


def build(config: Config) -> ImageSplits:
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = np.rint(digits.images[:, None] * (255 / 16)).astype(np.uint8)  # (n, 1, 8, 8)
    labels = digits.target.tolist()
    train, held_out, said = seeded_split(labels, config.eval_fraction, config.split_seed)
    return ImageSplits(
        train=TensorImages(torch.from_numpy(images[train]), [labels[i] for i in train]),
        eval=TensorImages(torch.from_numpy(images[held_out]), [labels[i] for i in held_out]),
        classes=[str(name) for name in digits.target_names],
        identity={"fingerprint": fingerprint(images.tobytes(), bytes(labels)), "split": said},
    )
