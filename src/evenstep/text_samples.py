"""Rows of text to samples of tokens with a label, and samples to micro-batches."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evenstep import texts
from evenstep.text_labels import Label, Labels

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

logger = logging.getLogger(__name__)

ROWS_AT_A_TIME = 1000  # that the tokenizer turns into Python lists
SHOWN = 10

USUAL = (
    *(("sentence1", "sentence2"), ("premise", "hypothesis"), ("question1", "question2")),
    *(("question", "sentence"), ("sentence",), ("text",)),
)
Batch = Mapping[str, Any]  # "inputs": tensors (B, L), "label": (B,) or (B, classes)
Integers = np.ndarray[Any, np.dtype[np.int32]]


@dataclass(frozen=True)
class TextSamples:
    """A split in memory: items are ({input: (L,) int64}, label), L the length of the text."""

    tokens: Mapping[str, Integers]  # input_ids, and token_type_ids where the tokenizer gives them
    starts: np.ndarray[Any, np.dtype[np.int64]]  # (n + 1,)
    labels: Tensor  # (n,) int64 or float32, or (n, classes) float32

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], Tensor]:
        own = slice(self.starts[index], self.starts[index + 1])
        inputs = {name: values[own].astype(np.int64) for name, values in self.tokens.items()}
        return {name: torch.from_numpy(v) for name, v in inputs.items()}, self.labels[index]

    @property
    def lengths(self) -> Tensor:
        """(n,) int64: tokens of each sample."""
        return torch.from_numpy(np.diff(self.starts))

    def fingerprint(self) -> str:
        """Of all tokens and labels."""
        parts = [self.labels.numpy(), self.starts, *self.tokens.values()]
        return hashlib.sha256(b"".join(part.tobytes() for part in parts)).hexdigest()[:16]


def text_columns(given: Sequence[str] | None, rows: Any, name: str) -> Sequence[str]:
    """The column of a sentence, or the two of a pair; those that are usual where none is given.
    Raises ValueError if a column is missing."""
    for columns in [given] if given else USUAL:
        if set(columns) <= set(rows.column_names):
            return columns
    wanted = " and ".join(given) if given else "sentence, text or a usual pair of columns"
    raise ValueError(
        f"{name} has no column {wanted}; set task.text_columns to one or two of: "
        f"{texts.listed(rows.column_names)}; a file without a header line needs task.data.columns"
    )


def usable(
    rows: Any, columns: Sequence[str], labels: Sequence[Label | None], split: str, *, skip: bool
) -> list[int]:
    """Numbers of the rows that have a text in each column, '' included, and a label. Raises
    ValueError with the others, SHOWN of them at most, unless they are to be left out."""
    values = [texts.column(rows, column, split, "task.text_columns") for column in columns]
    problems = dict[int, str]()
    for row, label in enumerate(labels):
        for column, own in zip(columns, values, strict=True):
            if not isinstance(own[row], str):
                problems[row] = f"has no text in column {column!r}: {own[row]!r}"
        if label is None:
            problems[row] = "has no label"
    if problems and not skip:
        numbers = texts.numbers(rows)
        some = (f"row {numbers[row]} {problem}" for row, problem in list(problems.items())[:SHOWN])
        raise ValueError(
            f"split {split!r} has {len(problems)} row(s) that cannot be used: {'; '.join(some)}"
            f"{', ...' * (len(problems) > SHOWN)}; task.on_error=skip leaves them out"
        )
    return [row for row in range(len(labels)) if row not in problems]


def encode(
    rows: Any,
    columns: Sequence[str],
    labels: Labels,
    split: str,
    *,
    tokenizer: Any,
    max_length: int,
    skip: bool,
) -> TextSamples:
    """The samples of a split. Raises ValueError for rows that cannot be used."""
    known = labels.encode(rows, split)
    kept = usable(rows, columns, known, split, skip=skip)
    if not kept:
        raise ValueError(f"split {split!r} has no row that can be used")
    if num_skipped := len(known) - len(kept):
        logger.warning("left out: %d of %d rows of split %r", num_skipped, len(known), split)
    parts = list(_tokenised(rows.select(kept), columns, tokenizer, max_length))
    tokens = {name: [ids for part in parts for ids in part[name]] for name in parts[0]}
    kind = torch.int64 if labels.kind == "single_label" else torch.float32
    return TextSamples(
        tokens={name: np.concatenate(lists).astype(np.int32) for name, lists in tokens.items()},
        starts=np.cumsum([0, *map(len, tokens["input_ids"])]),
        labels=torch.tensor([known[row] for row in kept], dtype=kind),
    )


def _tokenised(
    rows: Any, columns: Sequence[str], tokenizer: Any, max_length: int
) -> Iterator[dict[str, list[Any]]]:
    for part in rows.select_columns(list(columns)).iter(ROWS_AT_A_TIME):
        # A text that spells out a special token is text all the same.
        found = tokenizer(
            *(part[column] for column in columns),
            truncation=True,
            max_length=max_length,
            return_attention_mask=False,
            split_special_tokens=True,
        )
        # GPT-2 gives no token for '', and no model reads nothing.
        empty = {"input_ids": [tokenizer.pad_token_id], "token_type_ids": [0]}
        yield {name: [ids or empty[name] for ids in found[name]] for name in found}


def for_pairs(tokenizer: Any) -> Any:
    """A tokenizer of `tokenization.byte_level_bpe` that puts its end token around a text, and
    between the two of a pair, as RoBERTa does: models read a text off its first or last token."""
    from tokenizers.processors import TemplateProcessing

    end = tokenizer.eos_token
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{end} $A {end}",
        pair=f"{end} $A {end} $B {end}",
        special_tokens=[(end, tokenizer.eos_token_id)],
    )
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    return tokenizer


def collate(pad_id: int, samples: Sequence[tuple[dict[str, Tensor], Tensor]]) -> Batch:
    """As long as the longest of its samples; attention_mask is 0 where a shorter one is padded."""
    inputs, labels = zip(*samples, strict=True)
    padding = {"input_ids": pad_id, "token_type_ids": 0, "attention_mask": 0}
    columns = {name: [own[name] for own in inputs] for name in inputs[0]}
    columns["attention_mask"] = [torch.ones_like(ids) for ids in columns["input_ids"]]
    padded = {
        name: pad_sequence(values, batch_first=True, padding_value=padding[name])
        for name, values in columns.items()
    }
    return {"inputs": padded, "label": torch.stack(labels)}
