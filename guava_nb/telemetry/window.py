"""What was measured between a begin and an end, as plain records."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from msgspec.structs import asdict

from guava_nb.config.units import show_float, show_time
from guava_nb.protocol.messages import BoardEnergy, TaskEnergy
from guava_nb.telemetry.sensor import NOT_MEASURED

__all__ = ["J_PER_WH", "EnergyWindow", "per", "times", "total_joules"]

J_PER_WH = 3600.0


def total_joules(boards: Iterable[BoardEnergy]) -> float | None:
    """Return the joules of all boards together; None when none was measured."""
    known = [board.joules for board in boards if board.joules is not None]
    return sum(known) if known else None


def per(joules: float | None, count: float | None) -> float | None:
    """Return joules for each of so many; None when they were not measured, or there were none."""
    return None if joules is None or not count or count < 0 else joules / count


def times(watt_hours: float | None, factor_per_kwh: float | None) -> float | None:
    """Return what some energy comes to by a factor for each kilowatt hour; None where one of them is unknown."""
    return None if watt_hours is None or factor_per_kwh is None else watt_hours / 1000 * factor_per_kwh


@dataclass(frozen=True, slots=True)
class EnergyWindow:
    """A stretch of time and the energy in it.

    Attributes:
        boards: each piece of hardware once.
        unmeasured: (device, why) of what has no sensor.
        tasks: what the code named and ended meanwhile; they may lie within one another, so their sum means nothing.
    """

    name: str
    seconds: float
    boards: tuple[BoardEnergy, ...] = ()
    unmeasured: tuple[tuple[str, str], ...] = ()
    tasks: tuple[TaskEnergy, ...] = ()

    @property
    def joules(self) -> float | None:
        """All boards together; None when none was measured."""
        return total_joules(self.boards)

    @property
    def watts(self) -> float | None:
        """On average; None when not measured, or over no time."""
        return per(self.joules, self.seconds)

    @property
    def watt_hours(self) -> float | None:
        """1 Wh is 3600 J."""
        return per(self.joules, J_PER_WH)

    def per(self, count: float) -> float | None:
        """Joules per step, sample or token, of which there were `count`; None when not measured or none."""
        return per(self.joules, count)

    def co2e_g(self, grams_per_kwh: float) -> float | None:
        """Grams of CO2 equivalent by a factor that the caller answers for: it depends on grid and hour."""
        return times(self.watt_hours, grams_per_kwh)

    def cost(self, price_per_kwh: float) -> float | None:
        """In the currency of the price."""
        return times(self.watt_hours, price_per_kwh)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, for JSON or a table: `pandas.DataFrame(window.to_dict()["tasks"])`."""
        return {
            "name": self.name,
            "seconds": self.seconds,
            "joules": self.joules,
            "watts": self.watts,
            "boards": [asdict(board) for board in self.boards],
            "unmeasured": dict(self.unmeasured),
            "tasks": [asdict(task) for task in self.tasks],
        }

    def __repr__(self) -> str:
        """One line, as measured or not."""
        if self.joules is None:
            why = "; ".join(reason for _, reason in self.unmeasured) or "no sensor here"
            return f"EnergyWindow({self.name!r}: {show_time(self.seconds)}, {NOT_MEASURED} ({why}))"
        marks = " (too short to say much)" if any(board.too_short for board in self.boards) else ""
        return f"EnergyWindow({self.name!r}: {show_float(self.joules, 3)} J in {show_time(self.seconds)}{marks})"
