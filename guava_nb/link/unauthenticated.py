"""Connections that have proved nothing yet: few, short-lived, and the newest is never kept out by silent ones.

A tunnel shows one address for all workers, so there is no lock-out per address. When all seats are taken, the guest who
has sat longest without proving anything leaves: an honest dialler needs milliseconds, a silent stranger would stay. But
not before `HONEST_S`: where 1,000 workers dial at once, as after an outage of the tunnel, each takes its turn, and none
would ever get through if those behind it sent it away.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from typing import Protocol

__all__ = ["HONEST_S", "Guest", "Unauthenticated"]

#: So long a guest may take to prove itself, however many wait.
HONEST_S = 0.5


class Guest(Protocol):
    """What has a seat, such as a stream."""

    def shutdown(self) -> None:
        """End it and wake its thread; from any thread."""


class Unauthenticated:
    """A bounded number of seats. Thread-safe.

    Args:
        seats: how many guests there may be at once; each has one thread.
        honest_s: as `HONEST_S`.
    """

    def __init__(self, seats: int, honest_s: float = HONEST_S) -> None:
        self._seats, self._honest_s = seats, honest_s
        self._changed = threading.Condition()
        self._streams: OrderedDict[int, Guest | None] = OrderedDict()  # seat number to stream, longest seated first
        self._since: dict[int, float] = {}
        self._next = 0

    def __len__(self) -> int:
        with self._changed:
            return len(self._streams)

    def sit(self, timeout_s: float) -> int | None:
        """Take a seat, asking the longest seated guest to leave when there is none.

        Returns:
            The seat's number; None when no seat came free within `timeout_s` seconds.
        """
        until = time.monotonic() + timeout_s
        with self._changed:
            if len(self._streams) >= self._seats:
                honest_until = self._since[next(iter(self._streams))] + self._honest_s
                if not self._has_seat_by(min(honest_until, until)) and honest_until <= until:
                    self._evict()
            if not self._has_seat_by(until):
                return None
            self._next += 1
            self._streams[self._next], self._since[self._next] = None, time.monotonic()
            return self._next

    def _has_seat_by(self, until: float) -> bool:
        left_s = max(0.0, until - time.monotonic())
        return self._changed.wait_for(lambda: len(self._streams) < self._seats, left_s)

    def name(self, seat: int, stream: Guest) -> None:
        """Tell which stream to shut down if this guest must leave."""
        with self._changed:
            self._streams[seat] = stream

    def leave(self, seat: int) -> None:
        """Give the seat back: the guest has joined or is gone. May be called again."""
        with self._changed:
            self._streams.pop(seat, None)
            self._since.pop(seat, None)
            self._changed.notify_all()

    def dismiss_all(self, timeout_s: float) -> None:
        """Ask all to leave and wait until they have."""
        with self._changed:
            for stream in self._streams.values():
                if stream is not None:
                    stream.shutdown()
            self._changed.wait_for(lambda: not self._streams, timeout_s)

    def _evict(self) -> None:
        for stream in self._streams.values():
            if stream is not None:
                stream.shutdown()
                return
