"""`accelerate launch` for schedulers: it passes signals on and returns the script's own exit code.

    python -m evenstep.launch --config_file accelerate_configs/cpu_2.yaml train.py

Takes what `accelerate launch` takes. The exit code is 0 for a finished run; 75 for one that stopped
with a checkpoint, or before it had begun: the same command goes on; 2 for what the user has to
mend; 1 for a failure; 128 + n for a process that signal n killed. `accelerate launch` alone returns
1 or 143 for all of these but 0, does not wait until a checkpoint is written, and dies of SIGUSR1.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from argparse import Namespace
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType

from evenstep.stop import STOPPED

import psutil

_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


def main(argv: Sequence[str]) -> int:
    """Launch; returns the exit code. `argv` are the arguments of `accelerate launch`."""
    for number in _PASSED_ON:
        signal.signal(number, _pass_on)
    # torchrun would end its processes on SIGTERM and SIGINT, and kill what still saves after 30 s.
    # Here they end by themselves; what it reads from PET_... is its command line.
    os.environ.setdefault("PET_SIGNALS_TO_HANDLE", "SIGHUP,SIGQUIT")
    from evenstep.program import USAGE_ERROR

    from accelerate.commands import launch
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    launch.simple_launcher = _launch_one
    launch.tpu_launcher = _launch_on_tpu
    args = launch.launch_command_parser().parse_args(argv)
    args.quiet = False  # it would hide the exit code
    try:
        launch.launch_command(args)
    except subprocess.CalledProcessError as error:
        return _exit_code(error.returncode)
    except ChildFailedError as error:
        _, first = error.get_first_failure()
        return _exit_code(first.exitcode)
    except (ValueError, OSError, ImportError) as error:  # a launch that cannot be
        print(f"error: {error}", file=sys.stderr)
        return USAGE_ERROR
    return 0


_received: set[int] = set()


def _pass_on(number: int, frame: FrameType | None) -> None:
    """To the training processes, which stop after their step; without any there is nothing to save.

    A scheduler, or Ctrl-C, may have told them too: training ignores the same request again.
    """
    _received.add(number)
    children = psutil.Process().children()
    if not children:
        raise SystemExit(STOPPED)
    for child in children:
        with suppress(psutil.NoSuchProcess):
            child.send_signal(number)


def _exit_code(code: int) -> int:
    """A negative code names the signal that killed; one we passed on came before training began."""
    if code >= 0:
        return code
    return STOPPED if -code in _received else 128 - code


def _launch_one(args: Namespace) -> None:
    """In place of Accelerate's launcher, which from 1.16 on takes SIGTERM itself, and kills what
    has not ended 5 seconds later."""
    from accelerate.utils.launch import prepare_simple_launcher_cmd_env

    command, environment = prepare_simple_launcher_cmd_env(args)
    subprocess.run(command, env=environment, check=True)


def _launch_on_tpu(args: Namespace) -> None:
    """In place of Accelerate's launcher, which imports the script and calls its `main` in a thread,
    without arguments: there signals cannot be handled, and its return value is lost."""
    from importlib.util import find_spec

    if find_spec("torch_xla") is None:
        raise ImportError(
            "this hardware file is for a TPU, and torch_xla is not installed: on a TPU machine "
            "`pip install torch_xla[tpu]`. It cannot be rehearsed elsewhere, since XLA compiles "
            "other kernels: use accelerate_configs/cpu.yaml"
        )
    _launch_one(args)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    finally:
        # Python puts the default handlers back while it ends: a repeated signal would kill it then.
        for number in _PASSED_ON:
            signal.signal(number, signal.SIG_IGN)
