"""Small files, written whole or not at all."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def write_atomically(path: Path, text: str) -> None:
    """Write `text` so that the old or the new file is there at any moment, a power cut included."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with named(path):
        try:
            temporary.write_text(text, encoding="utf-8")
            flush(temporary)
            temporary.replace(path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        flush(path.parent)


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Names `path` in an OSError of writing to it: a full disk says `No space left on device`,
    and not where."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def flush(path: Path) -> None:
    """fsync of a file, or of a directory: the names in it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def to_json(value: Any, indent: int | None = None) -> str:
    """Strict JSON: NaN and infinity become null, arrays and tensors become lists."""
    return json.dumps(_plain(value), indent=indent, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return _plain(value.tolist()) if hasattr(value, "tolist") else value
