"""How fast bytes really move one way, as a pure machine: told what arrived and when, it says how many a second.

A rate is taken over windows of a quarter second in which something arrived; of the last ones the highest counts, since a
sender that has nothing to send makes a line look slow, never quick.
"""

from __future__ import annotations

from collections import deque

__all__ = ["Delivery", "RateMeter"]

_WINDOW_S = 0.25
_IDLE_S = 2.0  # a window that took so long was a pause
_WINDOWS = 8
_MARKS = 4096


class RateMeter:
    """Bytes a second over the last windows."""

    def __init__(self) -> None:
        """Start without knowing anything."""
        self._started_s: float | None = None
        self._counted = 0
        self._rates: deque[float] = deque(maxlen=_WINDOWS)

    def count(self, nbytes: int, now_s: float) -> None:
        """So many bytes arrived until now (a monotonic clock)."""
        if self._started_s is None or now_s - self._started_s > _IDLE_S:
            self._started_s, self._counted = now_s, 0
            return
        self._counted += nbytes
        span_s = now_s - self._started_s
        if span_s >= _WINDOW_S:
            self._rates.append(self._counted / span_s)
            self._started_s, self._counted = now_s, 0

    @property
    def bytes_s(self) -> float | None:
        """The rate; None until a first window is full."""
        return max(self._rates, default=None)


class Delivery:
    """What left here and arrived there: acknowledgements of long messages, turned into a rate.

    Attributes:
        meter: the rate.
    """

    def __init__(self) -> None:
        """Start with nothing sent."""
        self.meter = RateMeter()
        self._sent_bytes = self._arrived_bytes = 0
        self._marks: dict[int, deque[tuple[int, int]]] = {}

    def sent(self, nbytes: int) -> None:
        """So many bytes went out, as they are on the wire."""
        self._sent_bytes += nbytes

    def finished(self, channel: int, sequence: int, coming_bytes: int = 0) -> None:
        """All of a message is out with the next `coming_bytes`."""
        marks = self._marks.setdefault(channel, deque(maxlen=_MARKS))
        marks.append((sequence, self._sent_bytes + coming_bytes))

    def acknowledged(self, channel: int, sequence: int, now_s: float) -> None:
        """The peer has everything up to a message."""
        marks, arrived = self._marks.get(channel), self._arrived_bytes
        while marks and marks[0][0] <= sequence:
            arrived = max(arrived, marks.popleft()[1])
        if arrived > self._arrived_bytes:
            self.meter.count(arrived - self._arrived_bytes, now_s)
            self._arrived_bytes = arrived
