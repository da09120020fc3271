"""Any sequence classification model of transformers.

`answerdotai/ModernBERT-base` or a local folder: its weights, with a new head where the number of
classes differs. `bert`, `distilbert`, `roberta`, `modernbert` or another model type: built from its
configuration class, with fresh weights and without a download.
"""

from __future__ import annotations

from typing import Any

from evenstep.models import _transformers

from torch import nn


class Config(_transformers.TransformersConfig):
    name: str
    """A hub id, a local folder, or a model type of transformers such as distilbert."""


def model_types() -> list[str]:
    """The model types of transformers that classify text."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    )

    return list(MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES)


def build(config: Config, *, tokenizer: Any, max_length: int, num_labels: int) -> nn.Module:
    """Raises ValueError for unknown names and configuration keys, and for a tokenizer or lengths
    that do not fit the weights."""
    from transformers import AutoModelForSequenceClassification

    if config.name in model_types():
        model: Any = _transformers.fresh_text(
            config,
            AutoModelForSequenceClassification,
            tokenizer=tokenizer,
            length=max_length,
            num_labels=num_labels,
        )
    else:
        model_config = _transformers.read_config(config)
        model_config.num_labels = num_labels
        model = _transformers.pretrained(config, AutoModelForSequenceClassification, model_config)
    # A decoder finds the last token of a text by it, and GPT-2 has none of its own.
    model.config.pad_token_id = tokenizer.pad_token_id
    _transformers.check_text_fits(
        config, model, num_tokens=len(tokenizer), length=max_length, length_key="task.max_length"
    )
    return model  # type: ignore[no-any-return]
