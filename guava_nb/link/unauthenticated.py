"""Connections that have proved nothing yet: few, short-lived, and the newest is never kept out by silent ones.

A tunnel shows one address for all workers, so there is no lock-out per address. When all seats are taken, the guest who
has sat longest without proving anything leaves: an honest dialler needs milliseconds, a silent stranger would stay.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

from guava_nb.transport.stream import Stream

__all__ = ["Unauthenticated"]


class Unauthenticated:
    """A bounded number of seats. Thread-safe.

    Args:
        seats: how many guests there may be at once; each has one thread.
    """

    def __init__(self, seats: int) -> None:
        self._seats = seats
        self._changed = threading.Condition()
        self._streams: OrderedDict[int, Stream | None] = OrderedDict()  # seat number to stream, longest seated first
        self._next = 0

    def __len__(self) -> int:
        with self._changed:
            return len(self._streams)

    def sit(self, timeout_s: float) -> int | None:
        """Take a seat, asking the longest seated guest to leave when there is none.

        Returns:
            The seat's number; None when no seat came free within `timeout_s` seconds.
        """
        with self._changed:
            if len(self._streams) >= self._seats:
                self._evict()
            if not self._changed.wait_for(lambda: len(self._streams) < self._seats, timeout_s):
                return None
            self._next += 1
            self._streams[self._next] = None
            return self._next

    def name(self, seat: int, stream: Stream) -> None:
        """Tell which stream to shut down if this guest must leave."""
        with self._changed:
            self._streams[seat] = stream

    def leave(self, seat: int) -> None:
        """Give the seat back: the guest has joined or is gone. May be called again."""
        with self._changed:
            self._streams.pop(seat, None)
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
