"""Any sequence classification model of transformers.

`answerdotai/ModernBERT-base` or a local folder: its weights, with a new head where the number of
classes differs. `bert`, `distilbert`, `roberta`, `modernbert` or another model type: built from its
configuration class, with fresh weights and without a download.
"""

from __future__ import annotations

import logging
from typing import Any

from evenstep.classification import logits_of
from evenstep.models import _transformers
from evenstep.probing import trying

import torch
from torch import nn

logger = logging.getLogger(__name__)


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
    pad_id = tokenizer.pad_token_id
    model.config.pad_token_id = model.config.get_text_config().pad_token_id = pad_id
    starts = getattr(model.config, "decoder_start_token_id", None) is not None
    if getattr(model.config, "is_encoder_decoder", False) and not starts:
        model.config.decoder_start_token_id = pad_id  # as T5 begins; a type's own default has none
    _transformers.check_text_fits(
        config, model, num_tokens=len(tokenizer), length=max_length, length_key="task.max_length"
    )
    if _sees_padding(model, pad_id, tokenizer.eos_token_id):
        logger.warning(
            "%s lets padding change what it makes of a text: a text's prediction depends a little "
            "on the texts beside it",
            config.name,
        )
    return model  # type: ignore[no-any-return]


def _sees_padding(model: nn.Module, pad_id: int, end_id: int | None) -> bool:
    last = 5 if end_id is None else end_id  # which BART reads a text off
    ids, mask = torch.tensor([[3, 4, last, pad_id]]), torch.tensor([[1, 1, 1, 0]])
    with trying(model):
        alone = logits_of(model(input_ids=ids[:, :3], attention_mask=mask[:, :3]))
        padded = logits_of(model(input_ids=ids, attention_mask=mask))
    return bool((padded - alone).abs().max() > 1e-4 * alone.abs().max())
