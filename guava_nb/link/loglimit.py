"""At most so many log lines in so many seconds: a flood of strangers must not become a flood of lines."""

from __future__ import annotations

import logging
import threading
import time

__all__ = ["LogLimit"]


class LogLimit:
    """Passes warnings to a logger, and counts what it leaves out. Thread-safe.

    Args:
        logger: where lines go.
        lines: most lines per window.
        window_s: length of a window, in seconds.
    """

    def __init__(self, logger: logging.Logger, lines: int = 10, window_s: float = 10.0) -> None:
        self._logger, self._lines, self._window_s = logger, lines, window_s
        self._lock = threading.Lock()
        self._began = float("-inf")
        self._written = self._left_out = 0

    def warning(self, text: str, *args: object) -> None:
        """Log a line, or count it; the first line of a new window tells how many were left out."""
        with self._lock:
            now = time.monotonic()
            if now - self._began >= self._window_s:
                left_out, self._began, self._written, self._left_out = self._left_out, now, 0, 0
                if left_out:
                    self._logger.warning("%d more lines like the ones before were left out", left_out)
            self._written += 1
            if self._written > self._lines:
                self._left_out += 1
                return
        self._logger.warning(text, *args)
