"""Measures the energy of stretches of time: a thread reads the sensors, windows begin and end.

A fault of a sensor never reaches whoever measures: what could not be read is not measured, and says so.
"""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from guava_nb.errors import ConfigError
from guava_nb.protocol.messages import BoardEnergy
from guava_nb.telemetry.devices import sensors_of
from guava_nb.telemetry.integral import Integral, Total
from guava_nb.telemetry.sensor import Sensor, SensorError
from guava_nb.telemetry.window import EnergyWindow

if TYPE_CHECKING:
    from typing_extensions import Self  # of Python 3.11

__all__ = ["EnergyMeter"]

logger = logging.getLogger(__name__)

#: After so many failed readings in a row a sensor is asked no more.
MAX_FAULTS = 20
_JOIN_S = 2.0


class _Followed:
    """One sensor and what was read of it."""

    def __init__(self, sensor: Sensor) -> None:
        self.sensor = sensor
        self.integral = Integral(sensor.counts, sensor.wrap_j)
        self.faults = 0
        self.problem = ""

    def read(self, now: Callable[[], float]) -> None:
        if self.faults >= MAX_FAULTS:
            return
        try:
            value = _checked(self.sensor.read())
        except (Exception, SystemExit) as problem:  # a sensor of another package may raise anything
            self.faults += 1
            self.problem = str(problem) if isinstance(problem, SensorError) else f"{type(problem).__name__}: {problem}"
            self.integral.fail(now())
        else:
            self.faults, self.problem = 0, ""
            self.integral.add(now(), value)


