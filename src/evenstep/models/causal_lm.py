"""Any causal language model of transformers.

`Qwen/Qwen3-0.6B` or a local folder: its weights. `gpt2`, `llama`, `qwen3` or another model type:
built from its configuration class, with fresh weights and without a download.
"""

from __future__ import annotations

import inspect
import logging
from typing import Any, cast

from evenstep.models import _transformers

from torch import nn


class Config(_transformers.TransformersConfig):
    name: str
    """A hub id, a local folder, or a model type of transformers such as gpt2, llama or qwen3."""


def model_types() -> list[str]:
    """The model types of transformers that are causal language models."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def reads_positions(config: Config) -> bool:
    """Whether the model's class takes position_ids; True of one that is not in transformers, whose
    class is not known before it is built."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    is_type = config.name in model_types()
    model_config = (
        AutoConfig.for_model(config.name) if is_type else _transformers.read_config(config)
    )
    kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(model_config), None)
    return kind is None or "position_ids" in inspect.signature(kind.forward).parameters


def build(config: Config, *, tokenizer: Any, sequence_length: int) -> nn.Module:
    """Raises ValueError for unknown names and configuration keys, and for a tokenizer or sequences
    that do not fit the weights."""
    model: Any = _model(config, tokenizer, sequence_length)
    _transformers.check_text_fits(
        config,
        model,
        num_tokens=len(tokenizer),
        length=sequence_length,
        length_key="task.sequence_length",
    )
    text_config = model.config.get_text_config()  # a part of it where the model is of several
    for holder in (model.config, text_config, model.generation_config):
        holder.pad_token_id = tokenizer.pad_token_id
    # That token's row gets no gradient; but it may be the one that ends documents as well.
    model.get_input_embeddings().padding_idx = None
    # With a cache, no model looks for documents in position_ids.
    model.config.use_cache = text_config.use_cache = False
    # Nor with the attention_mask that some ask for; padding is behind what is read.
    asks = "passing in an `attention_mask`"
    logging.getLogger("transformers.modeling_utils").addFilter(
        lambda record: asks not in record.getMessage()
    )
    return cast("nn.Module", model)


def _model(config: Config, tokenizer: Any, sequence_length: int) -> nn.Module:
    from transformers import AutoModelForCausalLM

    if config.name not in model_types():
        model_config = _transformers.read_config(config)
        return _transformers.pretrained(config, AutoModelForCausalLM, model_config)
    return _transformers.fresh_text(
        config, AutoModelForCausalLM, tokenizer=tokenizer, length=sequence_length
    )
