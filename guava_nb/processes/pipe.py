"""What a worker process and its starter agree on: marks, exit statuses, how an end is told."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["EXIT_AGAIN", "EXIT_LOST", "EXIT_OK", "EXIT_REFUSED", "MARK", "MAX_LINE_CHARS", "NURSERY", "ending_text"]

MARK = "\x1eguava "
#: Exit statuses: the launcher tells them apart from a crash.
EXIT_OK, EXIT_REFUSED, EXIT_LOST = 0, 3, 4
#: The device of the process is lost to it, and another process can use it.
EXIT_AGAIN = 5
#: Argument of a process that forks workers and is none itself.
NURSERY = "nursery"
#: Longest line sent; the rest of it stays in the worker's own log.
MAX_LINE_CHARS = 2000


def ending_text(status: int, tail: Sequence[str]) -> str:
    """Return how a process ended, in words: its exit status or its signal (negative), and the line that says most of it."""
    if status >= 0:
        how = f"exit status {status}"
    else:
        how = f"signal {-status}" + (" (killed; often by the system for lack of memory)" if status == -9 else "")
    return how + (f"; last line: {last}" if (last := _telling_line(tail)) else "; it printed nothing")


def _telling_line(tail: Sequence[str]) -> str:
    """Return the line that says most of why a process ended; "" when it printed nothing.

    That is its last one, but after a crash below Python the last one is a list of extension modules.
    """
    fatal = [index for index, line in enumerate(tail) if line.startswith("Fatal Python error")]
    if fatal:
        cell = next((line.strip() for line in tail[fatal[-1] :] if line.strip().startswith('File "<cell')), "")
        return tail[fatal[-1]] + (f" at {cell}" if cell else "")
    return next((line for line in reversed(tail) if line.strip()), "")
