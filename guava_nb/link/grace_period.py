"""How long a listener keeps the seat of a session whose connections broke: longer when what broke is the way to all.

Pure: told what happened and when, by monotonic seconds. A tunnel that is down, and sessions that all broke together,
say nothing about any one of them, so they are waited for as long as an outage may last. One that breaks alone has the
usual grace.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

__all__ = ["GracePeriod"]

#: Sessions that broke within so many seconds broke together: what is silent is noticed a heartbeat sooner or later.
TOGETHER_S = 5.0


class GracePeriod:
    """The outages of one listener. Thread-safe.

    Args:
        grace_s: for a session that breaks alone.
        outage_s: for all of them, while no worker can come and once there is a new address; 0 where there is no tunnel, and
            then nothing but the grace counts.
    """

    def __init__(self, grace_s: float, outage_s: float = 0.0) -> None:
        self.grace_s, self.outage_s = grace_s, outage_s
        self._lock = threading.Lock()
        self._began: float | None = None
        self._down = self._together = False
        self._past = (float("-inf"), float("-inf"))  # who was lost before the first is kept until the second

    def went_down(self, now: float) -> None:
        """The tunnel is down: no worker can come."""
        with self._lock:
            self._down = True
            self._began = now if self._began is None else self._began

    def came_up(self, now: float, moved: bool) -> None:
        """The tunnel forwards again; `moved`: from another address, which a person has to hand on."""
        with self._lock:
            self._down = False
            if moved:
                # Connections through the old address may break after the new one is known.
                self._began, self._together = None, False
                self._past = (now + self.outage_s, now + self.outage_s)
            elif not self._together:
                self._end(now)

    def look(self, now: float, lost: Sequence[float | None]) -> None:
        """See all sessions that have stood: since when each is away, None for one that stands."""
        away = [at for at in lost if at is not None]
        with self._lock:
            if len(away) == len(lost):
                if len(away) > 1 and max(away) - min(away) <= TOGETHER_S and self.outage_s:
                    self._together = True
                    self._began = min(away) if self._began is None else self._began
            elif self._together:
                self._together = False
                if not self._down:
                    self._end(now)

    def kept_until(self, lost_at: float) -> float:
        """When a session is given up that has been away since `lost_at`."""
        with self._lock:
            until = lost_at + self.grace_s
            if self._began is not None:
                return max(until, self._began + self.outage_s)
            before, kept = self._past
            return max(until, kept) if lost_at <= before else until

    def _end(self, now: float) -> None:
        if self._began is not None and now + self.grace_s > self._past[1]:
            self._past = (now, now + self.grace_s)
        self._began = None
