"""Text classification: a label, several labels or a number for a text or a pair of texts.

    task:
      name: text_classification
      data: {name: nyu-mll/glue, config: sst2}     a hub id, a local folder or a file
      model: {name: distilbert}                    a hub id, a local folder, bert, ... (fresh), or
                                                   a file in models/

The loss of a sample is its cross entropy, its squared error (regression), or the mean of the binary
cross entropies of all classes (multi_label).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, Literal

from evenstep import text_metrics, tokenization
from evenstep.classification import class_weights_of, logits_of, num_targets, summed_cross_entropy
from evenstep.distillation import Teacher, TeacherConfig, taught
from evenstep.orders import balanced, length_grouped
from evenstep.sections import Section
from evenstep.streams import Streams
from evenstep.task import Named, Task, find_module
from evenstep.text_augmentation import token_noise
from evenstep.text_labels import Kind, Labels, labels_of
from evenstep.text_models import build_model, export
from evenstep.text_samples import (
    Batch,
    TextSamples,
    collate,
    encode,
    for_pairs,
    text_columns,
)
from evenstep.text_teacher import TextTeacher
from evenstep.texts import TextSplits

import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn
from typing_extensions import Self  # pydantic needs this before Python 3.11

Weight = Annotated[float, Field(ge=0)]


class Config(Section):
    name: str = "text_classification"
    """Picks the task."""

    data: Annotated[Any, Named("datasets", fallback="text")]
    """The texts and their labels."""

    model: Annotated[Any, Named("models", fallback="text_encoder")]
    """The network."""

    text_columns: list[str] | None = Field(default=None, min_length=1, max_length=2)
    """Column of the text, or the two of a pair; null: those that GLUE's tasks have, or text."""

    label_column: str | list[str] = "label"
    """Column of the labels. Several columns, with 0 or 1 in each, are one class each of
    multi_label."""

    kind: Kind | None = None
    """single_label, multi_label (labels are lists) or regression (labels are numbers); null: what
    the labels tell."""

    tokenizer: str = "auto"
    """A hub id or a local folder; bpe: a byte-level BPE trained on the training split; auto: the
    model's own if it is a hub id or a local folder, else bpe."""

    vocab_size: int = Field(default=8192, ge=258)
    """Tokens of a BPE that is trained here; 256 stand for bytes, 2 end and pad texts."""

    max_length: int = Field(default=128, ge=4)
    """Tokens of a sample; longer ones are cut, of a pair the longer text first."""

    group_by_length: bool = True
    """Put texts of about the same length into a micro-batch, so that little is padded."""

    token_splitting: float = Field(default=0.0, ge=0, lt=1)
    """How likely a BPE's token is read as the two that it was merged from, in training."""

    token_dropout: float = Field(default=0.0, ge=0, lt=1)
    """How likely a token is left out, in training; special ones stay."""

    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    """Part of each label that is spread over all classes, in training; for single_label."""

    class_weights: Literal["balanced"] | list[Weight] | None = None
    """Weights of the classes in the training loss: one number a class; balanced: one over how
    frequent a class is, all classes together count as without; null: 1. For single_label."""

    balanced_sampling: bool = False
    """Train on every class equally often, in place of group_by_length; for single_label."""

    teacher: TeacherConfig | None = None
    """A trained network whose outputs are learned as well (distillation), with the same tokenizer;
    null for none. For single_label."""

    best_metric: str | None = None
    """Metric that decides which checkpoint is best, such as mcc; null: accuracy, macro_f1 for
    multi_label, pearson for regression."""

    on_error: Literal["stop", "skip"] = "stop"
    """At rows without a text or a label: stop, or leave them out and say how many there were."""

    @model_validator(mode="after")
    def _balanced_once(self) -> Self:
        if self.balanced_sampling and self.class_weights == "balanced":
            raise ValueError(
                "class_weights=balanced makes up for rare classes already: drop it or "
                "balanced_sampling"
            )
        return self


