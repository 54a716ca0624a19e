"""Text for a terminal: tables, and programs whose output may be closed early."""

import os
import signal
import sys
from collections.abc import Callable, Sequence


def columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """The lines of a table, its cells padded to the width of their column."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]
    return ["  ".join(row).rstrip() for row in padded]


def until_closed(run: Callable[[], int]) -> int:
    """The exit code of ``run``; that of a closed pipe, without an error, if the pipe is closed.

    An example is ``optzoo list | head``.
    """
    try:
        try:
            return run()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes once more when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + getattr(signal, "SIGPIPE", 13)
