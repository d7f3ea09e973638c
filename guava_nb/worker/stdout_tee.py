"""Worker output on its way to the orchestrator: whole lines, capped in length and rate; the original stream gets everything."""

from __future__ import annotations

import codecs
import contextlib
import io
import threading
import time
from collections.abc import Callable
from typing import Any, TextIO

from guava_nb.processes.pipe import MAX_LINE_CHARS
from guava_nb.worker.error_text import sendable

__all__ = ["LineTee"]

#: Lines per second that may be sent on average, and in one burst.
RATE_PER_S = 50.0
BURST = 400.0

#: Characters of one call that are looked at for lines to send, and those of a line's beginning that are kept.
_MOST_CHARS, _MOST_HELD = 1 << 20, 4 * MAX_LINE_CHARS

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
        self._bytes = LineTeeBytes(self)

    def write(self, text: str) -> int:
        """Write through; send the lines that are now complete."""
        with contextlib.suppress(OSError):  # its reader is gone: nothing that the user's code should have to handle
            self._original.write(text)
        with self._lock:
            end = text.rfind("\n")
            if end >= 0:
                self._send(self._pending + text[: min(end, _MOST_CHARS)], text.count("\n", _MOST_CHARS, end))
                self._pending = ""
            self._hold(text[max(end + 1, len(text) - _MOST_HELD) :])
        return len(text)

    def _hold(self, text: str) -> None:
        """Keep the beginning of a line; what a carriage return starts anew is forgotten."""
        pending = self._pending + text
        self._pending = pending[pending.rstrip("\r").rfind("\r") + 1 :][-_MOST_HELD:]

    def _send(self, text: str, more: int = 0) -> None:
        """Send lines, as far as the rate allows, without the last one's end; `more` lines came that are not looked at."""
        if self._busy:
            return  # sending itself printed something: it must not feed on its own output
        now = self._clock()
        self._budget = min(BURST, self._budget + RATE_PER_S * (now - self._then))
        self._then = now
        num_allowed = int(self._budget)
        if not num_allowed:
            self._dropped += text.count("\n") + 1 + more
            return
        lines = text.split("\n", num_allowed)
        more += lines.pop().count("\n") + 1 if len(lines) > num_allowed else 0
        self._budget -= len(lines)
        self._dropped += more
        dropped = 0 if more else self._dropped
        self._busy = True
        try:
            self._emit(self._stream, tuple(sendable(_shown(line)) for line in lines), dropped)
        finally:
            self._busy = False
        self._dropped -= dropped

    def finish(self) -> None:
        """Send what is left: a last line without its end, and the count of lines left out.

        What is printed afterwards belongs to something else: a flood before it must not keep its first lines back.
        """
        with self._lock:
            rest, self._pending = self._pending, ""
            if rest or self._dropped:
                self._budget = max(self._budget, 1.0)
                self._send(rest)
            self._budget = max(self._budget, RATE_PER_S)

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
    def buffer(self) -> LineTeeBytes:
        """The same stream for bytes, as `sys.stdout` has one."""
        return self._bytes

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The original's encoding."""
        return self._original.encoding or "utf-8"

    def writable(self) -> bool:
        """Always."""
        return True


class LineTeeBytes(io.BufferedIOBase):
    """The bytes of a `LineTee`: what is written is UTF-8, and may end within a character."""

    def __init__(self, tee: LineTee) -> None:
        """Write to that tee."""
        super().__init__()
        self._tee = tee
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def write(self, data: Any) -> int:
        """Write bytes through; returns how many."""
        self._tee.write(self._decoder.decode(bytes(data)))
        return memoryview(data).nbytes

    def flush(self) -> None:
        """Flush the tee."""
        self._tee.flush()

    def fileno(self) -> int:
        """The original's descriptor."""
        return self._tee.fileno()

    def writable(self) -> bool:
        """Always."""
        return True


def _shown(line: str) -> str:
    return line.rstrip("\r").rsplit("\r", 1)[-1][:MAX_LINE_CHARS]
