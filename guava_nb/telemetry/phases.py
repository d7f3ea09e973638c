"""Time and energy by phase of a step. Pure: intervals and joules in, sums out.

Time is exact: whoever works tells when a phase began and ended. Energy is attributed by time: a sensor gives joules between
two readings, which are often longer than a step, so they are shared out among the phases that fell into them.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

__all__ = ["BACKWARD", "EXCHANGE", "FORWARD", "OTHER", "PHASES", "UPDATE", "WAITING", "CudaEvents", "PhaseBook"]

# When a CUDA device was at a point of its work, on this process's clock, without anybody waiting for it.
#
# The host runs ahead of the device, so the host's clock says nothing about what the device does. Events know the time between
# two of them; the first, recorded while the device was idle, ties them to the clock.

#: Seconds after which a newer event ties the others to the clock: the two clocks drift apart, and distances are 32-bit floats.
_ANCHOR_S = 60.0


class CudaEvents:
    """Records events and tells their times.

    Args:
        device: torch device; None: the one that is current where an event is recorded.
        clock: monotonic seconds.
    """

    def __init__(self, device: Any, clock: Callable[[], float]) -> None:
        self._device, self._clock = device, clock
        self._anchors: dict[Any, tuple[Any, float]] = {}

    def anchor(self) -> None:
        """Tie the device to the clock, at a moment when it has nothing to do."""
        event = self.mark()
        if event is not None:
            event.synchronize()
            self._anchors[event.device] = (event, self._clock())

    def mark(self) -> Any:
        """Record an event; None without CUDA, before its first use here, and while a graph is captured."""
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized() or torch.cuda.is_current_stream_capturing():
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def time_of(self, event: Any, at_s: float) -> float | None:
        """Return when the device was there; None: it was not yet.

        Args:
            event: of `mark`.
            at_s: when it was recorded: the device cannot have been there before.
        """
        now_s = self._clock()
        if not event.query():
            return None
        anchor, anchored_s = self._anchors.setdefault(event.device, (event, at_s))
        found_s: float = min(max(anchored_s + anchor.elapsed_time(event) / 1e3, at_s), now_s)
        if found_s > anchored_s + _ANCHOR_S:
            self._anchors[event.device] = (event, found_s)
        return found_s


FORWARD, BACKWARD, EXCHANGE, UPDATE, WAITING, OTHER = "forward", "backward", "exchange", "update", "waiting", "other"
#: In the order of a step; `WAITING` is for data, `OTHER` what nobody told a phase of.
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
        if left > 1e-9 * joules + 1e-12:  # what rounding leaves is nobody's
            self._joules[OTHER] = self._joules.get(OTHER, 0.0) + left
