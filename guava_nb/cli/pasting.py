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
import time
from collections.abc import Callable

__all__ = ["PastedLines"]

LOOK_S = 0.25
#: A join code has some 150 characters; what has more without an end of line is none.
LONGEST_BYTES = 4096


class PastedLines:
    """What comes on standard input, from the first `take` on.

    Args:
        is_kept: asked about each line as it comes, from a thread; False: it was obeyed, and is not given on.
        on_end: called when the input ends.
    """

    def __init__(
        self, is_kept: Callable[[str], bool] = lambda line: True, on_end: Callable[[], None] = lambda: None
    ) -> None:
        self._is_kept, self._on_end = is_kept, on_end
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def first(self, limit_s: float) -> str:
        """The first line; "" where the input ends before it, or none comes within `limit_s`."""
        thread, until = self._begin(), time.monotonic() + limit_s
        while self._lines.empty() and thread.is_alive() and time.monotonic() < until:
            thread.join(LOOK_S / 5)
        return "" if self._lines.empty() else self._lines.get()

    def take(self) -> list[str]:
        """Lines since the last call; never waits. Empty where there is no standard input."""
        self._begin()
        found = []
        while not self._lines.empty():
            found.append(self._lines.get())
        return found

    def _begin(self) -> threading.Thread:
        if self._thread is None:
            self._thread = threading.Thread(target=self._read, name="guava-stdin", daemon=True)
            self._thread.start()
        return self._thread

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
                self._on_end()
                return
            *lines, held = (held + data).split(b"\n")
            held = held[-LONGEST_BYTES:]
            for line in (data.decode("utf-8", "replace") for data in lines):
                if self._is_kept(line):
                    self._lines.put(line)


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
