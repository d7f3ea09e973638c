"""Lines that a person pastes, or a program writes, on standard input while a command goes on with something else.

Read by a thread straight from the descriptor: a thread that blocks in `sys.stdin` at the process's end would hold the
lock that the interpreter then wants. Nothing is echoed here; a terminal shows what is typed into it, as always.
"""

from __future__ import annotations

import os
import queue
import select
import sys
import threading

__all__ = ["PastedLines"]

LOOK_S = 0.25
#: A join code has some 150 characters; what has more without an end of line is none.
LONGEST_BYTES = 4096


class PastedLines:
    """What comes on standard input, from the first `take` on."""

    def __init__(self) -> None:
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def take(self) -> list[str]:
        """Lines since the last call; never waits. Empty where there is no standard input."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._read, name="guava-stdin", daemon=True)
            self._thread.start()
        found = []
        while not self._lines.empty():
            found.append(self._lines.get())
        return found

    def close(self) -> None:
        """Read no more. On Windows a read that is under way ends with the process."""
        self._ended.set()

    def _read(self) -> None:
        try:
            number = sys.stdin.fileno()
        except (AttributeError, OSError, ValueError):
            return  # none at all, as under pythonw
        held = b""
        while not self._ended.is_set():
            try:
                if not _ready(number):
                    continue
                data = os.read(number, LONGEST_BYTES)
            except (OSError, ValueError):
                return
            if not data:
                return
            *lines, held = (held + data).split(b"\n")
            held = held[-LONGEST_BYTES:]
            for line in lines:
                self._lines.put(line.decode("utf-8", "replace"))


def _ready(number: int) -> bool:
    """Whether to read now; waits a moment. Who reads from a terminal in the background would be stopped by it."""
    if os.name == "nt":
        return True
    ready, _, _ = select.select([number], [], [], LOOK_S)
    if not ready:
        return False
    if os.isatty(number) and os.tcgetpgrp(number) != os.getpgrp():
        threading.Event().wait(LOOK_S)
        return False
    return True
