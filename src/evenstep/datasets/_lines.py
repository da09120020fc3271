"""Text files read line by line, in ranges of bytes: a range is a shard, so that one large file can
be shared and resumed in the middle as well as many small ones."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

RANGE = 4 << 20  # bytes


def dataset(files: Sequence[Path], *, as_json: bool) -> Any:
    """`datasets.IterableDataset` of a row a line: its JSON object, blank lines left out, or its
    text in the column `text`. Lines end with \\n or \\r\\n."""
    from datasets import IterableDataset

    ranges = [
        (path, start) for path in files for start in range(0, max(1, path.stat().st_size), RANGE)
    ]
    # A list among the arguments of a generator is what it can be sharded by.
    return IterableDataset.from_generator(
        read, gen_kwargs={"ranges": ranges, "as_json": as_json, "size": RANGE}
    )


def read(
    ranges: Sequence[tuple[Path, int]], as_json: bool, size: int = RANGE
) -> Iterator[dict[str, Any]]:
    """The lines that begin in each of the ranges. Raises RuntimeError, naming file and byte, for a
    line that is no JSON object or not UTF-8."""
    for path, start in ranges:
        with path.open("rb") as file:
            if start:
                file.seek(start - 1)
                file.readline()  # belongs to the range before, unless a line ends right there
            while (at := file.tell()) < start + size and (line := file.readline()):
                if not as_json:
                    yield {"text": _text(path, at, line).rstrip("\r\n")}
                elif line.strip():
                    yield _object(path, at, line)


def _object(path: Path, at: int, line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(_text(path, at, line))
    except json.JSONDecodeError as error:
        raise RuntimeError(f"{path}: the line at byte {at} is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise RuntimeError(f"{path}: the line at byte {at} is no JSON object but {row!r:.80}")
    return row


def _text(path: Path, at: int, line: bytes) -> str:
    try:
        return line.decode("utf-8" if at else "utf-8-sig")  # a file may begin with a BOM
    except UnicodeDecodeError as error:
        raise RuntimeError(f"{path}: the line at byte {at} is not UTF-8: {error}") from error
