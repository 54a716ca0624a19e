"""Programs whose output may be closed before they end, as in ``optzoo list | head``."""

import os
import signal
import sys
from collections.abc import Callable


def until_closed(run: Callable[[], int]) -> int:
    """The exit code of ``run``; that of a closed pipe, without an error, if nobody reads on."""
    try:
        try:
            return run()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes once more when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + getattr(signal, "SIGPIPE", 13)
