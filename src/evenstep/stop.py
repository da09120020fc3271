"""Stopping on request: a signal, a file or the clock asks, and the loop stops after its step.

Exit code 75 (EX_TEMPFAIL of sysexits.h: try again later) is what a scheduler can requeue on.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import FrameType

STOPPED = 75
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_PR_SET_PDEATHSIG = 1
_SECONDS_BETWEEN_LOOKS = 1.0  # at a file that may lie on a slow network disk


class StopRequest:
    """Turns SIGTERM, SIGINT, SIGUSR1, a file `STOP` in the run directory, and the time limit into
    a flag that the loop reads once a step, and adds up over the processes: one is enough.

    A second Ctrl-C ends the process at once. Launchers repeat signals right away, so only one
    that comes two seconds later is a second one.
    """

    def __init__(self) -> None:
        self.reason = ""
        """What asked: "SIGTERM", "time_limit 1:00:00", "the file runs/my-run/STOP"; or nothing."""
        self._launched = time.monotonic()
        self._asked_at = self._looked_at = 0.0
        self._file: Path | None = None
        self._time_limit: timedelta | None = None
        for number in _SIGNALS:
            signal.signal(number, self._handle)
        _follow_launcher()

    def watch(self, directory: Path, *, is_main: bool, time_limit: timedelta | None) -> None:
        """From now on heed the file and the limit too. One process looks, so that one line tells.

        A `STOP` that lies there already counts as well: the run stops after its first step.
        The limit counts from the making of this object, and passes in the middle of some step: a
        scheduler's own limit has to leave time for a step, an evaluation and a save.
        """
        if is_main:
            self._file, self._time_limit = directory / "STOP", time_limit

    @property
    def requested(self) -> bool:
        """Whether this process was asked to stop. A `STOP` file is removed once it is seen, so
        that the same command goes on."""
        if not self.reason:
            self._look(time.monotonic())
        return bool(self.reason)

    def _look(self, now: float) -> None:
        if self._file and now - self._looked_at > _SECONDS_BETWEEN_LOOKS:
            self._looked_at = now
            if self._file.exists():
                self._file.unlink(missing_ok=True)
                self._ask(f"the file {self._file}")
        if self._time_limit and now - self._launched > self._time_limit.total_seconds():
            self._ask(f"time_limit {self._time_limit}")

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self.reason:
            self._ask(signal.Signals(number).name)
        elif number == signal.SIGINT and time.monotonic() - self._asked_at > 2:
            raise KeyboardInterrupt

    def _ask(self, reason: str) -> None:
        self.reason, self._asked_at = reason, time.monotonic()
        if os.environ.get("RANK", "0") == "0":
            # print() is not safe inside a signal handler: it may interrupt another print().
            os.write(2, f"{reason}: stopping after this step, with a checkpoint\n".encode())


def shield_worker(worker_id: int) -> None:
    """`worker_init_fn` of a loader: Ctrl-C and schedulers signal worker processes too, but the
    step that is under way still needs them. A second SIGTERM ends a worker, as at exit."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: signal.signal(signal.SIGTERM, signal.SIG_DFL))


def _follow_launcher() -> None:
    """A launcher that dies of a signal without passing it on (`accelerate launch` with one process,
    or any that is killed) would leave this process behind: ask the kernel for a SIGTERM then."""
    launched = {"ACCELERATE_MIXED_PRECISION", "LOCAL_RANK"} & os.environ.keys()
    if not launched or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    # It died before we could ask; but in a container the launcher itself may be process 1.
    if os.getppid() == 1 and b"python" not in Path("/proc/1/cmdline").read_bytes():
        os.kill(os.getpid(), signal.SIGTERM)
