"""How busy the workers' devices were through a run, and how much of their memory was in use, as curves of a bounded size."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from guava_nb.protocol.messages import Energy
from guava_nb.status import DeviceUse, Points

__all__ = ["DeviceCurves"]

#: Most points of a curve; then each is made of twice as many reports.
_MOST_POINTS = 240
#: Workers on one device report its figures each by themselves: closer together they say nothing new.
_CLOSEST_S = 0.9
#: More are not kept: a worker may say of itself what it likes.
_MOST_DEVICES = 1024


class DeviceCurves:
    """The devices of one run, each once, also where several workers share it. For one thread at a time."""

    def __init__(self) -> None:
        """Know no device."""
        self._devices: dict[Hashable, _Device] = {}

    def heard(self, worker: str, machine: str, seconds: float, report: Energy) -> None:
        """Take a worker's report.

        Args:
            worker: its name.
            machine: name of its machine.
            seconds: since the run began.
            report: a GPU's figures count if it has any, else those of its machine.
        """
        is_gpu = report.busy is not None or report.memory_bytes is not None
        board = report.boards[0].key if report.boards else worker
        key = ("GPU", board) if is_gpu else ("CPU", machine, report.host_memory_bytes)
        if key not in self._devices and len(self._devices) >= _MOST_DEVICES:
            return
        device = self._devices.setdefault(key, _Device(is_gpu))
        device.workers[worker] = None
        if seconds < device.last_s + _CLOSEST_S:
            return
        device.last_s = seconds
        device.busy.add(seconds, report.busy if is_gpu else report.cpu_busy)
        device.memory.add(seconds, report.memory_used_bytes if is_gpu else report.host_memory_used_bytes)

    def uses(self) -> tuple[DeviceUse, ...]:
        """Return what was seen so far, devices in the order of their first reports."""
        return tuple(
            DeviceUse(", ".join(device.workers), device.is_gpu, device.busy.points(), device.memory.points())
            for device in self._devices.values()
        )


class _Line:
    """Points that are each made of equally many reports.

    Args:
        fold: makes one value of several.
    """

    def __init__(self, fold: Callable[[Sequence[float]], float]) -> None:
        self._fold = fold
        self._points: list[tuple[int, float]] = []
        self._open: list[tuple[int, float]] = []
        self._width = 1

    def add(self, seconds: float, value: float | None) -> None:
        if value is None:
            return
        self._open.append((round(seconds), value))
        if len(self._open) < self._width:
            return
        self._points.append(self._folded(self._open))
        self._open = []
        if len(self._points) >= _MOST_POINTS:
            self._points = [self._folded(self._points[k : k + 2]) for k in range(0, len(self._points), 2)]
            self._width *= 2

    def points(self) -> Points:
        return (*self._points, *([self._folded(self._open)] if self._open else ()))

    def _folded(self, points: Sequence[tuple[int, float]]) -> tuple[int, float]:
        return points[-1][0], self._fold([value for _, value in points])


@dataclass(slots=True)
class _Device:
    is_gpu: bool
    workers: dict[str, None] = field(default_factory=dict)  # an ordered set
    last_s: float = -_CLOSEST_S
    busy: _Line = field(default_factory=lambda: _Line(statistics.fmean))
    memory: _Line = field(default_factory=lambda: _Line(max))
