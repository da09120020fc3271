"""Causal language modelling: predict each token of a text from those before it.

    task:
      name: causal_lm
      data: {name: stdlib}          a file in datasets/, a hub id, or a local folder or file of text
      model: {name: qwen3}          a hub id, a local folder, gpt2, llama, ... (models/causal_lm.py)

The loss counts tokens, not sequences: one of 20 tokens weighs a tenth of one of 200.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from evenstep import packing, tokenization
from evenstep.classification import logits_of, summed_cross_entropy
from evenstep.labels import IGNORED
from evenstep.probing import trying
from evenstep.sections import Section
from evenstep.streams import Streams
from evenstep.task import Named, Table, Task, find_module
from evenstep.texts import TextSplits, no_column

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

TOKENIZER_ROWS = 1000
"""The first so many rows of a stream train a tokenizer."""

Batch = Mapping[str, Tensor]  # see packing.Sequences, with a leading dimension of samples


class Config(Section):
    name: str = "causal_lm"
    """Picks the task."""

    data: Annotated[Any, Named("datasets", fallback="text")]
    """The texts."""

    model: Annotated[Any, Named("models", fallback="causal_lm")]
    """The network."""

    text_column: str = "text"
    """Column of the data with the text."""

    tokenizer: str = "auto"
    """A hub id or a local folder; bpe: a byte-level BPE trained on the training split; auto: the
    model's own if it is a hub id or a local folder, else bpe."""

    vocab_size: int = Field(default=4096, ge=258)
    """Tokens of a BPE that is trained here; 256 stand for bytes, 2 end and pad documents."""

    sequence_length: int = Field(default=512, ge=4)
    """Tokens of a sequence; longer documents become several."""

    packing: bool | None = None
    """Put several documents into a sequence, of which none sees another one; a model that is found
    to mix them is refused. false: one a sequence, and padding; null: packed unless the model reads
    no position_ids, by which models keep documents apart."""

    on_error: Literal["stop", "skip"] = "stop"
    """At rows without a text: stop, or leave them out and say how many there were."""

    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    """Part of each label that is spread over all tokens, in training."""

    prompt: str = ""
    """Begins the text that the model writes at each evaluation."""

    sample_tokens: int = Field(default=64, ge=0)
    """Length of that text in tokens; 0 for none."""


def build(config: Config) -> Task:
    """Raises ValueError for data that cannot be trained on."""
    data = find_module("datasets", config.data.name, fallback="text")
    splits: TextSplits = data.build(config.data)
    streamed = isinstance(splits.train, Streams)
    known = splits.train.first_rows(TOKENIZER_ROWS) if streamed else splits.train
    if streamed and not any(config.text_column in row for row in known):
        raise no_column(config.text_column, "train", known[0], "task.text_column")
    tokenizer = make_tokenizer(config, known)
    share = packs(config)
    pack = partial(
        packing.pack,
        tokenizer=tokenizer,
        sequence_length=config.sequence_length,
        column=config.text_column,
        share=share,
        skip=config.on_error == "skip",
    )
    train: Any = splits.train.transformed(pack) if streamed else pack(splits.train)
    held_out = None if splits.eval is None else pack(splits.eval, split="evaluation")
    for split, found in (("train", train), ("evaluation", held_out)):
        if isinstance(found, packing.Sequences) and not len(found):
            raise ValueError(f"split {split!r} has no text in column {config.text_column!r}")
    return Task(
        model=partial(build_model, config, tokenizer, packed=share),
        train_dataset=train,
        eval_dataset=held_out,
        # One length for all micro-batches where packing fills them: nothing is compiled twice.
        collate=partial(
            packing.collate,
            pad_id=tokenizer.pad_token_id,
            length=config.sequence_length if share else None,
        ),
        count=count,
        loss=partial(loss, config.label_smoothing),
        score=score,
        summarize=summarize,
        best_metric="loss",
        higher_is_better=False,
        sample=partial(sample, config, tokenizer) if config.sample_tokens else None,
        export=partial(export, tokenizer),
        data_identity={
            **splits.identity,
            "tokenizer": tokenization.identity(tokenizer),
            "train_samples": None if streamed else len(train),
            "eval_samples": len(held_out or ()),
        },
    )


def make_tokenizer(config: Config, train: Any) -> Any:
    name, source = tokenization.chosen(config.tokenizer, config.model, "causal_lm")
    if name == "bpe":
        left_out: list[int] | None = [] if config.on_error == "skip" else None
        texts = list(packing.texts(train, config.text_column, left_out=left_out))
        return tokenization.byte_level_bpe(texts, config.vocab_size)
    return tokenization.pretrained(name, **source)


def packs(config: Config) -> bool:
    """Whether documents share sequences. Models in a file of one's own are asked once built."""
    module = find_module("models", config.model.name, fallback="causal_lm")
    tells = getattr(module, "reads_positions", lambda _: True)
    return bool(tells(config.model)) if config.packing is None else config.packing


