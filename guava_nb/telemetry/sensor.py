"""What every energy sensor can do, and what one reading is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

__all__ = ["NOT_MEASURED", "Board", "Sensor", "SensorError"]

NOT_MEASURED = "not measured"


class SensorError(Exception):
    """A reading failed; stays inside this room."""


@dataclass(frozen=True, slots=True)
class Board:
    """What a sensor measures: a whole board, or a machine's processors; never one process of several.

    Attributes:
        key: equal for two sensors of the same hardware, in whatever process: who adds up counts it once.
        name: for people.
    """

    key: str
    name: str


class Sensor(ABC):
    """One source of energy figures.

    Attributes:
        board: what it measures.
        method: how, for people ("NVML energy counter").
        counts: `read` gives joules that only grow; else watts at this moment.
        wrap_j: the counter starts again at 0 after so many joules; None where it does not.
        refresh_s: its value changes at least this often; a window not much longer says nothing.
    """

    board: Board
    method: str = ""
    counts: bool = True
    wrap_j: float | None = None
    refresh_s: float = 0.1

    @abstractmethod
    def read(self) -> float:
        """Return joules since some moment, or watts now.

        Raises:
            SensorError: it cannot be read (any more).
        """

    def power(self) -> float | None:
        """Return watts at this moment, where a counter's sensor tells them too; None where it does not."""
        return None

    def close(self) -> None:  # noqa: B027 - most have nothing to give back
        """Give back what reading needed. Safe to call twice."""
