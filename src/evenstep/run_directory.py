"""The run directory: one for all processes, one live run in it, every file written whole."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import sys
import time
import traceback
import warnings
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from evenstep.checkpoint_files import checkpoints
from evenstep.files import flush, to_json, write_atomically
from evenstep.masking import mask
from evenstep.processes import is_main, on_main

Status = Literal["finished", "stopped", "failed"]


class Progress(Protocol):
    """What a summary tells of a run, wherever it ends."""

    step: int
    seconds: float
    metrics: dict[str, Any]
    best: dict[str, Any] | None
    stopped_early: str | None


@dataclass(frozen=True)
class RunDirectory:
    """`<output_dir>/<name>/` of one live run; a context manager that releases it at the end."""

    path: Path
    saved_config: str | None
    """The text of `config.yaml` when this run goes on, None when it is new."""

    finished: bool
    """The run that goes on is finished already."""

    lock: int | None
    """Descriptor of the lock file, on the main process: the one that writes. Else None."""

    @property
    def is_main(self) -> bool:
        return self.lock is not None

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        if self.lock is not None:
            os.close(self.lock)

    def write_summary(
        self,
        status: Status,
        state: Progress,
        *,
        weights_sha256: str | None = None,
        cause: BaseException | None = None,
    ) -> dict[str, Any]:
        """Write `summary.json` and return what it holds; `cause` is what ended a failed run.

        The main process writes it. A failure is written by the process that fails first, since it
        knows the cause: the others only lose their connection.
        """
        summary: dict[str, Any] = {
            "status": status,
            "step": state.step,
            "metrics": state.metrics,
            "best": state.best,
            "stopped_early": state.stopped_early,
            "seconds": state.seconds,
            "weights_sha256": weights_sha256,
        }
        if cause is not None:
            summary["cause"] = mask("".join(traceback.format_exception_only(cause)).strip())
        file = self.path / "summary.json"
        if self.is_main if status != "failed" else not file.exists():
            write_atomically(file, to_json(summary, indent=2) + "\n")
        return summary

    def record_failure(
        self,
        state: Progress,
        kind: type[BaseException] | None,
        error: BaseException | None,
        _: object,
    ) -> None:
        """An exit callback: writes the summary of a run that an exception ends."""
        if error is None:
            return
        is_first = not (self.path / "summary.json").exists()
        with suppress(OSError):  # which would hide the error that is on its way
            self.write_summary("failed", state, cause=error)
        if is_first and not self.is_main and isinstance(error, ValueError):
            # The program leaves those to the main process, which may not have had this one.
            print(f"error: {mask(str(error))}", file=sys.stderr, flush=True)


def create(
    output_dir: Path, name: str | None, stem: str, resume: str, config_text: str
) -> RunDirectory:
    """The run directory `<output_dir>/<name>`, the same on every process.

    Without a name it is `<stem>-<YYYYmmdd-HHMMSS>`, always new. A new directory gets
    `config_text` (no secrets in it) as `config.yaml`. With `resume` "never" a directory that
    exists is refused; with "auto", or with the path of a checkpoint, its run goes on; one that has
    not trained yet starts anew.

    Raises ValueError, on every process, for a directory that is refused or in use by a live run.
    """
    run = on_main(lambda: _claim(output_dir, name, stem, resume, config_text))
    return run if is_main() else replace(run, lock=None)


def _claim(
    output_dir: Path, name: str | None, stem: str, resume: str, config_text: str
) -> RunDirectory:
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        path = _make_new(output_dir, stem) if name is None else _make(output_dir, name, resume)
        lock = _lock(path)
    except OSError as error:
        raise ValueError(
            f"the run directory cannot be made, or written to: {error}; see output_dir and name"
        ) from error
    saved, summary = path / "config.yaml", path / "summary.json"
    goes_on = saved.exists() and _has_trained(path)
    # The path of a checkpoint goes back to it, also in a finished run.
    finished = goes_on and resume == "auto" and _status(summary) == "finished"
    if not finished:
        summary.unlink(missing_ok=True)  # of a launch that ended early: this one writes its own
    if not goes_on:
        write_atomically(saved, config_text)
        return RunDirectory(path, None, False, lock)
    return RunDirectory(path, saved.read_text(encoding="utf-8"), finished, lock)


def _has_trained(path: Path) -> bool:
    """Whether a launch has left anything that a run config decides. One that was refused, for an
    unknown layer to freeze or a package that is missing, has not: it may go on with another."""
    rows = path / "metrics.jsonl"
    return bool(checkpoints(path)) or (rows.exists() and rows.stat().st_size > 0)


def _status(summary: Path) -> str | None:
    try:
        status: str = json.loads(summary.read_text(encoding="utf-8"))["status"]
    except (OSError, ValueError, KeyError, TypeError):
        return None  # missing, or damaged: then it is not known to be finished
    return status


def _make(output_dir: Path, name: str, resume: str) -> Path:
    if name in ("", "..") or Path(name).name != name:
        raise ValueError(f"name {name!r} is no plain directory name: leave out / and ..")
    path = output_dir / name
    if resume == "never" and path.exists():
        raise ValueError(
            f"{path} exists, and resume: never starts only new runs; give this run another name, "
            "remove the directory, or set resume=auto to go on"
        )
    path.mkdir(exist_ok=True)
    flush(output_dir)
    return path


def _make_new(output_dir: Path, stem: str) -> Path:
    """mkdir decides between two launches in the same second: the later one gets a number."""
    base, number = f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}", 1
    while True:
        path = output_dir / (base if number == 1 else f"{base}-{number}")
        try:
            path.mkdir()
            flush(output_dir)
            return path
        except FileExistsError:
            number += 1


def _lock(path: Path) -> int:
    """Lock the directory for the life of this process; kill -9 releases it too.

    lockf, not flock: workers forked from this process would inherit a flock and keep it for
    seconds after the process was killed.
    """
    lock = os.open(path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        holder = os.read(lock, 200).decode()
        os.close(lock)
        raise ValueError(
            f"{path} is in use by {holder}: a run directory has one live run; wait for it or stop "
            "it, or give this run another name with name=..."
        ) from None
    except OSError as error:
        warnings.warn(f"{path} cannot be locked ({error}): start one run at a time", stacklevel=2)
    os.truncate(lock, 0)
    os.write(lock, f"process {os.getpid()} on {platform.node()}".encode())
    return lock
