"""Images of any kind as uint8 tensors of one shape.

A *source* is anything with a length whose items are (image, class number); an image is a PIL image
of any mode or a uint8 tensor (C, H, W) with C 1 or 3. So the datasets of torchvision are sources.
"""

from __future__ import annotations

import hashlib
import io
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from evenstep.labels import IGNORED
from evenstep.plan import seed_of
from evenstep.seeding import seed_everything
from evenstep.task import Dataset

import numpy as np
import PIL.Image
import PIL.ImageOps
import torch
import torchvision.transforms.v2.functional as F
from torch import Tensor

logger = logging.getLogger(__name__)

Sample = tuple[Tensor, int]  # uint8 (C, H, W), class number
OnError = Literal["stop", "skip"]

KEPT_BYTES = 1 << 28  # decoded images of up to 256 MB stay in memory, in each (worker) process


@dataclass(frozen=True)
class ImageSplits:
    """What the `build(config)` of a module in `datasets/` returns."""

    train: Dataset
    eval: Dataset | None
    classes: Sequence[str]
    identity: Mapping[str, Any] = field(default_factory=dict)
    """What identifies the data; goes into the run's environment.json, compared on resume."""


class BadImage(ValueError):
    """An image that cannot be read; the message names file and row."""


def decode(encoded: Mapping[str, Any] | None, where: str) -> PIL.Image.Image:
    """An image in mode L or RGB from {"bytes": ..., "path": ...}, either of which may be None.

    `where` names the row in the message of the BadImage raised for anything that is no image.
    """
    if encoded is None:
        raise BadImage(f"{where} has no image")
    data, path = encoded["bytes"], encoded["path"]
    try:
        with PIL.Image.open(path if data is None else io.BytesIO(data)) as image:
            image.load()
            PIL.ImageOps.exif_transpose(image, in_place=True)
            return eight_bit(image)
    except Exception as error:  # broken files make Pillow raise nearly anything
        file = f" ({path})" if path else ""
        raise BadImage(f"{where}{file} is not a readable image: {error}") from error


def eight_bit(image: PIL.Image.Image) -> PIL.Image.Image:
    """Mode L or RGB: 16-bit grey scaled to 8 bits, transparency composited over white.

    Pillow's own conversion clips 16-bit grey at 255 and drops alpha, which uncovers whatever
    colour the transparent pixels happen to hold.
    """
    if image.mode == "F":
        raise BadImage("pixels are 32-bit floats (mode F), whose range is unknown")
    if image.mode.startswith("I"):
        image = _from_16_bits(image)
    if image.has_transparency_data:
        image = image.convert("RGBA")
        background = PIL.Image.new("RGBA", image.size, "white")
        image = PIL.Image.alpha_composite(background, image)
    return image.convert("L" if image.mode in ("1", "L") else "RGB")


def _from_16_bits(image: PIL.Image.Image) -> PIL.Image.Image:
    values = np.asarray(image)
    if image.mode == "I" and 0 < values.max() <= 0xFF:
        raise BadImage(
            f"grey values up to {values.max()} in 32 bits (mode I): of 8 or of 16 bits is unknown"
        )
    if values.min() < 0 or values.max() > 0xFFFF:
        raise BadImage(f"grey values from {values.min()} to {values.max()} exceed 16 bits")
    return PIL.Image.fromarray(np.rint(values / 257).astype(np.uint8))


def to_uint8(image: PIL.Image.Image | Tensor, channels: int) -> Tensor:
    """uint8 (..., channels, H, W). Raises ValueError for a tensor of another kind."""
    tensor: Tensor
    if isinstance(image, PIL.Image.Image):
        tensor = F.pil_to_tensor(eight_bit(image).convert("L" if channels == 1 else "RGB"))
    else:
        tensor = image
    if tensor.dtype != torch.uint8 or tensor.ndim < 3 or tensor.shape[-3] not in (1, 3):
        raise ValueError(
            f"an image tensor is uint8 (C, H, W) with 1 or 3 channels, not {tensor.dtype} "
            f"{tuple(tensor.shape)}"
        )
    if tensor.shape[-3] == channels:
        return tensor
    convert: Callable[[Tensor], Tensor] = (
        F.grayscale_to_rgb if channels == 3 else F.rgb_to_grayscale
    )
    return convert(tensor)


def resize(image: Tensor, size: int) -> Tensor:
    """(..., size, size): the shorter side resized with antialiasing, then the centre cropped."""
    if image.shape[-2:] == (size, size):
        return image
    resized: Tensor = F.center_crop(F.resize(image, [size], antialias=True), [size])
    return resized


class TensorImages:
    """A source in memory: uint8 images (n, C, H, W) with n class numbers."""

    def __init__(self, images: Tensor, labels: Sequence[int]) -> None:
        self.images, self.labels = images, labels

    @property
    def targets(self) -> Sequence[int]:
        return self.labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Sample:
        return self.images[index], self.labels[index]

    def __getitems__(self, indices: Sequence[int]) -> list[Sample]:
        images = self.images[torch.tensor(indices)]
        return list(zip(images.unbind(), [self.labels[i] for i in indices], strict=True))


