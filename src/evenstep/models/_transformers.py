"""What the models of transformers share: built afresh from a type's configuration, or with the
weights of a hub id or a local folder."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from evenstep.lora import Lora, adapted
from evenstep.sections import Section

import torch
from pydantic import Field
from torch import nn


class TransformersConfig(Section):
    name: str
    """A hub id, a local folder, or a model type of transformers."""

    config: dict[str, Any] = Field(default={})
    """Overrides of the model's configuration, for example {hidden_size: 64}."""

    revision: str | None = None
    """Commit, tag or branch of a hub model; a commit makes the run repeatable."""

    trust_remote_code: bool = False
    """Run code that the model's repository brings along. Read it before you do."""

    lora: Lora | None = None
    """Train small matrices beside the frozen weights (peft), and the head; null for all weights."""


def fresh(
    section: TransformersConfig, auto: Any, *, usual: Mapping[str, Any] = {}, **needed: Any
) -> nn.Module:
    """A model of the type `section.name` with fresh weights, and without a download. `auto` is a
    class such as AutoModelForCausalLM; `needed` are configuration values that the data decides,
    `usual` those that the section may override, of which the ones the type knows are set.
    Raises ValueError for unknown configuration keys."""
    return adapted(_unadapted(section, auto, usual, needed), section.lora)


def fresh_text(
    section: TransformersConfig, auto: Any, *, tokenizer: Any, length: int, **needed: Any
) -> nn.Module:
    """`fresh`, for texts of up to `length` tokens."""
    # Llama's own defaults, 1 and 2, are any tokens of another tokenizer.
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        needed[name] = getattr(tokenizer, name)
    enough = length + tokenizer.pad_token_id + 1
    usual = {"vocab_size": len(tokenizer), "max_position_embeddings": enough}
    with torch.random.fork_rng(devices=[]), torch.device("meta"):  # takes no memory
        first = first_position(_unadapted(section, auto, usual, needed))
    return fresh(
        section, auto, usual={**usual, "max_position_embeddings": length + first}, **needed
    )


def _unadapted(
    section: TransformersConfig, auto: Any, usual: Mapping[str, Any], needed: Mapping[str, Any]
) -> nn.Module:
    from transformers import AutoConfig

    default = AutoConfig.for_model(section.name)
    known = {*default.to_dict(), *default.attribute_map}
    _refuse(section, [key for key in section.config if key not in known], known)
    # GPT-2 calls max_position_embeddings n_positions as well: of two names, the section's counts.
    given = {default.attribute_map.get(key, key) for key in section.config}
    fitting = {
        key: value
        for key, value in usual.items()
        if key in known and default.attribute_map.get(key, key) not in given
    }
    try:
        model_config = AutoConfig.for_model(section.name, **{**fitting, **section.config, **needed})
        model: nn.Module = auto.from_config(model_config)
    except Exception as error:  # whatever a model makes of sizes that do not fit together
        raise ValueError(
            f"task.model.config: {section.name} cannot be built with {section.config}: {error}"
        ) from error
    return model


def read_config(section: TransformersConfig) -> Any:
    """The configuration of a hub id or local folder, with the overrides. Raises ValueError if it
    cannot be read, and for unknown keys."""
    from transformers import AutoConfig

    try:
        model_config, unknown = AutoConfig.from_pretrained(
            section.name, return_unused_kwargs=True, **_source(section), **section.config
        )
    except OSError as error:
        raise unreadable("model", section.name, error) from error
    _refuse(section, list(unknown), model_config.to_dict())
    return model_config


def unreadable(what: str, name: str, error: Exception) -> ValueError:
    """For a hub id or folder that may have been meant for a model type."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    nearest = difflib.get_close_matches(name, CONFIG_MAPPING_NAMES, n=3, cutoff=0.7)
    hint = f"\nIf a model type was meant, the nearest: {', '.join(nearest)}" if nearest else ""
    return ValueError(f"the {what} {name!r} cannot be read: {error}{hint}")


def pretrained(section: TransformersConfig, auto: Any, model_config: Any) -> nn.Module:
    """The weights of a hub id or local folder in float32; those that do not fit start afresh.
    Raises ValueError for a model of another kind than `auto`."""
    own_code = getattr(model_config, "auto_map", None)
    if not own_code and type(model_config) not in auto._model_mapping:
        raise ValueError(
            f"{section.name} is of type {model_config.model_type}, of which transformers has no "
            f"{auto.__name__.removeprefix('Auto')}"
        )
    model: nn.Module = auto.from_pretrained(
        section.name,
        config=model_config,
        ignore_mismatched_sizes=True,  # a new head
        dtype=torch.float32,  # by default the one in which the weights were saved, often bf16
        **_source(section),
    )
    model.train()  # from_pretrained returns it in eval mode: without dropout
    return adapted(model, section.lora)


def check_text_fits(
    section: TransformersConfig, model: Any, *, num_tokens: int, length: int, length_key: str
) -> None:
    """Raises ValueError for a tokenizer, or texts of `length` tokens, that the weights cannot read;
    `length_key` sets the length."""
    text_config = model.config.get_text_config()
    if num_tokens > text_config.vocab_size:
        raise ValueError(
            f"{section.name} has {text_config.vocab_size} tokens, the tokenizer {num_tokens}; "
            "task.tokenizer=auto takes the model's own"
        )
    positions = getattr(text_config, "max_position_embeddings", None)
    longest = positions and positions - first_position(model)
    if longest and longest > 0 and length > longest:  # xlnet says -1: of any length
        raise ValueError(f"{section.name} reads at most {longest} tokens: {length_key}={longest}")


def first_position(model: nn.Module) -> int:
    """Number of the position of a text's first token. RoBERTa and its like count from behind the
    number of their padding token, so that 514 positions hold 512 tokens."""
    padding = (
        getattr(module, "padding_idx", None)
        for name, module in model.named_modules()
        if name.endswith(".position_embeddings")
    )
    return next((number + 1 for number in padding if number is not None), 0)


def _source(section: TransformersConfig) -> Mapping[str, Any]:
    return {"revision": section.revision, "trust_remote_code": section.trust_remote_code}


def _refuse(section: TransformersConfig, unknown: Sequence[str], known: Iterable[str]) -> None:
    if unknown:
        nearest = difflib.get_close_matches(unknown[0], known, n=3)
        raise ValueError(
            f"task.model.config: {section.name} has no key {', '.join(map(repr, unknown))}; "
            f"nearest: {', '.join(nearest) or 'none'}"
        )
