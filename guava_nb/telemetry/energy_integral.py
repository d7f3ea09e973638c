"""From readings to joules. Pure: readings and times in, energy out; never negative, never a guess passed off as measured."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

__all__ = ["CURVE_POINTS", "EnergyIntegral", "Total"]

#: Points of the watt curve that are kept; older ones are thinned to every second when it is full.
CURVE_POINTS = 2000


@dataclass(frozen=True, slots=True)
class Total:
    """An integral at one moment.

    Attributes:
        at_s: when it was read last, on the caller's clock; None before the first reading.
        joules: since the first reading.
        readings: how many went into it.
        uncovered_s: seconds without a figure: failed readings, and a counter that was reset.
    """

    at_s: float | None
    joules: float
    readings: int
    uncovered_s: float


class EnergyIntegral:
    """Adds up one sensor's readings.

    Args:
        counts: readings are joules of a counter; else watts, joined by straight lines.
        wrap_j: see `Sensor`.

    Attributes:
        watts: of a counter, on average between the last two times that it was seen to grow; None before.
    """

    def __init__(self, counts: bool, wrap_j: float | None = None) -> None:
        self._counts, self._wrap_j = counts, wrap_j
        self._last: tuple[float, float] | None = None
        self._failed = False
        self._joules = self._uncovered_s = 0.0
        self._readings = 0
        self._curve: deque[tuple[float, float]] = deque()
        self._increments: deque[tuple[float, float, float]] = deque(maxlen=CURVE_POINTS)
        self._every, self._skipped = 1, 0
        self._grew_s: float | None = None
        self.watts: float | None = None

    def add(self, at_s: float, value: float) -> None:
        """Take a reading; one that is older than the last is left out."""
        last = self._last
        if last is not None and at_s <= last[0]:
            return
        self._readings += 1
        self._last = (at_s, value)
        if last is None:
            return
        seconds = at_s - last[0]
        joules = self._grown(last[1], value) if self._counts else (last[1] + value) / 2 * seconds
        if joules is None or self._failed:
            # A counter has gone on counting while it could not be read; watts in between are unknown.
            if joules is not None and self._counts:
                self._joules += joules
            else:
                self._uncovered_s += seconds
        else:
            self._joules += joules
            self._increments.append((last[0], at_s, joules))
            self._draw(at_s, joules / seconds if self._counts else value)
            if self._counts and joules > 0:
                self.watts = None if self._grew_s is None else joules / (at_s - self._grew_s)
                self._grew_s = at_s
        self._failed = False

    def fail(self, at_s: float) -> None:
        """A reading at this time failed."""
        self._failed = self._last is not None

    def total(self) -> Total:
        """Return what was added up so far."""
        return Total(None if self._last is None else self._last[0], self._joules, self._readings, self._uncovered_s)

    def curve(self) -> list[tuple[float, float]]:
        """Return (time, watts), thinned."""
        return list(self._curve)

    def take_increments(self) -> list[tuple[float, float, float]]:
        """Return (from, to, joules) of the stretches between two readings since the last call, and forget them."""
        found = list(self._increments)
        self._increments.clear()
        return found

    def _grown(self, before: float, now: float) -> float | None:
        """Joules between two readings of a counter; None when it was reset between them."""
        if now >= before:
            return now - before
        # A wrap leaves it near its end before and near its start after; anything else is a counter that began anew.
        if self._wrap_j is not None and before > self._wrap_j / 2 and now < self._wrap_j / 2:
            return self._wrap_j - before + now
        return None

    def _draw(self, at_s: float, watts: float) -> None:
        self._skipped += 1
        if self._skipped < self._every:
            return
        self._skipped = 0
        self._curve.append((at_s, watts))
        if len(self._curve) > CURVE_POINTS:
            self._curve = deque(list(self._curve)[::2])
            self._every *= 2
