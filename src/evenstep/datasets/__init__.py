"""Datasets: one file each, found by file name. Hub ids and local paths are `huggingface` for tasks
on images, `text` for those on text."""

from __future__ import annotations

from pathlib import Path


def fallback(name: str) -> str | None:
    """The module for a name that is no file here: `huggingface` for "owner/name" and for paths."""
    return "huggingface" if "/" in name or Path(name).exists() else None
