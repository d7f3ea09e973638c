"""How fast bytes really move one way, as a pure machine: told what arrived and when, it says how many a second.

A rate is taken over windows of a quarter second in which something arrived, and where acknowledgements come back also over
each long message by itself: it was under way no longer than from its first byte's leaving to the word that it is there. None of
these can be higher than what the line did, so of the last ones the highest counts: a sender that has little to send
makes a line look slow, never quick.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

__all__ = ["Delivery", "RateMeter"]

_WINDOW_S = 0.25
_IDLE_S = 2.0  # a window that took so long was a pause
_WINDOWS = 8
_MARKS = 4096
_MESSAGES = 64


class RateMeter:
    """Bytes a second over the last windows."""

    def __init__(self) -> None:
        """Start without knowing anything."""
        self._started_s: float | None = None
        self._counted = 0.0
        self._rates: deque[float] = deque(maxlen=_WINDOWS)

    def count(self, nbytes: float, now_s: float) -> None:
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


@dataclass(slots=True)
class _Mark:
    """A long message that is out, or goes out next: where its last byte is, how long it is on the wire, when it began."""

    sequence: int
    end: float
    nbytes: float
    began_s: float
    coming_bytes: int


class Delivery:
    """What left here and arrived there: acknowledgements of long messages, turned into a rate.

    Attributes:
        bytes_s: bytes a second that the line does at least; None until it was seen.
    """

    def __init__(self) -> None:
        """Start with nothing sent."""
        self.bytes_s: float | None = None
        self._windows = RateMeter()
        self._messages: deque[float] = deque(maxlen=_MESSAGES)
        self._sent_bytes = 0
        self._arrived_bytes = 0.0
        self._marks: dict[int, deque[_Mark]] = {}
        self._coming: list[_Mark] = []

    @property
    def position(self) -> int:
        """Bytes that went out so far."""
        return self._sent_bytes

    def sent(self, nbytes: int, planned_bytes: int | None = None) -> None:
        """So many bytes went out, as they are on the wire; planned: before they were compressed."""
        left = 1.0 - nbytes / planned_bytes if planned_bytes else 0.0
        for mark in self._coming:
            mark.end -= left * mark.coming_bytes
            mark.nbytes -= left * mark.coming_bytes
            mark.coming_bytes = 0
        self._coming.clear()
        self._sent_bytes += nbytes

    def finished(self, channel: int, sequence: int, began_s: float, began_at: int, coming_bytes: int = 0) -> None:
        """All of a message is out with the next `coming_bytes`.

        Args:
            began_s, began_at: when its first byte left, and the `position` then.
            coming_bytes: not compressed yet.
        """
        end = self._sent_bytes + coming_bytes
        mark = _Mark(sequence, end, end - began_at, began_s, coming_bytes)
        self._marks.setdefault(channel, deque(maxlen=_MARKS)).append(mark)
        if coming_bytes:
            self._coming.append(mark)

    def acknowledged(self, channel: int, sequence: int, now_s: float) -> None:
        """The peer has everything up to a message."""
        marks, arrived = self._marks.get(channel), self._arrived_bytes
        while marks and marks[0].sequence <= sequence:
            mark = marks.popleft()
            arrived = max(arrived, mark.end)
            if now_s > mark.began_s and not mark.coming_bytes:  # else its length is not known yet
                self._messages.append(mark.nbytes / (now_s - mark.began_s))
        if arrived > self._arrived_bytes:
            self._windows.count(arrived - self._arrived_bytes, now_s)
            self._arrived_bytes = arrived
        rates = (self._windows.bytes_s, *self._messages)
        self.bytes_s = max((rate for rate in rates if rate is not None), default=None)
