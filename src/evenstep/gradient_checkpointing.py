"""Gradient checkpointing: keep the input of each block for the backward, and compute the rest anew.

In one way for all models, since those that bring a way of their own (transformers, timm) change it
from version to version. Traps:

- A wrapper module would rename parameters: checkpoints of runs with and without must fit.
- The reentrant kind gives no gradient to blocks whose input needs none (frozen embeddings, LoRA),
  and hides what they use from DDP's search for unused parameters.
- BatchNorm sees each micro-batch twice: see `batchnorm`, where that counts once.
"""

from __future__ import annotations

from functools import partial

from evenstep.layers import blocks

from torch import nn
from torch.utils.checkpoint import checkpoint


def enable(model: nn.Module) -> None:
    """Checkpoint each repeated block of the model, in place, under the names it has. Dropout draws
    the same masks again from torch; `random` and numpy must not be used in a block.

    Raises ValueError if the model has no repeated blocks.
    """
    for block in blocks(model, "gradient_checkpointing").values():
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
