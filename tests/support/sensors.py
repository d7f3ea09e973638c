"""Sensors that follow a script, and a library that stands in for NVML."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from guava_nb.telemetry import Board, Sensor, SensorError


class Clock:
    """Seconds that pass when told."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s

    def wait(self, seconds: float) -> None:
        self.now_s += seconds


class Scripted(Sensor):
    """Gives what `at(seconds since the start)` says; None is a failed reading."""

    def __init__(
        self,
        at: Callable[[float], float | None],
        clock: Clock,
        counts: bool = False,
        key: str = "host/GPU-1",
        wrap_j: float | None = None,
        watts: float | None = None,
    ) -> None:
        self.board, self.method = Board(key, "a board"), "scripted"
        self.counts, self.wrap_j = counts, wrap_j
        self._at, self._clock, self._start_s = at, clock, clock.now_s
        self.closed, self._watts = False, watts

    def power(self) -> float | None:
        return self._watts

    def read(self) -> float:
        value = self._at(self._clock.now_s - self._start_s)
        if value is None:
            raise SensorError("the script says no")
        return value

    def close(self) -> None:
        self.closed = True


class FakeNvml:
    """The calls of `pynvml` that are used. `refuses` names those that a board answers with an error."""

    def __init__(self, refuses: tuple[str, ...] = (), mig: bool = False) -> None:
        self.refuses, self.mig = refuses, mig
        self.opened = 0
        self.energy_mj, self.power_mw = 5_000_000, 200_000

    def _check(self, name: str) -> None:
        if name in self.refuses:
            raise RuntimeError("Not Supported")

    def nvmlInit(self) -> None:
        self._check("nvmlInit")
        self.opened += 1

    def nvmlShutdown(self) -> None:
        self.opened -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes) -> str:
        self._check("nvmlDeviceGetHandleByUUID")
        return uuid.decode()

    def nvmlDeviceGetName(self, handle: str) -> bytes:
        return b"Imaginary T4"

    def nvmlDeviceGetMigMode(self, handle: str) -> list[int]:
        self._check("nvmlDeviceGetMigMode")
        return [int(self.mig), 0]

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        self._check("nvmlDeviceGetTotalEnergyConsumption")
        return self.energy_mj

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        self._check("nvmlDeviceGetPowerUsage")
        return self.power_mw

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        self._check("nvmlDeviceGetUtilizationRates")
        return SimpleNamespace(gpu=75)

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        self._check("nvmlDeviceGetMemoryInfo")
        return SimpleNamespace(used=2 << 30, total=16 << 30)
