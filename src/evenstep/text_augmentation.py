"""Random changes of the tokens of a training sample."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ROUNDS = 3  # a token may fall into up to 2**3 parts

Sample = tuple[dict[str, Tensor], Tensor]  # see TextSamples


@dataclass(frozen=True)
class TokenNoise:
    """Splits and drops tokens, other than special ones; draws from torch."""

    splitting: float
    """How likely a token of a BPE is read as the two that it was merged from, and each of these in
    turn (in the manner of Provilkov et al., "BPE-Dropout", 2020): rare words then share more."""
    dropout: float
    """How likely a token is left out (Iyyer et al., "Deep Unordered Composition", 2015)."""
    parts: Tensor  # (tokens, 2) int64: what each token was merged from; -1 for no such thing
    special: Tensor  # (tokens,) bool
    max_length: int

    def __call__(self, sample: Sample) -> Sample:
        inputs, label = sample
        ids, origin = inputs["input_ids"], torch.arange(len(inputs["input_ids"]))
        for _ in range(ROUNDS if self.splitting else 0):
            ids, origin = self._split(ids, origin)
        kept = (torch.rand(len(ids)) >= self.dropout) | self.special[ids]
        if not kept.any():
            return sample
        others = {name: values[origin[kept]] for name, values in inputs.items()}
        return {**others, "input_ids": ids[kept]}, label

    def _split(self, ids: Tensor, origin: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens after a round, and the number of the token that each comes from."""
        split = (torch.rand(len(ids)) < self.splitting) & (self.parts[ids, 0] >= 0)
        if len(ids) + int(split.sum()) > self.max_length:
            return ids, origin
        whole = torch.stack([ids, torch.full_like(ids, -1)], 1)
        pieces = torch.where(split[:, None], self.parts[ids], whole)
        present = pieces >= 0
        return pieces[present], origin[:, None].expand(-1, 2)[present]


def token_noise(
    tokenizer: Any, *, splitting: float, dropout: float, max_length: int
) -> TokenNoise | None:
    """None for no noise. Raises ValueError for tokens to split that are not those of a BPE."""
    if not splitting and not dropout:
        return None
    special = torch.zeros(len(tokenizer), dtype=torch.bool)
    special[tokenizer.all_special_ids] = True
    parts = merges(tokenizer) if splitting else torch.full((len(tokenizer), 2), -1)
    return TokenNoise(splitting, dropout, parts, special, max_length)


def merges(tokenizer: Any) -> Tensor:
    """(tokens, 2) int64: the tokens that each was merged from, -1 if it was not."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    model = json.loads(backend.to_str())["model"] if backend else {}
    if model.get("type") != "BPE":
        raise ValueError("task.token_splitting needs a BPE tokenizer, such as task.tokenizer=bpe")
    parts = torch.full((len(tokenizer), 2), -1)
    numbers = model["vocab"]
    for merge in reversed(model["merges"]):  # the first way to make a token counts
        left, right = merge if isinstance(merge, list) else merge.split(" ")
        parts[numbers[left + right]] = torch.tensor([numbers[left], numbers[right]])
    return parts
