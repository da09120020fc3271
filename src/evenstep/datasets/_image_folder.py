"""A folder of class folders, with or without a folder a split above them, as Hugging Face datasets.

Read here and not by the `imagefolder` of `datasets`, which drops the labels of flat folders, takes
class names from all splits together and passes over empty class folders, each without a word.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

SUFFIXES = (
    *(".jpg", ".jpeg", ".png", ".webp", ".avif", ".gif", ".bmp", ".tif", ".tiff"),
    *(".jp2", ".ppm", ".pgm", ".pbm"),
)


def load(root: Path, splits: Sequence[str], columns: tuple[str, str]) -> dict[str, Any]:
    """Split -> datasets.Dataset with two columns, paths of images and names of classes.

    `splits` are the names that a folder of class folders may have; the first is the training
    split, and the name of the only one if `root` holds class folders itself. Raises ValueError
    for images outside class folders and for class folders without images.
    """
    folders = {folder.name: folder for folder in _folders(root)}
    has_splits = splits[0] in folders and (
        set(folders) <= set(splits) or bool(_folders(folders[splits[0]]))
    )
    parts = {s: folders[s] for s in splits if s in folders} if has_splits else {splits[0]: root}
    return {split: _read(folder, columns) for split, folder in parts.items()}


def _read(folder: Path, columns: tuple[str, str]) -> Any:
    import datasets

    if flat := _images(folder.iterdir()):
        raise ValueError(
            f"{flat[0]} lies in no class folder; an image goes into a folder named for its class, "
            f"for example {folder / 'cat' / flat[0].name}"
        )
    files = [(str(path), group.name) for group in _folders(folder) for path in _members(group)]
    data = dict(zip(columns, map(list, zip(*files, strict=True)), strict=True)) if files else {}
    return datasets.Dataset.from_dict(data)


def _members(class_folder: Path) -> list[Path]:
    if images := _images(class_folder.rglob("*")):
        return images
    raise ValueError(
        f"the class folder {class_folder} has no image ({', '.join(SUFFIXES[:4])}, ...); "
        "remove it or fill it"
    )


def _folders(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))


def _images(paths: Iterable[Path]) -> list[Path]:
    return sorted(p for p in paths if p.suffix.lower() in SUFFIXES and not p.name.startswith("."))
