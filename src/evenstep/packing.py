"""Documents to sequences of tokens: cut into pieces, several pieces to a sequence. Pure functions.

A document t1 ... tn is read as start, t1, ..., tn and predicts t1, ..., tn, end, so that its first
token has a price too. Documents longer than a sequence are cut; each token is predicted once.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeGuard

from evenstep.labels import IGNORED
from evenstep.texts import ROW, no_column

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

logger = logging.getLogger(__name__)

Sample = dict[str, Tensor]
Integers = np.ndarray[Any, np.dtype[Any]]

DOCUMENTS_AT_A_TIME = 1000  # that the tokenizer turns into Python lists


@dataclass(frozen=True, eq=False)
class Sequences:
    """Samples of up to `sequence_length` tokens. n tokens of a sample are

    - `input_ids` and `labels`, each (n,): the label is the token that follows;
    - `position_ids` (n,): from 0 in each piece, which is how attention tells them apart;
    - `bytes` (): the UTF-8 bytes of the documents that end in this sequence, so that the sum over
      all samples is that of all documents.
    """

    tokens: Integers  # start, t1, ..., tn, end of every document
    pieces: Integers  # (m, 3): first token, number of tokens, bytes; those of a sequence together
    first: Integers  # (len + 1,): the first piece of each sequence, and m

    def __len__(self) -> int:
        return len(self.first) - 1

    def __iter__(self) -> Iterator[Sample]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, index: int) -> Sample:
        pieces = self.pieces[self.first[index] : self.first[index + 1]].tolist()
        columns = {
            "input_ids": [self.tokens[start : start + n] for start, n, _ in pieces],
            "labels": [self.tokens[start + 1 : start + n + 1] for start, n, _ in pieces],
            "position_ids": [np.arange(n) for _, n, _ in pieces],
        }
        sample = {
            name: torch.from_numpy(np.concatenate(parts).astype(np.int64))
            for name, parts in columns.items()
        }
        return {**sample, "bytes": torch.tensor(sum(size for *_, size in pieces))}


def pack(
    rows: Iterable[Mapping[str, Any]],
    tokenizer: Any,
    sequence_length: int,
    *,
    column: str = "text",
    share: bool = True,
    split: str = "train",
    skip: bool = False,
) -> Sequences:
    """All documents of `rows` as sequences; one piece a sequence unless they `share`. Empty
    documents are left out. Raises ValueError for a row without text in `column`, unless such rows
    are to be left out: how many there were is logged."""
    left_out: list[int] = []
    documents = texts(rows, column, split, left_out=left_out if skip else None)
    tokens, sizes, counts = encode(documents, tokenizer)
    if left_out:
        logger.warning("left out: %d rows without text of split %r", len(left_out), split)
    pieces = cut(counts, sizes, sequence_length)
    if not share:
        return Sequences(tokens, pieces, np.arange(len(pieces) + 1))
    groups = best_fit(pieces[:, 1].tolist(), sequence_length)
    order = [piece for group in groups for piece in group]
    return Sequences(tokens, pieces[order], np.cumsum([0, *map(len, groups)]))


def texts(
    rows: Iterable[Mapping[str, Any]],
    column: str,
    split: str = "train",
    *,
    left_out: list[int] | None = None,
) -> Iterator[str]:
    """Those that are not empty. `left_out` gets the numbers of the rows that have none; where it is
    None, they raise ValueError. So does a table without that column; of rows of a stream, any may
    lack it."""
    known = getattr(rows, "column_names", None)
    for place, row in enumerate(rows):
        number, text = row.get(ROW, place), row.get(column)
        if column not in row and (known or left_out is None):
            raise no_column(column, split, row, "task.text_column")
        if _is_unicode(text):
            if text:
                yield text
        elif left_out is not None:
            left_out.append(number)
        else:
            raise ValueError(
                f"split {split!r}: row {number} has no text in column {column!r}: {text!r}; "
                "task.on_error=skip leaves such rows out"
            )


def _is_unicode(text: Any) -> TypeGuard[str]:
    """JSON may hold half a surrogate pair, "\\ud83d", which is no text."""
    try:
        return isinstance(text, str) and bool(text.encode() or True)
    except UnicodeEncodeError:
        return False


def encode(documents: Iterable[str], tokenizer: Any) -> tuple[Integers, list[int], list[int]]:
    """The tokens of all documents, each between a start and an end; and of each document its UTF-8
    bytes and the number of its tokens, start and end included."""
    start, end = start_token(tokenizer), tokenizer.eos_token_id
    tokens, sizes, counts = array("i"), list[int](), list[int]()
    remaining = iter(documents)
    while batch := list(islice(remaining, DOCUMENTS_AT_A_TIME)):
        for document, own in zip(batch, plain(batch, tokenizer), strict=True):
            tokens.extend((start, *own, end))
            sizes.append(len(document.encode()))
            counts.append(len(own) + 2)
    return np.frombuffer(tokens, dtype=np.int32), sizes, counts


def start_token(tokenizer: Any) -> int:
    """That before a document: of a tokenizer that has none, the one that ends documents."""
    own = tokenizer.bos_token_id
    return int(tokenizer.eos_token_id if own is None else own)


def plain(documents: list[str], tokenizer: Any) -> list[list[int]]:
    """The tokens of each. One that spells out a special token is text all the same."""
    options = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
    ids: list[list[int]] = tokenizer(documents, **options)["input_ids"]
    return ids


def cut(counts: Sequence[int], sizes: Sequence[int], sequence_length: int) -> Integers:
    """(m, 3) int64: the pieces of all documents, see `Sequences.pieces`. The bytes of a document
    count with its last piece."""
    pieces, begin = [], 0
    for count, size in zip(counts, sizes, strict=True):
        for start in range(0, count - 1, sequence_length):
            length = min(sequence_length, count - 1 - start)
            pieces.append((begin + start, length, size if start + length == count - 1 else 0))
        begin += count
    return np.array(pieces, dtype=np.int64).reshape(-1, 3)


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Groups of numbers of pieces, at most `capacity` long together: the longest piece first, each
    into the fullest group that has room for it (best-fit decreasing, as in Ding et al., "Fewer
    Truncations Improve Language Modeling", 2024)."""
    groups: list[list[int]] = []
    by_room: list[list[list[int]]] = [[] for _ in range(capacity + 1)]
    rooms = 0  # bit r is set where by_room[r] has a group: the first that fits is found at once
    for piece in sorted(range(len(lengths)), key=lambda piece: -lengths[piece]):
        if fitting := rooms >> lengths[piece]:
            room = lengths[piece] + (fitting & -fitting).bit_length() - 1
            group = by_room[room].pop()
            if not by_room[room]:
                rooms ^= 1 << room
        else:
            room, group = capacity, []
            groups.append(group)
        group.append(piece)
        room -= lengths[piece]
        by_room[room].append(group)
        rooms |= 1 << room
    return groups


def collate(samples: Sequence[Sample], pad_id: int, length: int | None = None) -> Sample:
    """One micro-batch: (B, `length`), each padding token a piece of its own; or as long as its
    longest sample, and without `position_ids`. Labels of padding are IGNORED."""
    fill = {"input_ids": pad_id, "labels": IGNORED}
    if length is not None:
        fill["position_ids"] = 0
    batch = {"bytes": torch.stack([sample["bytes"] for sample in samples])}
    for name, value in fill.items():
        columns = [sample[name] for sample in samples]
        padded = pad_sequence(columns, batch_first=True, padding_value=value)
        missing = (length or padded.shape[1]) - padded.shape[1]
        batch[name] = F.pad(padded, (0, missing), value=value)
    return batch