class EnergyMeter:
    """Measures joules between `begin` and `end`, or inside a `with` block.

        with EnergyMeter() as meter:
            train()
        print(meter.window)

    Figures are of whole boards, as their sensors give them: other programs on the same board are in them.

    Args:
        devices: torch devices ("cuda:0"), None for all that torch sees here; the machine's processors are added where
            they can be read.
        interval_s: seconds between readings.
        sensors: these instead of looking for some.
        clock: monotonic seconds.
        background: read on a thread of its own; without it only `begin`, `end` and `poll` read.

    Attributes:
        window: the newest that ended; None before the first.
        unmeasured: (device, why) of what has no sensor here.
    """

    def __init__(
        self,
        devices: Sequence[Any] | None = None,
        interval_s: float = 0.1,
        sensors: Sequence[Sensor] | None = None,
        clock: Callable[[], float] = time.monotonic,
        background: bool = True,
    ) -> None:
        """Look for sensors; nothing is read before the first `begin`."""
        if not interval_s > 0:
            raise ConfigError(f"interval_s {interval_s!r}: seconds between two readings, more than 0")
        self.window: EnergyWindow | None = None
        self.unmeasured: tuple[tuple[str, str], ...] = ()
        if sensors is None:
            sensors, self.unmeasured = sensors_of(devices)
        self._devices = devices
        boards: dict[str, _Followed] = {}
        for sensor in sensors:  # two devices of one board are measured once
            boards.setdefault(sensor.board.key, _Followed(sensor))
        self._followed = list(boards.values())
        self._interval_s, self._clock, self._background = interval_s, clock, background
        self._open: dict[str, tuple[float, list[Total]]] = {}
        self._lock = threading.RLock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    # ------------------------------------------------------------------------------------------------------- windows

    def begin(self, name: str = "window", restart: bool = False) -> None:
        """Begin a window. Windows of different names may overlap.

        Args:
            restart: begin anew where one of this name is open already, as after a cell that failed between.

        Raises:
            ConfigError: a window of this name is open.
        """
        with self._lock:
            if name in self._open and not restart:
                raise ConfigError(f"window {name!r} is open already: end it, or begin it with restart=True")
            self._synchronise()
            self.poll()
            self._open[name] = (self._clock(), [one.integral.total() for one in self._followed])
            self._start()

    def end(self, name: str = "window") -> EnergyWindow:
        """End a window and return it.

        Raises:
            ConfigError: no window of this name is open.
        """
        with self._lock:
            if name not in self._open:
                raise ConfigError(f"no window {name!r} is open; open are: {', '.join(self._open) or 'none'}")
            self._synchronise()
            window = self._read(name, *self._open.pop(name))
            self.window = window
            last = not self._open
        if last:
            self._halt()
        return window

    def so_far(self, name: str = "window", synchronise: bool = False) -> EnergyWindow:
        """Return an open window as it stands.

        Args:
            synchronise: wait for what is queued on the device, as `end` does; without it nothing waits.

        Raises:
            ConfigError: no window of this name is open.
        """
        with self._lock:
            if name not in self._open:
                raise ConfigError(f"no window {name!r} is open; open are: {', '.join(self._open) or 'none'}")
            if synchronise:
                self._synchronise()
            return self._read(name, *self._open[name])

    def poll(self) -> None:
        """Read all sensors now."""
        with self._lock:
            for one in self._followed:
                one.read(self._clock)

    def curve(self) -> dict[str, list[tuple[float, float]]]:
        """Return (seconds of the clock, watts) per board, thinned; empty where nothing was measured."""
        with self._lock:
            return {one.sensor.board.key: one.integral.curve() for one in self._followed}

    def take_increments(self) -> list[tuple[float, float, float]]:
        """Return (from, to, joules) of the stretches between readings since the last call, in order of their ends."""
        with self._lock:
            found = [part for one in self._followed for part in one.integral.take_increments()]
        return sorted(found, key=lambda part: part[1])

    def close(self) -> None:
        """Stop reading and give the sensors back; open windows are lost. Safe to call twice."""
        with self._lock:
            self._open.clear()
        self._halt()
        for one in self._followed:
            with contextlib.suppress(Exception):
                one.sensor.close()

    def __enter__(self) -> Self:
        """Begin the window "window"."""
        self.begin(restart=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End it, and close."""
        with contextlib.suppress(ConfigError):  # ended inside the block already
            self.end()
        self.close()

    # ------------------------------------------------------------------------------------------------------- private

    def _read(self, name: str, began: float, before: list[Total]) -> EnergyWindow:
        self.poll()
        ended = self._clock()
        boards = tuple(
            _between(one, then, one.integral.total(), ended - began)
            for one, then in zip(self._followed, before, strict=True)
        )
        return EnergyWindow(name, ended - began, boards, self.unmeasured)

    def _synchronise(self) -> None:
        """Wait for what was queued on the GPUs: it belongs to the window in which it was asked for."""
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
            return
        wanted = range(torch.cuda.device_count()) if self._devices is None else self._devices
        for device in wanted:
            if isinstance(device, int) or str(device).startswith("cuda"):
                with contextlib.suppress(Exception):  # a broken device tells its own story where it is used
                    torch.cuda.synchronize(device)

    def _start(self) -> None:
        if not self._background or not self._followed or (self._thread is not None and self._thread.is_alive()):
            return
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, args=(self._stop,), name="guava-energy", daemon=True)
        self._thread.start()

    def _follow(self, stop: threading.Event) -> None:
        while not stop.wait(self._interval_s):
            try:
                self.poll()
            except Exception:
                logger.exception("the energy meter failed and stops")
                return

    def _halt(self) -> None:
        thread, self._thread = self._thread, None
        self._stop.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join(_JOIN_S)


def _checked(value: float) -> float:
    """Return a reading that can be one.

    Raises:
        SensorError: it is no number of joules or watts.
    """
    number = float(value)
    if not math.isfinite(number) or number < 0:
        raise SensorError(f"the sensor gave {value!r}, which is no energy and no power")
    return number


def _between(one: _Followed, then: Total, now: Total, seconds: float) -> BoardEnergy:
    sensor, readings = one.sensor, now.readings - then.readings
    # A stretch of which nothing is known is not measured, whatever was read at its ends.
    covered_s = (
        0.0 if then.at_s is None or now.at_s is None else now.at_s - then.at_s - (now.uncovered_s - then.uncovered_s)
    )
    measured = readings > 0 and covered_s > 0
    return BoardEnergy(
        key=sensor.board.key,
        name=sensor.board.name,
        method=sensor.method,
        joules=max(0.0, now.joules - then.joules) if measured else None,
        readings=readings,
        uncovered_s=max(0.0, now.uncovered_s - then.uncovered_s),
        too_short=seconds < 2 * sensor.refresh_s,
        problem=one.problem,
    )
