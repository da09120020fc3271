"""Random changes of one training image, by name. All draw at the time of the call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

from evenstep.images import Sample

from torch import nn
from torchvision.transforms import v2

AugmentName = Literal[
    "crop", "flip", "trivial_augment", "rand_augment", "aug_mix", "random_erasing"
]


def augmentation(
    names: Sequence[AugmentName],
    *,
    image_size: int,
    mean: Sequence[float],
    crop_padding: int,
    rand_augment_magnitude: int,
    erasing_probability: float,
) -> Callable[[Sample], Sample] | None:
    """The changes in this order; None without any, which leaves loaders their fast path.

    Erased pixels take the `mean` of the images, one number a channel on the scale of 0 to 1: they
    are the zeros of a normalised image. Cubuk et al., "RandAugment", 2019; Hendrycks et al.,
    "AugMix", 2019 (without its consistency loss); Zhong et al., "Random Erasing", 2017.
    """
    transforms: dict[AugmentName, Callable[[], nn.Module]] = {
        "crop": lambda: v2.RandomCrop(image_size, padding=crop_padding),
        "flip": v2.RandomHorizontalFlip,
        "trivial_augment": v2.TrivialAugmentWide,
        "rand_augment": lambda: v2.RandAugment(magnitude=rand_augment_magnitude),
        "aug_mix": v2.AugMix,
        "random_erasing": lambda: v2.RandomErasing(
            erasing_probability, value=[round(255 * channel) for channel in mean]
        ),
    }
    if not names:
        return None
    return partial(_augment, v2.Compose([transforms[name]() for name in names]))


def _augment(transform: v2.Transform, sample: Sample) -> Sample:
    image, label = sample
    return transform(image), label
