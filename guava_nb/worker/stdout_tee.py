"""Worker output on its way to the orchestrator: whole lines, capped in length and rate; the original stream gets everything."""

from __future__ import annotations

import contextlib
import io
import threading
import time
from collections.abc import Callable
from typing import TextIO

from guava_nb.processes.pipe import MAX_LINE_CHARS
from guava_nb.worker.error_text import sendable

__all__ = ["LineTee"]

#: Lines per second that may be sent on average, and in one burst.
RATE_PER_S = 50.0
BURST = 400.0

Emit = Callable[[str, tuple[str, ...], int], None]


class LineTee(io.TextIOBase):
    """A text stream that writes through and hands each finished line to `emit(stream, lines, dropped)`.

    A carriage return starts the line anew, so a progress bar counts as its last state and only once it is finished.
    """

    def __init__(self, original: TextIO, stream: str, emit: Emit, clock: Callable[[], float] = time.monotonic) -> None:
        """Wrap `original`, named "stdout" or "stderr" in what is sent."""
        super().__init__()
        self._original = original
        self._stream = stream
        self._emit = emit
        self._clock = clock
        self._pending = ""
        self._budget = BURST
        self._then = clock()
        self._dropped = 0
        self._lock = threading.RLock()
        self._busy = False

    def write(self, text: str) -> int:
        """Write through; send the lines that are now complete."""
        with contextlib.suppress(OSError):  # its reader is gone: nothing that the user's code should have to handle
            self._original.write(text)
        with self._lock:
            *lines, self._pending = (self._pending + text).split("\n")
            self._pending = self._pending[-4 * MAX_LINE_CHARS :]
            if lines:
                self._send([line.rstrip("\r").rsplit("\r", 1)[-1][:MAX_LINE_CHARS] for line in lines])
        return len(text)

    def _send(self, lines: list[str]) -> None:
        if self._busy:
            return  # sending itself printed something: it must not feed on its own output
        now = self._clock()
        self._budget = min(BURST, self._budget + RATE_PER_S * (now - self._then))
        self._then = now
        allowed = lines[: int(self._budget)]
        self._budget -= len(allowed)
        self._dropped += len(lines) - len(allowed)
        if not allowed:
            return
        dropped = self._dropped if len(allowed) == len(lines) else 0
        self._busy = True
        try:
            self._emit(self._stream, tuple(map(sendable, allowed)), dropped)
        finally:
            self._busy = False
        self._dropped -= dropped

    def finish(self) -> None:
        """Send what is left: a last line without its end, and the count of lines left out."""
        with self._lock:
            rest, self._pending = self._pending, ""
            if rest or self._dropped:
                self._budget = max(self._budget, 1.0)
                self._send([rest.rsplit("\r", 1)[-1][:MAX_LINE_CHARS]])

    def flush(self) -> None:
        """Flush the original stream."""
        with contextlib.suppress(OSError):
            self._original.flush()

    def isatty(self) -> bool:
        """A tee is never a terminal: bars then print whole lines."""
        return False

    def fileno(self) -> int:
        """The original's descriptor, for libraries that write below Python."""
        return self._original.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The original's encoding."""
        return self._original.encoding or "utf-8"

    def writable(self) -> bool:
        """Always."""
        return True
