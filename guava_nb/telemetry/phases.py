"""Time and energy by phase of a step. Pure: intervals and joules in, sums out.

Time is exact: the code that works tells when a phase began and ended. Energy is attributed by time: a sensor gives joules between
two readings, which are often longer than a step, so they are shared out among the phases that fell into them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable

__all__ = ["BACKWARD", "EXCHANGE", "FORWARD", "OTHER", "PHASES", "UPDATE", "WAITING", "PhaseBook"]

FORWARD, BACKWARD, EXCHANGE, UPDATE, WAITING, OTHER = "forward", "backward", "exchange", "update", "waiting", "other"
#: In the order of a step; `WAITING` is for data, `OTHER` is time without a phase.
PHASES = (FORWARD, BACKWARD, EXCHANGE, UPDATE, WAITING, OTHER)

_MOST = 20_000  # intervals that wait for their joules; a sensor that stopped must not fill memory


class PhaseBook:
    """Sums per phase. From any thread; intervals come in order of time and do not overlap."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._intervals: deque[tuple[float, float, str]] = deque(maxlen=_MOST)
        self._pending: deque[tuple[float, float, float]] = deque(maxlen=_MOST)
        self._until = self._seen = float("-inf")
        self._seconds: dict[str, float] = {}
        self._joules: dict[str, float] = {}

    def add(self, phase: str, start_s: float, end_s: float) -> None:
        """A phase lasted from one time to another; one that begins before the last ended is cut there.

        Args:
            phase: one of `PHASES`.
            start_s, end_s: monotonic seconds.
        """
        with self._lock:
            start_s = max(start_s, self._until)
            if end_s <= start_s:
                return
            self._intervals.append((start_s, end_s, phase))
            self._seconds[phase] = self._seconds.get(phase, 0.0) + end_s - start_s
            self._until = end_s

    def measured(self, increments: Iterable[tuple[float, float, float]]) -> None:
        """Take (from, to, joules); those of a phase that is not over yet are kept until it is."""
        with self._lock:
            self._pending.extend(increments)
            self._seen = max((part[1] for part in self._pending), default=self._seen)
            keep: deque[tuple[float, float, float]] = deque(maxlen=_MOST)
            for part in self._pending:
                if part[1] <= self._until:
                    self._share_out(*part)
                else:
                    keep.append(part)
            self._pending = keep
            # The next stretch begins where the newest one ended, and may reach back into a phase that is over.
            oldest = min((part[0] for part in keep), default=self._seen)
            while self._intervals and self._intervals[0][1] <= oldest:
                self._intervals.popleft()

    def totals(self) -> dict[str, tuple[float, float | None]]:
        """Return (seconds, joules) of each phase that occurred, in the order of `PHASES`; joules None where not measured."""
        with self._lock:
            names = [name for name in PHASES if name in self._seconds or name in self._joules]
            measured = bool(self._joules)
            return {
                name: (self._seconds.get(name, 0.0), self._joules.get(name, 0.0) if measured else None)
                for name in names
            }

    def clear(self, at_s: float = float("-inf")) -> None:
        """Begin anew; what lies before a time does not count."""
        with self._lock:
            self._until = at_s
            self._intervals.clear()
            self._pending.clear()
            self._seconds.clear()
            self._joules.clear()

    def _share_out(self, start_s: float, end_s: float, joules: float) -> None:
        left = joules
        for begin, end, phase in self._intervals:
            overlap = min(end_s, end) - max(start_s, begin)
            if overlap > 0:
                part = joules * (overlap / (end_s - start_s))
                self._joules[phase] = self._joules.get(phase, 0.0) + part
                left -= part
            if begin >= end_s:
                break
        if left > 1e-9 * joules + 1e-12:  # rounding leaves less
            self._joules[OTHER] = self._joules.get(OTHER, 0.0) + left
