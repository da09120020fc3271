"""Between the command line and `main`: help, logging, and how a program ends that cannot go on."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from evenstep.config_help import help_text
from evenstep.masking import mask

USAGE_ERROR = 2
_OWN = Path(__file__).parent


def run_program(main: Callable[[Sequence[str]], int], argv: Sequence[str]) -> int:
    """The exit code of `main(argv)`, or of printing every key if that is what is asked for.

    A ValueError that evenstep itself raised is the user's to mend, and is printed once for all
    processes; anything else is a fault, printed with its traceback, secrets masked. `sys.exit` is
    no success.
    """
    is_main = os.environ.get("RANK", "0") == "0"
    logging.basicConfig(format="%(message)s")
    logging.getLogger("evenstep").setLevel(logging.INFO if is_main else logging.WARNING)
    try:
        if {"-h", "--help"} & {*argv}:
            print(help_text(argv))
            return 0
        return main(argv)
    except Exception as error:
        if not _is_ours(error):
            print(mask(traceback.format_exc()), file=sys.stderr, flush=True)
            return 1
        if is_main:
            print(f"error: {mask(str(error))}", file=sys.stderr, flush=True)
        return USAGE_ERROR
    except SystemExit as error:
        print(f"error: the program called sys.exit({error.code!r})", file=sys.stderr, flush=True)
        return 1


def _is_ours(error: Exception) -> bool:
    """Whether it is a ValueError, and the frame that raised it is evenstep's."""
    if not isinstance(error, ValueError):
        return False
    frames = traceback.extract_tb(error.__traceback__)
    return Path(frames[-1].filename).is_relative_to(_OWN)
