"""LoRA (Hu et al., 2021) through peft: a frozen model with small trained matrices beside its own.

    task: {model: {name: roberta-base, lora: {r: 8}}}

Only the adapters and a new head are trained. `final/` holds the model with the adapters merged into
its weights, `final/adapter/` the adapters alone, which peft loads onto the model they began from.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from evenstep.sections import Section

from pydantic import Field
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

Export = Callable[[nn.Module, Path], None]


class Lora(Section):
    r: int = Field(default=8, ge=1)
    """Rank of the adapters."""

    alpha: int = Field(default=16, ge=1)
    """What an adapter computes counts alpha / r."""

    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout on the input of the adapters."""

    target_modules: tuple[str, ...] | None = None
    """The linear layers that get an adapter, by the end of their names, as in [q_proj, v_proj];
    null for all but the head."""


def adapted(model: nn.Module, section: Lora | None) -> nn.Module:
    """A transformers model with adapters, its head trained as a whole unless that is the output
    layer of a language model; without a section, the model itself.

    Raises ValueError if peft is missing, or for target modules that the model does not have.
    """
    if section is None:
        return model
    try:
        from peft import LoraConfig, get_peft_model
    except ModuleNotFoundError as error:
        raise ValueError("lora needs peft: pip install peft") from error

    targets = list(section.target_modules or ())
    _check(targets, model)
    config = LoraConfig(
        r=section.r,
        lora_alpha=section.alpha,
        lora_dropout=section.dropout,
        target_modules=targets or "all-linear",
        modules_to_save=_new_head(model) or None,
    )
    wrapped: nn.Module = get_peft_model(model, config)
    for part in wrapped.modules():
        # Statistics are no part of an adapter: those of the frozen weights stay what they are.
        if isinstance(part, _BatchNorm) and not any(p.requires_grad for p in part.parameters()):
            part.eval()
    return wrapped


def _check(targets: Sequence[str], model: nn.Module) -> None:
    """peft says nothing as long as one of them fits."""
    from transformers.pytorch_utils import Conv1D  # GPT-2's linear layer

    linear = [n for n, part in model.named_modules() if isinstance(part, nn.Linear | Conv1D)]
    names = dict.fromkeys(name.rpartition(".")[2] for name in linear)
    for target in targets:
        if not any(f".{name}".endswith(f".{target}") for name, _ in model.named_modules()):
            nearest = difflib.get_close_matches(target, names, n=3, cutoff=0.4) or names
            raise ValueError(
                f"lora.target_modules: no module's name ends in {target!r}; "
                f"nearest linear layers: {', '.join(nearest)}"
            )


def _new_head(model: Any) -> list[str]:
    """The parts beside the base model that have weights, but for a language model's output layer,
    which is not new."""
    output = model.get_output_embeddings()
    sizes = {
        name: sum(parameter.numel() for parameter in part.parameters())
        for name, part in model.named_children()
        if output is None or output not in part.modules()
    }
    base = model.base_model_prefix
    if base not in sizes:  # CLIP's and SigLIP's classifiers have it under another name
        base = max(sizes, key=lambda name: sizes[name])
    return [name for name, size in sizes.items() if size and name != base]


def exporting(task_export: Export | None) -> Export:
    """The task's export, for a model that may have adapters."""

    def export(model: Any, folder: Path) -> None:
        if hasattr(model, "merge_and_unload"):
            model.save_pretrained(folder / "adapter")
            model = model.merge_and_unload()
            if task_export is None:
                model.save_pretrained(folder)
        if task_export is not None:
            task_export(model, folder)

    return export
