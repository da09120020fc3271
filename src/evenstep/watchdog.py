"""A process that hangs shows where: all stacks are written before the others' patience ends.

When one process stops making progress, the others wait for it in a collective, and their timeout
ends the run without a word on what the first one was doing.
"""

from __future__ import annotations

import faulthandler
import os
import platform
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

_PATIENCE = 0.8  # of the timeout, so that the stacks are on disk when it ends the run
_LOOKS = 20  # in that time


class Watchdog:
    """Within its `with` block, writes the stacks of all threads of this process into
    `<directory>/stacks/rank-<rank>.txt` once `alive` was not called for 80% of `timeout`.

    A false alarm changes nothing: the process goes on, and is watched on. `alive` only notes the
    time (0.1 us); a thread looks at it now and then.
    """

    def __init__(self, directory: Path, rank: int, timeout: timedelta) -> None:
        self.file = directory / "stacks" / f"rank-{rank}.txt"
        self._who = f"rank {rank}, process {os.getpid()} on {platform.node()}"
        self._patience = _PATIENCE * timeout.total_seconds()
        self._step, self._seen = 0, time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def alive(self, step: int | None = None) -> None:
        """A sign of life: after each step, with its number; and at what may take long besides."""
        self._seen = time.monotonic()
        if step is not None:
            self._step = step

    def __enter__(self) -> Watchdog:
        self.alive()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        reported = None
        while not self._ended.wait(self._patience / _LOOKS):
            # Native code that hangs and holds the GIL stops this thread too. Faulthandler's own
            # needs no GIL: unless it is put off again, it writes to stderr.
            faulthandler.dump_traceback_later(self._patience, file=sys.__stderr__ or 2)
            seen = self._seen
            if seen != reported and time.monotonic() - seen > self._patience:
                self._report(time.monotonic() - seen)
                reported = seen

    def _report(self, seconds: float) -> None:
        self.file.parent.mkdir(exist_ok=True)
        with self.file.open("a", encoding="utf-8") as file:
            when = time.strftime("%Y-%m-%d %H:%M:%S")
            file.write(
                f"{when}, {self._who}: nothing for {seconds:.0f} s after step {self._step}\n"
            )
            file.flush()  # faulthandler writes to the descriptor
            faulthandler.dump_traceback(file, all_threads=True)
        line = f"{self._who} hangs after step {self._step}: its stacks are in {self.file}\n"
        os.write(2, line.encode())  # print() could wait for a lock of the thread that hangs
