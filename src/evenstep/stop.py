"""Stopping on request: a signal asks, and the loop stops at the end of a step.

Exit code 75 (EX_TEMPFAIL of sysexits.h: try again later) is what a scheduler can requeue on.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from types import FrameType

STOPPED = 75
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_PR_SET_PDEATHSIG = 1


class StopRequest:
    """Turns SIGTERM, SIGINT and SIGUSR1 into a flag that the loop reads once a step.

    A second Ctrl-C ends the process at once. Launchers repeat signals right away, so only one
    that comes two seconds later is a second one.
    """

    def __init__(self) -> None:
        self.requested = False
        self._since = 0.0
        for number in _SIGNALS:
            signal.signal(number, self._handle)
        _follow_launcher()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            if number == signal.SIGINT and time.monotonic() - self._since > 2:
                raise KeyboardInterrupt
            return
        self.requested, self._since = True, time.monotonic()
        # print() is not safe inside a signal handler: it may interrupt another print().
        name = signal.Signals(number).name
        os.write(2, f"{name}: stopping after this step, with a checkpoint\n".encode())


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
    if os.getppid() == 1:  # it died before we could ask
        os.kill(os.getpid(), signal.SIGTERM)
