"""Who waits for whom: for each worker how long it had nothing to do, and how long data lay ready for it.

Pure: durations and times are told. Both high at once means that the line between them is what limits.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Feeding", "Waits"]


@dataclass(frozen=True, slots=True)
class Feeding:
    """What is on its way to the workers.

    Attributes:
        loaded: batches held ready at the orchestrator, and their bytes.
        in_flight: for each rank shards that it was sent and has not worked on, and their bytes.
    """

    loaded: tuple[int, int]
    in_flight: dict[int, tuple[int, int]]


@dataclass(slots=True)
class Waits:
    """One worker in one run. Seconds count from its first report on: what came before it is no part of the feeding.

    Attributes:
        watched_s: between the first report of work and the last.
        idle_s: of these, without data to work on.
        held_s: of these, in which a batch lay ready at the orchestrator and this worker had enough.
    """

    watched_s: float = 0.0
    idle_s: float = 0.0
    held_s: float = 0.0
    _first_s: float | None = None

    def reported(self, now_s: float, idle_s: float) -> None:
        """The worker reported on a shard, before which it was idle for so long."""
        if self._first_s is None:
            self._first_s = now_s
            return
        self.watched_s = now_s - self._first_s
        self.idle_s += idle_s

    def held(self, seconds: float) -> None:
        """A batch lay ready for so long because this worker had enough."""
        if self._first_s is not None:
            self.held_s += seconds

    @property
    def worker_waits(self) -> float | None:
        """Part of the time in which the worker waited for data, 0 to 1; None until something was watched."""
        return min(1.0, self.idle_s / self.watched_s) if self.watched_s > 0 else None

    @property
    def data_waits(self) -> float | None:
        """Part of the time in which data waited for the worker, 0 to 1; None until something was watched."""
        return min(1.0, self.held_s / self.watched_s) if self.watched_s > 0 else None
