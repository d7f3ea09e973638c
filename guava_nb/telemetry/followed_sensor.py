"""One sensor as a meter follows it: what it said, what was wrong, and what that makes of a stretch of time."""

from __future__ import annotations

import math

from guava_nb.protocol.messages import BoardEnergy
from guava_nb.telemetry.energy_integral import EnergyIntegral, Total
from guava_nb.telemetry.sensor import Sensor, SensorError

__all__ = ["MAX_FAULTS", "FollowedSensor"]

#: After so many failed readings in a row a sensor is asked no more in this window.
MAX_FAULTS = 20


class FollowedSensor:
    """One sensor and what was read of it. It is asked without a lock; what it said is noted under the meter's."""

    def __init__(self, sensor: Sensor) -> None:
        self.sensor = sensor
        self.integral = EnergyIntegral(sensor.counts, sensor.wrap_j)
        self.faults = 0
        self.problem = "it has not answered yet"
        self._power_w: float | None = None

    def ask(self) -> float | str | None:
        """Return the reading, else what is wrong with it; None when it is asked no more."""
        if self.faults >= MAX_FAULTS:
            return None
        try:
            reading = _checked(self.sensor.read())
            if self.sensor.counts and self.integral.watts is None:  # until the counter itself tells the power
                self._power_w = self.sensor.power()
            return reading
        except (Exception, SystemExit) as problem:  # a sensor of another package may raise anything
            return str(problem) if isinstance(problem, SensorError) else f"{type(problem).__name__}: {problem}"

    def retry(self) -> None:
        """Ask it again, however often it failed: a driver may be back at the next window."""
        self.faults = 0

    def note(self, answer: float | str | None, at_s: float) -> None:
        """Take what `ask` returned."""
        if isinstance(answer, str):
            self.faults += 1
            self.problem = answer
            self.integral.fail(at_s)
        elif answer is not None:
            self.faults, self.problem = 0, ""
            self.integral.add(at_s, answer)

    def since(self, asked_s: float) -> Total | None:
        """Return the sums at the begin of a window; None where no reading is as new as that."""
        total = self.integral.total()
        return total if total.at_s is not None and total.at_s >= asked_s else None

    def energy(self, then: Total | None, seconds: float) -> BoardEnergy:
        """Return the energy of a window of so many seconds that began with these sums."""
        joules, readings, covered_s = None, 0, 0.0
        if then is not None:
            joules, readings, covered_s = _between(then, self.integral.total())
        # A stretch of which nothing is known is not measured, whatever was read at its ends.
        measured = readings > 0 and covered_s > 0
        method, too_short = self.sensor.method, seconds < 2 * self.sensor.refresh_s
        if measured and self.sensor.counts and (too_short or not joules):
            # A counter grows in leaps: a stretch between two of them is no 0 J, and one with a leap in it has too many.
            watts = self._power_w if self.integral.watts is None else self.integral.watts
            if watts is not None:
                joules, method = watts * covered_s, f"{method}, by power and time"
            measured = bool(joules)
        return BoardEnergy(
            key=self.sensor.board.key,
            name=self.sensor.board.name,
            method=method,
            joules=joules if measured else None,
            readings=readings,
            uncovered_s=max(0.0, seconds - covered_s),
            too_short=too_short,
            problem=self.problem,
        )


def _between(then: Total, now: Total) -> tuple[float, int, float]:
    """Joules, readings and seconds that are covered, from one moment to another."""
    if then.at_s is None or now.at_s is None:
        return 0.0, 0, 0.0
    covered_s = now.at_s - then.at_s - (now.uncovered_s - then.uncovered_s)
    return max(0.0, now.joules - then.joules), now.readings - then.readings, covered_s


def _checked(value: float) -> float:
    """Return a reading that can be one.

    Raises:
        SensorError: it is no number of joules or watts.
    """
    number = float(value)
    if not math.isfinite(number) or number < 0:
        raise SensorError(f"the sensor gave {value!r}, which is no energy and no power")
    return number