def build(config: Config) -> Task:
    """Raises ValueError for data that cannot be trained on."""
    splits: TextSplits = find_module("datasets", config.data.name, "text").build(config.data)
    if isinstance(splits.train, Streams):
        raise ValueError(
            "text_classification reads no streams, since all labels have to be known before "
            "training; give task.data.name a hub id, a file or a folder"
        )
    columns = text_columns(config.text_columns, splits.train, config.data.name)
    labels = labels_of(config.kind, config.label_column, splits.train, "train")
    _refuse_unused(config, labels.kind)
    best_metric = _best_metric(config.best_metric, labels)
    tokenizer = make_tokenizer(config, splits.train, columns)
    read = partial(
        encode,
        columns=columns,
        labels=labels,
        tokenizer=tokenizer,
        max_length=config.max_length,
        skip=config.on_error == "skip",
    )
    train = read(splits.train, split="train")
    held_out = None if splits.eval is None else read(splits.eval, split="evaluation")
    weights = class_weights_of(config.class_weights, train.labels.tolist(), len(labels.names))
    teacher = (
        TextTeacher(config.teacher, labels.names, config.max_length, tokenizer)
        if config.teacher
        else None
    )
    return Task(
        model=partial(build_model, config.model, tokenizer, labels, config.max_length),
        train_dataset=train,
        eval_dataset=held_out,
        collate=partial(collate, tokenizer.pad_token_id),
        count=partial(count, weights),
        loss=partial(loss, labels.kind, config.label_smoothing, weights, teacher),
        score=partial(score, labels.kind),
        summarize=text_metrics.SUMMARIES[labels.kind],
        best_metric=best_metric,
        higher_is_better=best_metric not in ("loss", "mae"),
        augment=token_noise(
            tokenizer,
            splitting=config.token_splitting,
            dropout=config.token_dropout,
            max_length=config.max_length,
        ),
        order=order(config, train),
        export=partial(export, config.model, tokenizer, labels),
        data_identity={
            **splits.identity,
            "samples": "-".join(s.fingerprint() for s in (train, held_out) if s is not None),
            "tokenizer": tokenization.identity(tokenizer),
            "kind": labels.kind,
            "classes": len(labels.names),
            "train_samples": len(train),
            "eval_samples": len(held_out or ()),
            **({"teacher": teacher.fingerprint()} if teacher else {}),
        },
    )


def _refuse_unused(config: Config, kind: Kind) -> None:
    """Keys that are for single_label, where the labels are of another kind."""
    for key in ("label_smoothing", "class_weights", "balanced_sampling", "teacher"):
        if getattr(config, key) and kind != "single_label":
            raise ValueError(f"task.{key} is for single_label, and the labels are {kind}")


def _best_metric(given: str | None, labels: Labels) -> str:
    """Known before training: at the first evaluation, all steps up to there would be lost."""
    if given is None:
        return text_metrics.BEST[labels.kind]
    known = text_metrics.names(labels.kind, len(labels.names))
    if given not in known:
        raise ValueError(f"task.best_metric {given!r} is none of: {', '.join(known)}")
    return given


def make_tokenizer(config: Config, train: Any, columns: Sequence[str]) -> Any:
    name, source = tokenization.chosen(config.tokenizer, config.model, "text_encoder")
    if name != "bpe":
        return tokenization.pretrained(name, **source, needs_end=False)
    texts = [text for column in columns for text in train[column] if isinstance(text, str) and text]
    return for_pairs(tokenization.byte_level_bpe(texts, config.vocab_size))


def order(config: Config, train: TextSamples) -> Callable[[int, int, int], Tensor] | None:
    if config.balanced_sampling:
        return partial(balanced, train.labels.tolist())
    return partial(length_grouped, train.lengths) if config.group_by_length else None


def count(class_weights: Tensor | None, batch: Batch) -> float:
    """Samples, or the sum of the weights of their classes."""
    labels = batch["label"]
    one_class_each = not labels.is_floating_point()
    return num_targets(labels, class_weights) if one_class_each else len(labels)


def loss(
    kind: Kind,
    label_smoothing: float,
    class_weights: Tensor | None,
    teacher: Teacher | None,
    model: nn.Module,
    batch: Batch,
) -> Tensor:
    """Summed over the samples; with a teacher, its share of alpha is the divergence from it."""
    logits, labels = _logits(model, batch), batch["label"]
    if kind != "single_label":
        return _losses(kind, logits, labels).sum()
    supervised = summed_cross_entropy(
        logits, labels, label_smoothing=label_smoothing, class_weights=class_weights
    )
    return taught(teacher, supervised, batch["inputs"], logits, labels, class_weights)


def score(kind: Kind, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    logits, labels = _logits(model, batch), batch["label"]
    columns = {"label": labels, "loss": _losses(kind, logits, labels)}
    if kind == "regression":
        return {**columns, "prediction": logits[:, 0]}
    if kind == "multi_label":
        return {**columns, "prediction": logits > 0, "probabilities": logits.sigmoid()}
    return {**columns, "prediction": logits.argmax(1), "probabilities": logits.softmax(1)}


def _losses(kind: Kind, logits: Tensor, labels: Tensor) -> Tensor:
    """(B,)"""
    if kind == "single_label":
        return F.cross_entropy(logits, labels, reduction="none")
    if kind == "regression":
        return (logits[:, 0] - labels).square()
    return F.binary_cross_entropy_with_logits(logits, labels, reduction="none").mean(1)


def _logits(model: nn.Module, batch: Batch) -> Tensor:
    """(B, classes), or (B, 1) of a number; in float32 or wider."""
    return logits_of(model(**batch["inputs"]))
