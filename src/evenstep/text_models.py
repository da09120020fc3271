"""A network that classifies texts: built, exported to `final/`, and read back from there."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evenstep.labels import name_outputs
from evenstep.task import find_module
from evenstep.text_labels import Labels

from torch import nn


def build_model(model_section: Any, tokenizer: Any, labels: Labels, max_length: int) -> nn.Module:
    model: nn.Module = find_module("models", model_section.name, "text_encoder").build(
        model_section, tokenizer=tokenizer, max_length=max_length, num_labels=len(labels.names)
    )
    name_outputs(model, labels.names)
    model_config: Any = getattr(model, "config", None)
    if hasattr(model_config, "id2label"):  # a transformers model
        # Its pipeline then knows whether to take softmax, sigmoid or neither.
        several = f"{labels.kind}_classification"
        model_config.problem_type = "regression" if labels.kind == "regression" else several
    return model


def export(
    model_section: Any, tokenizer: Any, labels: Labels, model: nn.Module, folder: Path
) -> None:
    """The tokenizer, and the model as `from_pretrained` reads it; for models that are none of
    transformers config.json."""
    tokenizer.save_pretrained(folder)
    if hasattr(model, "save_pretrained"):
        model.save_pretrained(folder)  # type: ignore[operator]
        return
    classes = dict(enumerate(labels.names))
    description = {"model": model_section.model_dump(), "kind": labels.kind, "id2label": classes}
    (folder / "config.json").write_text(json.dumps(description, indent=2) + "\n")


def read_final(folder: Path, tokenizer: Any, max_length: int) -> tuple[nn.Module, Sequence[str]]:
    """The network that `export` described in a run's `final/`, with its weights, unless it is one
    of transformers; and its classes. Raises ValueError for a folder that is none."""
    from safetensors.torch import load_model

    try:
        description = json.loads((folder / "config.json").read_text())
        section, classes = description["model"], list(description["id2label"].values())
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{folder} is not the final/ of a text classification run: {error!r}"
        ) from error
    module = find_module("models", section["name"], "text_encoder")
    network: nn.Module = module.build(
        module.Config(**section),
        tokenizer=tokenizer,
        max_length=max_length,
        num_labels=len(classes),
    )
    load_model(network, folder / "model.safetensors")
    return network, classes
