"""NVIDIA GPUs, by NVML: the total-energy counter where the board has one, else its power, else nothing and why.

Each call is tried for each board: boards of one machine differ, and a board may refuse one call and answer the next. A
GPU is found by its UUID: NVML counts all boards of a machine, CUDA those that `CUDA_VISIBLE_DEVICES` leaves.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from guava_nb.telemetry.sensor import Board, Sensor, SensorError

__all__ = ["Gauges", "NvmlBoard", "NvmlSensor", "open_board"]


@dataclass(frozen=True, slots=True)
class Gauges:
    """What a GPU shows of itself at one moment; None where it does not.

    Attributes:
        busy: part of the last moments in which a kernel ran, 0 to 1.
    """

    busy: float | None = None
    memory_used_bytes: int | None = None
    memory_bytes: int | None = None
    power_w: float | None = None


class NvmlSensor(Sensor):
    """One call of one board."""

    def __init__(
        self,
        board: Board,
        method: str,
        counts: bool,
        call: Callable[[], float],
        on_close: Callable[[], None] = lambda: None,
        power: Callable[[], float | None] = lambda: None,
    ) -> None:
        self.board, self.method, self.counts, self._call, self._on_close = board, method, counts, call, on_close
        self._power = power
        self.refresh_s = 0.1  # as slow as 10 Hz, by model

    def read(self) -> float:
        """Return joules or watts."""
        try:
            return self._call() / 1000.0  # NVML counts in thousandths
        except Exception as problem:
            raise SensorError(f"{self.method}: {problem}") from problem

    def power(self) -> float | None:
        """Return watts now."""
        return self._power()

    def close(self) -> None:
        """Give the board back."""
        self._on_close()


class NvmlBoard:
    """A board that NVML knows.

    Attributes:
        sensor: the best it has; None where it has none, then `why` says so.

    Args:
        api: the module pynvml.
        handle: NVML's own, of the board.
        key: unlike that of any other board.
        name: for people.
    """

    def __init__(self, api: Any, handle: Any, key: str, name: str) -> None:
        self._api, self._handle, self._is_open = api, handle, True
        self.board = Board(key, name)
        self.sensor, self.why = self._best()

    def gauges(self) -> Gauges:
        """Read what it shows; each call that it refuses is None."""
        used = self._ask(lambda: self._api.nvmlDeviceGetMemoryInfo(self._handle))
        busy = self._ask(lambda: self._api.nvmlDeviceGetUtilizationRates(self._handle).gpu)
        return Gauges(
            busy=None if busy is None else busy / 100.0,
            memory_used_bytes=None if used is None else int(used.used),
            memory_bytes=None if used is None else int(used.total),
            power_w=self._power(),
        )

    def _power(self) -> float | None:
        power = self._ask(lambda: self._api.nvmlDeviceGetPowerUsage(self._handle))
        return None if power is None else power / 1000.0

    def close(self) -> None:
        """Give NVML back. Safe to call twice."""
        opened, self._is_open = self._is_open, False
        if opened:
            with contextlib.suppress(Exception):
                self._api.nvmlShutdown()

    def _best(self) -> tuple[NvmlSensor | None, str]:
        if self._is_split():
            return None, "a slice of a GPU (MIG): NVML gives no power of it"
        reasons = []
        for method, counts, name in (
            ("NVML energy counter", True, "nvmlDeviceGetTotalEnergyConsumption"),
            ("NVML power, integrated", False, "nvmlDeviceGetPowerUsage"),
        ):
            sensor = NvmlSensor(self.board, method, counts, partial(self._call, name), self.close, self._power)
            try:
                sensor.read()
            except SensorError as problem:
                reasons.append(str(problem))
            else:
                return sensor, ""
        return None, "; ".join(reasons)

    def _call(self, name: str) -> float:
        return float(getattr(self._api, name)(self._handle))

    def _is_split(self) -> bool:
        mode = self._ask(lambda: self._api.nvmlDeviceGetMigMode(self._handle))
        return bool(mode and mode[0])

    @staticmethod
    def _ask(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception:  # each driver refuses in its own way; what it does not tell is not measured
            return None


def open_board(uuid: str, host_id: str, api: Any = None) -> NvmlBoard | str:
    """Find a GPU; returns the board, or one sentence why not.

    Args:
        uuid: as torch tells it, with or without "GPU-".
        host_id: of this machine, a part of the board's key.
        api: the module `pynvml`; None imports it.
    """
    if not uuid:
        return "this torch does not tell the GPU's UUID"
    if uuid.startswith("MIG-"):
        return "a slice of a GPU (MIG): NVML gives no power of it"
    try:
        api = importlib.import_module("pynvml") if api is None else api
        api.nvmlInit()
    except Exception as problem:  # no library, no driver, or one of another version
        return f"NVML does not start: {problem}"
    full = uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
    try:
        handle = api.nvmlDeviceGetHandleByUUID(full.encode())
        name = api.nvmlDeviceGetName(handle)
        name = name.decode() if isinstance(name, bytes) else str(name)
        return NvmlBoard(api, handle, f"{host_id}/{full}", name)
    except Exception as problem:
        with contextlib.suppress(Exception):
            api.nvmlShutdown()
        return f"NVML does not know the GPU {full}: {problem}"
