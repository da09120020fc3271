"""How a program ends that was given something it cannot use: one line, not a traceback."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from evenstep.masking import mask

USAGE_ERROR = 2
_OWN = Path(__file__).parent


def run_program(main: Callable[[Sequence[str]], int]) -> int:
    """The exit code of `main` called with the command line.

    A ValueError that evenstep itself raised is the user's to mend, and is printed once for all
    processes; anything else is a fault, printed with its traceback. `sys.exit` is no success.
    """
    try:
        return main(sys.argv[1:])
    except ValueError as error:
        if not _is_ours(error):
            raise
        if os.environ.get("RANK", "0") == "0":
            print(f"error: {mask(str(error))}", file=sys.stderr, flush=True)
        return USAGE_ERROR
    except SystemExit as error:
        print(f"error: the program called sys.exit({error.code!r})", file=sys.stderr, flush=True)
        return 1


def _is_ours(error: ValueError) -> bool:
    """Whether the frame that raised it is evenstep's."""
    frames = traceback.extract_tb(error.__traceback__)
    return Path(frames[-1].filename).is_relative_to(_OWN)
