"""What processes do together: it succeeds on all of them, or fails on all of them.

A process that raised alone would leave the others waiting in their next collective. `group` is the
torch.distributed.ProcessGroup to talk over, of all processes; None is the default one. A thread
needs one of its own, or its messages would mix with those of the training.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


def is_main() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def on_main(action: Callable[[], T], group: Any = None) -> T:
    """What `action` returns, or raises, on the main process: on every process."""
    if not dist.is_initialized():
        return action()
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = action()
        except Exception as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome, src=0, group=group)
    if outcome[1] is not None:
        raise outcome[1]
    result: T = outcome[0]
    return result


def together(action: Callable[[], T], group: Any = None) -> T:
    """What `action` returns on this process; RuntimeError on all if it raised on another one."""
    if not dist.is_initialized():
        return action()
    failure: Exception | None = None
    try:
        result = action()
    except Exception as error:
        failure = error
    failures: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, failure and repr(failure), group=group)
    if failure:
        raise failure
    if any(failures):
        named = (f"process {rank}: {text}" for rank, text in enumerate(failures) if text)
        raise RuntimeError("; ".join(named))
    return result


def let_threads_finish() -> None:
    """To be called at exit. The threads of gloo drop what they hold of the last collectives, Python
    objects among it, after these have returned; one that does so while the interpreter shuts down
    aborts the process (exit code -6).
    """
    time.sleep(0.2)  # gives them the interpreter; there is nothing to wait for
