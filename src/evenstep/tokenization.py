"""Tokenizers: those of hub ids and local folders, and a byte-level BPE trained on the data."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evenstep.files import write_atomically
from evenstep.models._transformers import unreadable
from evenstep.task import find_module

END, PAD = "<|endoftext|>", "<|pad|>"
TRAINED_ON = 100_000_000
"""Characters that a BPE is trained on; more change few of its merges."""

LONGEST_WORD = 1000
"""Characters of a word that a BPE is trained on: training takes the square of it, which is hours
for a picture in base64."""

logger = logging.getLogger(__name__)


def chosen(tokenizer: str, model: Any, fallback: str) -> tuple[str, dict[str, Any]]:
    """What a task's `tokenizer` and `model` sections ask for: "bpe", or a hub id or folder, with
    the arguments of `pretrained`. `auto` is the model's own, unless it is built afresh."""
    name = tokenizer
    if name == "auto":
        types = getattr(find_module("models", model.name, fallback), "model_types", None)
        name = model.name if types and model.name not in types() else "bpe"
    if name != model.name:
        return name, {}
    return name, {key: getattr(model, key) for key in ("revision", "trust_remote_code")}


def pretrained(
    name: str,
    revision: str | None = None,
    *,
    trust_remote_code: bool = False,
    needs_end: bool = True,
) -> Any:
    """The tokenizer of a hub id or local folder, with a padding token, and an end token if needed.

    GPT-2 and many after it have no padding token: the end token pads, and no label says so.
    Raises ValueError if it cannot be read or has no end token.
    """
    from transformers import AutoTokenizer

    source = {"revision": revision, "trust_remote_code": trust_remote_code}
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, **source)
    except (OSError, ValueError) as error:
        raise unreadable("tokenizer", name, error) from error
    if tokenizer.eos_token_id is None and (needs_end or tokenizer.pad_token_id is None):
        raise ValueError(f"the tokenizer {name!r} has no end token (eos_token) to end documents")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def byte_level_bpe(texts: Sequence[str], vocab_size: int, folder: Path | None = None) -> Any:
    """A byte-level BPE trained on `texts`: any text becomes tokens and comes back unchanged.

    Kept in `folder` (~/.cache/evenstep) under a hash of the arguments: of several processes
    that need it at once, one trains it. Raises ValueError where it cannot be kept.
    """
    from transformers import PreTrainedTokenizerFast

    folder = folder or cache_folder()
    path = folder / f"bpe-{vocab_size}-{_fingerprint(texts)}.json"
    try:
        if not path.exists():  # once there it is whole; a cache that is full or read-only will do
            _train_once(path, texts, vocab_size)
    except OSError as error:
        raise ValueError(
            f"a trained tokenizer cannot be kept in {folder} ({error}): set XDG_CACHE_HOME to a "
            "folder that can be written"
        ) from error
    return PreTrainedTokenizerFast(
        tokenizer_file=str(path), bos_token=END, eos_token=END, pad_token=PAD
    )


def _train_once(path: Path, texts: Sequence[str], vocab_size: int) -> None:
    from filelock import FileLock

    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{path}.lock"):
        if not path.exists():
            logger.info("training a byte-level BPE of %d tokens: %s", vocab_size, path)
            # Renamed into place: where locks do not work (some network disks) the last one wins,
            # and all write the same.
            write_atomically(path, train_bpe(texts, vocab_size).to_str(pretty=True))


def train_bpe(texts: Sequence[str], vocab_size: int) -> Any:
    """A `tokenizers.Tokenizer`; the same on any machine for the same arguments."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),  # all 256 bytes, seen or not
        show_progress=False,
    )
    every = -(-sum(map(len, texts)) // TRAINED_ON)
    cut = re.compile(rf"(\S{{{LONGEST_WORD}}})")
    tokenizer.train_from_iterator((cut.sub(r"\1 ", t) for t in texts[:: max(every, 1)]), trainer)
    return tokenizer


def cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "evenstep"


def identity(tokenizer: Any) -> str:
    """A hash of all that decides how a tokenizer reads text."""
    special = sorted(tokenizer.special_tokens_map.items())
    return hashlib.sha256(f"{_serialised(tokenizer)}{special}".encode()).hexdigest()[:16]


def _serialised(tokenizer: Any) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)  # not that of a Python tokenizer
    if not backend:
        return repr(sorted(tokenizer.get_vocab().items()))
    how_it_was_called = {"truncation": None, "padding": None}
    return json.dumps({**json.loads(backend.to_str()), **how_it_was_called})


def _fingerprint(texts: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        encoded = text.encode()
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.hexdigest()[:16]