class ImageDataset:
    """A source read lazily, every image in one shape.

    Under `on_error="skip"` a BadImage becomes a black image with the label IGNORED, so that a
    micro-batch stays as long as planned; it is warned about once in each (worker) process.
    Images that need little memory are decoded once: samples are not to be changed in place.
    """

    def __init__(
        self, source: Dataset, *, channels: int, size: int, resizes: bool, on_error: OnError
    ) -> None:
        self.source, self.channels, self.size = source, channels, size
        self.resizes, self.on_error = resizes, on_error
        self._warned: set[int] = set()
        # Only a source that says so gives the same image each time: others may draw.
        small = len(source) * channels * size * size <= KEPT_BYTES
        self._keeps = small and getattr(source, "pure", False)
        self._kept: dict[int, Sample] = {}

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Sample:
        if index in self._kept:
            return self._kept[index]
        sample = self._read(index)
        if self._keeps:
            self._kept[index] = sample
        return sample

    def _read(self, index: int) -> Sample:
        try:
            image, label = self.source[index]
            image = to_uint8(image, self.channels)
        except BadImage as error:
            return self._skipped(index, error)
        height, width = image.shape[-2:]
        if not self.resizes and (height, width) != (self.size, self.size):
            raise ValueError(_differ((self.size, self.size), (height, width)))
        return resize(image, self.size), int(label)

    def _skipped(self, index: int, error: BadImage) -> Sample:
        if self.on_error == "stop":
            raise BadImage(f"{error}; task.on_error=skip leaves such samples out") from error
        if index not in self._warned:
            self._warned.add(index)
            logger.warning("skipped: %s", error)
        return torch.zeros(self.channels, self.size, self.size, dtype=torch.uint8), IGNORED


def uniform(
    source: Dataset, *, channels: int, size: int, resizes: bool, on_error: OnError
) -> Dataset:
    """The source as samples of uint8 (channels, size, size); at once if it lies in memory."""
    if isinstance(source, TensorImages):
        return TensorImages(resize(to_uint8(source.images, channels), size), source.labels)
    return ImageDataset(source, channels=channels, size=size, resizes=resizes, on_error=on_error)


def class_numbers(dataset: Dataset) -> list[int]:
    """Of all samples. Reads no image where the source has `targets`, as those of torchvision."""
    source = getattr(dataset, "source", dataset)
    if hasattr(source, "targets"):
        numbers: list[int] = torch.as_tensor(source.targets).tolist()
        return numbers
    return [_at(dataset, index)[1] for index in range(len(dataset))]


def common_size(*sources: Dataset) -> int:
    """Side of the square images of all sources, looked for in at most 256 of each.

    Raises ValueError if they are not all square and equal.
    """
    sizes = [_size(source, row) for source in sources for row in spread(len(source), 256)]
    known = [size for size in sizes if size is not None]
    if not known:
        raise ValueError("none of the images can be read")
    for size in known:
        if size != known[0] or size[0] != size[1]:
            raise ValueError(_differ(known[0], size))
    return known[0][0]


def _size(source: Dataset, row: int) -> tuple[int, int] | None:
    try:
        image = _at(source, row)[0]
    except BadImage:
        return None
    if isinstance(image, PIL.Image.Image):
        return image.height, image.width
    height, width = image.shape[-2:]
    return height, width


def _differ(one: tuple[int, int], other: tuple[int, int]) -> str:
    sizes = " and ".join(dict.fromkeys(f"{height}x{width}" for height, width in (one, other)))
    return (
        f"images of {sizes} (height x width); a batch needs square images of one size: "
        f"set task.image_size, for example task.image_size={min(one)}"
    )


def spread(n: int, limit: int) -> Iterable[int]:
    """At most `limit` row numbers, evenly spaced over n rows."""
    return range(0, n, max(1, math.ceil(n / limit)))


def measure(dataset: Dataset, limit: int = 2000) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of each channel, in units of 255, over at most `limit` samples.

    Summed in whole numbers: exact, and the same on every machine. A constant channel gets a
    deviation of 1, so that dividing by it is safe. Raises BadImage with all that cannot be read.
    """
    pixels, totals, squares = 0, torch.tensor(0), torch.tensor(0)
    for image, label in _readable(dataset, spread(len(dataset), limit)):
        if label != IGNORED:
            values = image.flatten(1).long()
            pixels += values.shape[1]
            totals, squares = totals + values.sum(1), squares + values.square().sum(1)
    if not pixels:
        raise ValueError("no training image can be read; nothing to measure the mean of")
    sums = list(zip(totals.tolist(), squares.tolist(), strict=True))
    mean = [total / pixels / 255 for total, _ in sums]
    # Python's whole numbers: pixels * square leaves int64 as soon as images are large.
    deviation = [math.sqrt(pixels * square - total * total) / pixels for total, square in sums]
    return mean, [value / 255 or 1.0 for value in deviation]


def _at(dataset: Dataset, row: int) -> Any:
    """Should the dataset draw, then always the same."""
    seed_everything(seed_of("look", row))
    return dataset[row]


def _readable(dataset: Dataset, rows: Iterable[int]) -> Iterator[Sample]:
    """The samples; at the end BadImage, if some could not be read."""
    failed: list[str] = []
    for row in rows:
        try:
            yield _at(dataset, row)
        except BadImage as error:
            failed.append(str(error))
    if failed:
        more = [f"and {len(failed) - 10} more"] if len(failed) > 10 else []
        raise BadImage("\n  ".join(["training images cannot be read:", *failed[:10], *more]))


def fingerprint(*parts: bytes) -> str:
    """Names content, wherever it is stored: 16 hexadecimal digits."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()
