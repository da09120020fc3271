"""Several small convolutional networks that vote on a text, for data too small for a transformer.

Each has embeddings of its own, of which it sees the sum and, through a convolution, the strongest
response anywhere in the text (Kim, "Convolutional Neural Networks for Sentence Classification",
2014). A training sample teaches one of them, drawn at random, so that they stay different.
"""

from __future__ import annotations

from typing import Any

from evenstep.sections import Section

import torch
from pydantic import Field
from torch import Tensor, nn


class Config(Section):
    name: str
    """The file in `evenstep/models/`."""

    members: int = Field(default=4, ge=1)
    """Networks that vote. Twice as many need about twice as many epochs."""

    width: int = Field(default=32, ge=1)
    """Channels of each."""

    kernel_size: int = Field(default=3, ge=1)
    """Tokens that the convolution looks at, an odd number."""

    dropout: float = Field(default=0.5, ge=0, lt=1)
    """Before the last layer."""

    embedding_dropout: float = Field(default=0.3, ge=0, lt=1)
    """Before the convolution."""


def build(config: Config, *, tokenizer: Any, max_length: int, num_labels: int) -> nn.Module:
    """Raises ValueError for an even kernel_size."""
    if config.kernel_size % 2 == 0:
        raise ValueError(f"task.model.kernel_size {config.kernel_size}: give an odd number")
    return TextCNN(config, len(tokenizer), num_labels)


class TextCNN(nn.Module):
    def __init__(self, config: Config, num_tokens: int, num_labels: int) -> None:
        super().__init__()
        self.members = config.members
        channels = config.members * config.width
        self.embedding = nn.Embedding(num_tokens, channels)
        nn.init.normal_(self.embedding.weight, std=0.03)
        self.embedding_dropout = nn.Dropout(config.embedding_dropout)
        self.convolution = nn.Conv1d(
            channels, channels, config.kernel_size, padding="same", groups=config.members
        )
        self.dropout = nn.Dropout(config.dropout)
        self.head = nn.Conv1d(2 * channels, num_labels * config.members, 1, groups=config.members)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None
    ) -> Tensor:
        """(B, labels) from (B, L)."""
        mask = attention_mask[:, None]
        tokens = self.embedding(input_ids).transpose(1, 2) * mask
        # Not the mean: what a long text says often may count more.
        total = tokens.sum(2) / mask.sum(2).clamp(min=1).sqrt()
        strongest = (self.convolution(self.embedding_dropout(tokens)).relu() * mask).amax(2)
        by_member = [part.unflatten(1, (self.members, -1)) for part in (total, strongest)]
        features = self.dropout(torch.cat(by_member, 2))
        logits: Tensor = self.head(features.flatten(1)[..., None]).view(
            len(input_ids), self.members, -1
        )
        if not self.training:
            return logits.mean(1)
        drawn = torch.randint(self.members, (len(input_ids), 1), device=logits.device)
        return logits.gather(1, drawn[..., None].expand(-1, -1, logits.shape[2]))[:, 0]
