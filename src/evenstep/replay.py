"""metrics.jsonl, and what is said when steps that it holds are computed again.

A run that resumes from an older checkpoint computes some steps a second time. As a run is a
function of its config, their rows must come out as they are: where they do not, something that
the config does not name has changed, such as code, data or a library.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from evenstep.files import flush, named, to_json, write_atomically

import torch

FORMATS = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
MEASURED = ("_per_second", "_seconds", "_bytes")
"""Endings of keys that tell of the hardware and not of the result."""


def rounding(precision: str, reproducibility: str) -> float:
    """The relative difference that the same step may show when it is computed again.

    None in bitwise mode. In rounding mode half the digits of the number format (1e-8 in float64,
    3e-4 in float32, 0.09 in bfloat16): another number of processes or a kernel that adds in any
    order changes the last digits of a step, and later steps amplify that; changed data or code
    shows in the first digits, at once. No bound holds for any number of steps.
    """
    return (
        0.0 if reproducibility == "bitwise" else float(torch.finfo(FORMATS[precision]).eps ** 0.5)
    )


class JsonLines:
    """One JSON object a line, durable line by line; the "step" of each is larger than the last."""

    def __init__(self, path: Path):
        self.path = path
        # Unbuffered: what a full disk refused must not be written again, or fail again, at close.
        self._file = path.open("a+b", buffering=0)
        flush(path.parent)
        self.last_step = self._repair()

    def _repair(self) -> int:
        """Cut off the line that a killed run wrote half; return the last whole line's step or 0."""
        self._file.seek(0)
        data = self._file.read()
        lines = data[: data.rfind(b"\n") + 1].splitlines(keepends=True)
        while lines and _row(lines[-1]) is None:
            lines.pop()
        self._file.truncate(sum(map(len, lines)))
        last = _row(lines[-1]) if lines else None
        return last["step"] if last else 0

    def append(self, row: Mapping[str, Any]) -> None:
        line = to_json(row).encode() + b"\n"
        with named(self.path):
            while line:
                line = line[self._file.write(line) :]
            # A row must not be lost once a later checkpoint is on disk: it would never be run
            # again.
            os.fsync(self._file.fileno())
        self.last_step = row["step"]

    def close(self) -> None:
        self._file.close()


class Replay:
    """Compares the rows of steps that are computed again with those that a file holds of them.

    What differs is told to `say`: the first difference, and at the end a count. Both are in
    `replay.json`, beside the file, too. `rounding` is what the function of that name gives.
    """

    def __init__(self, lines: JsonLines, rounding: float, say: Callable[[str], None]) -> None:
        self.last_step = lines.last_step
        self._path, self._rounding, self._say = lines.path, rounding, say
        self._rows = _rows(lines.path)
        self._logged: dict[str, Any] = {"step": 0}
        self._counts = {"equal": 0, "equal but for rounding": 0, "different": 0, "missing": 0}
        self._first_difference: dict[str, Any] | None = None

    def check(self, row: Mapping[str, Any]) -> None:
        """Compare one row; they come with increasing steps, up to `last_step`."""
        new = json.loads(to_json(row))
        while self._logged["step"] < new["step"]:
            self._logged = next(self._rows)
        self._counts[self._compare(new)] += 1
        if new["step"] == self.last_step:
            self.finish()

    def finish(self) -> None:
        """Say and record what the comparison came to, if there was any."""
        if any(self._counts.values()):
            counts = ", ".join(f"{count} {kind}" for kind, count in self._counts.items() if count)
            self._say(f"rows of metrics.jsonl that were computed again: {counts}")
            self._record()
            self._counts = dict.fromkeys(self._counts, 0)

    def _compare(self, new: Mapping[str, Any]) -> str:
        if self._logged["step"] != new["step"]:
            return "missing"  # log_every has changed, or someone deleted the line
        kind = "equal"
        # A key that only one row has is no difference: eval_every may have changed.
        for key in [key for key in new if key in self._logged and not key.endswith(MEASURED)]:
            if _differ(self._logged[key], new[key]):
                if _differ(self._logged[key], new[key], self._rounding):
                    self._tell(new["step"], key, self._logged[key], new[key])
                    return "different"
                kind = "equal but for rounding"
        return kind

    def _tell(self, step: int, key: str, logged: Any, now: Any) -> None:
        if self._first_difference:
            return
        self._first_difference = {"step": step, "key": key, "logged": logged, "now": now}
        grown = ", or rounding has grown since the checkpoint" if self._rounding else ""
        self._say(
            f"warning: step {step} came out differently when it was computed before: {key} was "
            f"{to_json(logged)} and is {to_json(now)}. Code, data or a library has changed{grown}; "
            "metrics.jsonl keeps the rows that it has"
        )
        self._record()

    def _record(self) -> None:
        report = {"rows": self._counts, "first_difference": self._first_difference}
        write_atomically(self._path.with_name("replay.json"), to_json(report, indent=2) + "\n")


def _differ(old: Any, new: Any, rounding: float = 0.0) -> bool:
    """NaN is null in the file, and equal to itself. Near 0, rounding is that of the terms that
    cancel each other there, which are of the order of 1."""
    if old is None or new is None:
        return old is not new
    return not math.isclose(old, new, rel_tol=rounding, abs_tol=rounding**2)


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        yield from filter(None, map(_row, file))


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row: dict[str, Any] = json.loads(line)
        return row | {"step": int(row["step"])}
    except (ValueError, KeyError, TypeError):
        return None