def build_model(config: Config, tokenizer: Any, *, packed: bool) -> nn.Module:
    """Raises ValueError for a model that sees from one packed document into another."""
    model: nn.Module = find_module("models", config.model.name, fallback="causal_lm").build(
        config.model, tokenizer=tokenizer, sequence_length=config.sequence_length
    )
    if packed and not keeps_documents_apart(model):
        raise ValueError(
            f"{config.model.name} does not keep the documents of a sequence apart by their "
            "position_ids; task.packing=false gives each a sequence of its own"
        )
    if reads_ahead(model, packed):
        raise ValueError(
            f"{config.model.name} reads the tokens that it is to predict: it is no causal language "
            "model. A type of BERT's kind is one with task.model.config.is_decoder=true"
        )
    return model


def keeps_documents_apart(model: nn.Module) -> bool:
    """Whether a document has the same logits after another one in its sequence as it has alone."""
    whole: Any = model
    base = whole.get_base_model() if hasattr(model, "get_base_model") else whole  # under LoRA
    if "position_ids" not in inspect.signature(base.forward).parameters:
        return False
    ids, positions = torch.tensor([[3, 4, 5, 3, 6]]), torch.tensor([[0, 1, 2, 0, 1]])
    with trying(model):
        packed = _logits(model, {"input_ids": ids, "position_ids": positions})[:, 3:]
        alone = _logits(model, {"input_ids": ids[:, 3:], "position_ids": positions[:, 3:]})
    return bool((packed - alone).abs().max() <= 1e-4 * alone.abs().max())


def reads_ahead(model: nn.Module, packed: bool) -> bool:
    """Whether the logits at a token depend on the one that follows, which is their label."""
    positions = {"position_ids": torch.arange(4)[None]} if packed else {}
    texts = torch.tensor([[3, 4, 5, 6]]), torch.tensor([[3, 4, 5, 3]])
    with trying(model):
        one, other = (_logits(model, {"input_ids": ids, **positions})[:, :3] for ids in texts)
    return bool((one - other).abs().max() > 1e-5 * one.abs().max())


def count(batch: Batch) -> int:
    return int((batch["labels"] != IGNORED).sum())


def loss(label_smoothing: float, model: nn.Module, batch: Batch) -> Tensor:
    """Summed cross entropy in nats."""
    logits = _logits(model, batch).flatten(0, 1)
    labels = batch["labels"].flatten()
    return summed_cross_entropy(logits, labels, label_smoothing=label_smoothing)


def score(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Sums over each sequence; the loss is without smoothing."""
    logits, labels = _logits(model, batch), batch["labels"]
    nats = F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none"
    )
    return {
        "loss": nats.view_as(labels).sum(1),
        "tokens": (labels != IGNORED).sum(1),
        "correct": (logits.argmax(2) == labels).sum(1),
        "bytes": batch["bytes"],
    }


def _logits(model: nn.Module, batch: Batch) -> Tensor:
    """(B, L, tokens), in float32 or wider."""
    inputs = {name: batch[name] for name in ("input_ids", "position_ids") if name in batch}
    return logits_of(model(**inputs))


def summarize(table: Table) -> dict[str, float]:
    """Bits per byte compare models with different tokenizers: they are those of the whole text."""
    nats, tokens, correct, num_bytes = (
        float(table[name].sum()) for name in ("loss", "tokens", "correct", "bytes")
    )
    return {
        "loss": nats / tokens,
        "perplexity": math.exp(min(nats / tokens, 700)),  # exp(710) is no float
        # Of sequences in which no document ends, as in the trial before training, it is unknown.
        "bits_per_byte": nats / math.log(2) / num_bytes if num_bytes else math.nan,
        "token_accuracy": correct / tokens,
    }


@torch.no_grad()
def sample(config: Config, tokenizer: Any, model: nn.Module) -> str:
    """The prompt and what the model makes of it. Not `generate`: of sharded weights every process
    has to run as many forwards as the others, and a compiled model wants one shape."""
    prompt = [packing.start_token(tokenizer), *packing.plain([config.prompt], tokenizer)[0]]
    length = min(len(prompt) + config.sample_tokens, config.sequence_length)
    ids = torch.tensor([prompt + [tokenizer.pad_token_id] * (length - len(prompt))])
    ids = ids.to(next(model.parameters()).device)
    for place in range(len(prompt), length):
        logits = _logits(model, {"input_ids": ids})[0, place - 1]
        # Equally likely, should the model have diverged: all processes still run as many forwards.
        ids[0, place] = torch.multinomial(logits.softmax(0).nan_to_num(1.0), 1)
    return str(tokenizer.decode(ids[0, 1:]))


def export(tokenizer: Any, model: nn.Module, folder: Path) -> None:
    """All that `from_pretrained` reads of model and tokenizer."""
    if hasattr(model, "save_pretrained"):
        model.save_pretrained(folder)  # type: ignore[operator]
    # `generate` goes on behind the last token of a row. The attribute alone is not saved.
    tokenizer.init_kwargs["padding_side"] = tokenizer.padding_side = "left"
    tokenizer.save_pretrained(folder)
