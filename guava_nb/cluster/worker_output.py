"""What workers printed, on the orchestrator's side: the last lines in memory, everything in one file per worker."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path

from guava_nb.config.state_folder import make_private_folder
from guava_nb.protocol.shown_text import shown_text

__all__ = ["OutputLog"]

log = logging.getLogger(__name__)

#: Lines kept in memory per worker; the file has all that arrived.
KEPT_LINES = 2000
#: Characters kept in memory per worker, and workers whose lines are kept: those that printed last.
KEPT_CHARS, KEPT_WORKERS = 1 << 20, 64
#: Characters of a line that are kept: a worker may print megabytes without an end of line.
MAX_LINE = 4000
#: A worker's file stops growing here, so that a loop of prints cannot fill the disk.
MAX_FILE_BYTES = 64 << 20


class OutputLog:
    """Lines by worker, each with the second it came.

    Args:
        folder: where the files go; made when the first line comes. None keeps lines in memory only.
    """

    def __init__(self, folder: Path | None) -> None:
        """Start empty."""
        self.folder = folder
        self._lines: dict[str, deque[str]] = {}
        self._counts: dict[str, int] = {}  # lines that came, by worker
        self._file_bytes: dict[str, int] = {}
        self._lock = threading.Lock()

    def add(self, worker: str, stream: str, lines: Iterable[str], dropped: int = 0) -> None:
        """Take lines of a worker; `dropped` were left out there by the rate limit."""
        marked = [line if stream == "stdout" else f"[{stream}] {line}" for line in lines]
        if dropped:
            marked.append(f"[{dropped} lines left out here; the worker's own log file has them]")
        self._store(worker, marked)

    def add_tail(self, worker: str, tail: Sequence[str]) -> None:
        """Take the last lines of a dead worker, leaving out those that had already come."""
        with self._lock:
            known = set(list(self._lines.get(worker, ()))[-len(tail) :]) if tail else set()
        self._store(worker, [line for line in tail if line not in known and f"[stderr] {line}" not in known])

    def _store(self, worker: str, lines: list[str]) -> None:
        count = len(lines)
        lines = list(map(_cut, lines[-KEPT_LINES:]))
        with self._lock:
            kept = self._lines.pop(worker, None) or deque(maxlen=KEPT_LINES)
            self._lines[worker] = kept
            self._counts[worker] = self._counts.get(worker, 0) + count
            kept.extend(lines)
            excess = sum(map(len, kept)) - KEPT_CHARS
            while excess > 0:
                excess -= len(kept.popleft())
            while len(self._lines) > KEPT_WORKERS:
                del self._lines[next(iter(self._lines))]
            self._write(worker, lines)

    def _write(self, worker: str, lines: list[str]) -> None:
        if self.folder is None or not lines or self._file_bytes.get(worker, 0) > MAX_FILE_BYTES:
            return
        stamp = time.strftime("%H:%M:%S")
        text = "".join(f"{stamp} {line}\n" for line in lines)
        try:
            make_private_folder(self.folder)
            with self.path(worker).open("a", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:  # a full disk must not end the session; the last lines are in memory
            log.warning("the output of workers is not kept on disk any more: %s", error)
            self.folder = None
            return
        self._file_bytes[worker] = self._file_bytes.get(worker, 0) + len(text)

    def path(self, worker: str) -> Path:
        """Return the file that holds a worker's output."""
        safe = "".join(c if c.isalnum() or c in "-_." else "_" for c in worker)
        return (self.folder or Path()) / f"{safe}.log"

    def count(self, worker: str) -> int:
        """Return how many lines of a worker have come."""
        with self._lock:
            return self._counts.get(worker, 0)

    def since(self, worker: str, count: int) -> tuple[list[str], int]:
        """Return a worker's lines after the first `count`, as far as they are kept, and how many have come now."""
        with self._lock:
            now, kept = self._counts.get(worker, 0), list(self._lines.get(worker, ()))
        new = now - count
        lines = kept[-new:] if new else []
        lacking = new - len(lines)
        return ([f"[{lacking} lines left out here; %guava_log has the last ones]"] if lacking else []) + lines, now

    def tail(self, worker: str | None = None, n: int = 50) -> list[str]:
        """Return the last `n` lines of one worker, or of all with their names in front."""
        with self._lock:
            if worker is not None:
                return list(self._lines.get(worker, ()))[-n:]
            return [f"{name} | {line}" for name, lines in self._lines.items() for line in list(lines)[-n:]]


def _cut(line: str) -> str:
    more = len(line) - MAX_LINE
    shown = shown_text(line[:MAX_LINE], coloured=True)
    return shown if more <= 0 else f"{shown} [{more} characters more]"
