"""Models: one file each, found by file name; timm and transformers models by their own names."""

from __future__ import annotations

from pathlib import Path


def fallback(name: str) -> str | None:
    """The module for a name that is no file here.

    `timm` for "timm/<name>"; `transformers` for "owner/name" on the hub, a local folder, and a
    model type of transformers that classifies images, such as "vit".
    """
    if name.startswith("timm/"):
        return "timm"
    if "/" in name or Path(name).is_dir():
        return "transformers"
    # Not at the top: transformers takes seconds to import.
    from evenstep.models.transformers import model_types

    return "transformers" if name in model_types() else None
