"""When a peer was heard last, and how often nothing came from it for longer than its heartbeats leave. Knows no sockets."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

__all__ = ["Hearing", "Silences"]

#: Of a heartbeat's seconds: how much later than that one may come before the line counts as silent.
_LATE = 1.75


@dataclass(frozen=True, slots=True)
class Silences:
    """How a line was silent.

    Attributes:
        count: how often.
        seconds: of all of them together.
        observed_s: for how long the line has been listened to.
    """

    count: int = 0
    seconds: float = 0.0
    observed_s: float = 0.0

    @property
    def rate(self) -> tuple[float, float]:
        """How many there were a second, and how long one lasted on average; zeros where there was none."""
        return (self.count / self.observed_s, self.seconds / self.count) if self.count else (0.0, 0.0)


class Hearing:
    """Of one session, whose connections share it; thread-safe.

    Args:
        heartbeat_s: the peer lets no more than about so many seconds pass without a byte.

    Attributes:
        heard_at: when bytes came last, on the monotonic clock.
    """

    def __init__(self, heartbeat_s: float) -> None:
        """Nothing was silent yet; the peer counts as heard now."""
        self._began = self.heard_at = time.monotonic()
        self._heartbeat_s, self._count, self._seconds = heartbeat_s, 0, 0.0
        self._lock = threading.Lock()

    def heard(self, now: float) -> None:
        """Bytes came."""
        if now - self.heard_at > _LATE * self._heartbeat_s:
            with self._lock:  # the other connection's reader may have come first
                silent_s = now - self.heard_at
                self.heard_at = now
                if silent_s > _LATE * self._heartbeat_s:
                    # On average half a heartbeat of it passed before the line fell silent.
                    self._count, self._seconds = self._count + 1, self._seconds + silent_s - self._heartbeat_s / 2
        self.heard_at = now

    def silences(self, now: float) -> Silences:
        """Return those that are over."""
        with self._lock:
            return Silences(self._count, self._seconds, now - self._began)
