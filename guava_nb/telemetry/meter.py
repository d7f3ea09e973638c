"""Measures the energy of stretches of time: a thread reads the sensors, windows begin and end.

A fault of a sensor never reaches the caller: what could not be read is not measured, and says so. No caller waits long for a
sensor either: it is read without a lock that others need, and a caller goes on after a moment with what there is.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from guava_nb.errors import ConfigError
from guava_nb.telemetry.cuda_events import CudaEvents
from guava_nb.telemetry.devices import sensors_of
from guava_nb.telemetry.energy_integral import Total
from guava_nb.telemetry.followed_sensor import FollowedSensor
from guava_nb.telemetry.sensor import Sensor
from guava_nb.telemetry.tasks import Task, TaskBook, between, listen, unlisten
from guava_nb.telemetry.window import EnergyWindow

if TYPE_CHECKING:
    from typing_extensions import Self  # of Python 3.11

__all__ = ["EnergyMeter"]

logger = logging.getLogger(__name__)

#: Longest that a window's end waits for sensors that are slow to answer.
PATIENCE_S = 2.0
_JOIN_S = 2.0
_STRETCHES = 4000
_LONGEST_S = 86400.0  # between two readings


@dataclass(slots=True)
class _Window:
    """An open window: when it began, the sums at that time (None until a sensor has answered), and the tasks'."""

    began_s: float
    totals: list[Total | None]
    tasks: dict[str, Any]


class EnergyMeter:
    """Measures joules between `begin` and `end`, or inside a `with` block.

        with EnergyMeter() as meter:
            with meter.task("load"):
                data = load()
            train(data)
        joules = meter.window.joules

    Figures are of whole boards, as their sensors give them: other programs on the same board are in them. `begin`, `end`
    and `so_far` wait two seconds at most for a sensor that does not answer; what it did not tell counts as not covered.

    Args:
        devices: torch devices, or one ("cuda:0"); None for all that torch sees here; the machine's processors are added where
            they can be read.
        interval_s: seconds between readings.
        sensors: these instead of looking for some.
        clock: monotonic seconds.
        background: read on a thread of its own; without it `begin`, `end`, `so_far` and `poll` read themselves, and take as
            long as the sensors do.

    Attributes:
        window: the newest that ended; None before the first.
        unmeasured: (device, why) of what has no sensor here.
    """

    def __init__(
        self,
        devices: Sequence[Any] | str | None = None,
        interval_s: float = 0.1,
        sensors: Sequence[Sensor] | None = None,
        clock: Callable[[], float] = time.monotonic,
        background: bool = True,
    ) -> None:
        """Look for sensors; nothing is read before the first `begin`."""
        devices = _devices_of(devices)
        if isinstance(interval_s, bool) or not (isinstance(interval_s, int | float) and 0 < interval_s <= _LONGEST_S):
            raise ConfigError(
                f"interval_s {interval_s!r}: seconds between two readings, more than 0, at most {_LONGEST_S:g}"
            )
        self.window: EnergyWindow | None = None
        self.unmeasured: tuple[tuple[str, str], ...] = ()
        if sensors is None:
            sensors, self.unmeasured = sensors_of(devices)
        self._devices = devices
        boards: dict[str, FollowedSensor] = {}
        for sensor in sensors:  # two devices of one board are measured once
            boards.setdefault(sensor.board.key, FollowedSensor(sensor))
        self._followed = list(boards.values())
        self._interval_s, self._clock, self._background = interval_s, clock, background
        self._open: dict[str, _Window] = {}
        self._events = _events_of(devices, clock)
        self._tasks = (
            TaskBook(clock) if self._events is None else TaskBook(clock, self._events.mark, self._events.time_of)
        )
        self._stretches: deque[tuple[float, float, float]] = deque(maxlen=_STRETCHES)
        self._changed = threading.Condition(threading.RLock())  # never held while a sensor is asked
        self._reading = threading.Lock()
        self._begun = self._finished = 0  # rounds of readings
        self._read_s = float("-inf")  # when the last one had its first answer
        self._wake, self._stop = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._closed = False

    # ------------------------------------------------------------------------------------------------------- windows

    def begin(self, name: str = "window", restart: bool = False) -> None:
        """Begin a window. Windows of different names may overlap.

        Args:
            restart: begin anew where one of this name is open already, as after a cell that failed between.

        Raises:
            ConfigError: a window of this name is open, the meter was closed, or the name is no text.
        """
        if not isinstance(name, str):
            raise ConfigError(f"{name!r} is no name for a window: give a text, as in begin('epoch')")
        with self._changed:
            if self._closed:
                raise ConfigError("this meter is closed and its sensors are given back: make a new EnergyMeter()")
            if name in self._open and not restart:
                raise ConfigError(f"window {name!r} is open already: end it, or begin it with restart=True")
            for one in self._followed:
                one.retry()
        self._synchronise()
        if self._events is not None:
            with contextlib.suppress(Exception):  # as for a broken device below
                self._events.anchor()
        asked_s = self._clock()
        self._start()
        self.poll()
        with self._changed:
            totals = [one.since(asked_s) for one in self._followed]
            if not set(self._open) - {name}:  # no window counts from earlier, so the last run's names take no room here
                self._tasks.forget()
            self._open[name] = _Window(self._moment(asked_s), totals, self._tasks.totals())
            listen(self._tasks)
            self._start()  # again: a window that ended meanwhile may have stopped it

    def end(self, name: str = "window") -> EnergyWindow:
        """End a window and return it.

        Raises:
            ConfigError: no window of this name is open.
        """
        self._find(name)
        self._synchronise()
        asked_s = self._clock()
        self.poll()
        with self._changed:
            window = self._read(name, asked_s)
            del self._open[name]
            self.window = window
        self._rest()
        return window

    def so_far(self, name: str = "window", synchronise: bool = False) -> EnergyWindow:
        """Return an open window as it stands.

        Args:
            synchronise: wait for what is queued on the device, as `end` does; without it nothing waits for the device.

        Raises:
            ConfigError: no window of this name is open.
        """
        self._find(name)
        if synchronise:
            self._synchronise()
        asked_s = self._clock()
        self.poll()
        return self._read(name, asked_s)

    def cancel(self, name: str = "window") -> None:
        """Forget an open window, if there is one; waits for nothing."""
        with self._changed:
            self._open.pop(name, None)
        self._rest()

    def task(self, name: str) -> Task:
        """Name what the code of a `with` block is about: its seconds and joules stand in the window by that name.

        A task within another counts for both. `guava_nb.energy_task` does the same for every meter that measures at that moment.

        Raises:
            ConfigError: no window is open, or the name is no text.
        """
        with self._changed:
            if not self._open:
                raise ConfigError(
                    f"task {name!r}: no window is open; begin one first, or use the meter in a with block"
                )
        return Task(name, (self._tasks,))

    @property
    def missed_tasks(self) -> int:
        """How many tasks were not counted since the oldest open window began: too many ended between two readings."""
        return self._tasks.missed

    def poll(self) -> None:
        """Read all sensors now; with a thread that reads, wait for it two seconds at most."""
        with self._changed:
            thread = self._thread
            wanted = self._begun + 1
        if thread is None or not thread.is_alive():
            self._round()
            return
        self._wake.set()
        with self._changed:
            self._changed.wait_for(lambda: self._finished >= wanted, PATIENCE_S)
        self._tasks.measured((), self._clock())  # those that wait for a sensor that hangs are told without it

    def curve(self) -> dict[str, list[tuple[float, float]]]:
        """Return (seconds of the clock, watts) per board, thinned; empty where nothing was measured."""
        with self._changed:
            return {one.sensor.board.key: one.integral.curve() for one in self._followed}

    def take_increments(self) -> list[tuple[float, float, float]]:
        """Return (from, to, joules) of the stretches between readings since the last call, in order of their ends."""
        with self._changed:
            found = list(self._stretches)
            self._stretches.clear()
        return found

    def close(self) -> None:
        """Stop reading and give the sensors back; open windows are lost. Safe to call twice."""
        with self._changed:
            self._open.clear()
            self._closed = True
        self._rest()
        self._give_back(_JOIN_S)

    def __enter__(self) -> Self:
        """Begin the window "window"."""
        self.begin(restart=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End it, unless the block did, and close, also when the block failed."""
        with contextlib.suppress(ConfigError):
            self.end()
        self.close()

    # ------------------------------------------------------------------------------------------------------- private

    def _find(self, name: str) -> _Window:
        with self._changed:
            if name not in self._open:
                raise ConfigError(f"no window {name!r} is open; open are: {', '.join(self._open) or 'none'}")
            return self._open[name]

    def _moment(self, asked_s: float) -> float:
        """When the sensors were read for who asked at this time: a busy machine wakes him later, and joules end there."""
        return self._read_s if self._read_s >= asked_s else self._clock()

    def _read(self, name: str, asked_s: float) -> EnergyWindow:
        with self._changed:
            window, now_s = self._find(name), self._moment(asked_s)
            boards = tuple(
                one.energy(then, now_s - window.began_s)
                for one, then in zip(self._followed, window.totals, strict=True)
            )
            tasks = between(window.tasks, self._tasks.totals())
            return EnergyWindow(name, now_s - window.began_s, boards, self.unmeasured, tasks)

    def _round(self) -> None:
        """Ask every sensor once, unless another thread hangs in one."""
        if not self._reading.acquire(timeout=PATIENCE_S):
            return
        try:
            with self._changed:
                self._begun += 1
                mine = self._begun
            from_s = self._clock()
            for k, one in enumerate(self._followed):
                answer = one.ask()
                with self._changed:
                    at_s = self._clock()
                    self._read_s = at_s if k == 0 else self._read_s
                    one.note(answer, at_s)
            with self._changed:
                self._book(from_s)
                self._finished = mine
                self._changed.notify_all()
        finally:
            self._reading.release()

    def _book(self, from_s: float) -> None:
        """Pass on what a round of readings brought; windows that waited for a sensor's first answer begin there."""
        parts = sorted((p for one in self._followed for p in one.integral.take_increments()), key=lambda part: part[1])
        self._stretches.extend(parts)
        self._tasks.measured(parts, from_s)
        for window in self._open.values():
            for k, one in enumerate(self._followed):
                if window.totals[k] is None:
                    window.totals[k] = one.since(window.began_s)

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
        """Have a thread read, unless one does."""
        with self._changed:
            if not self._background or self._closed or (self._thread is not None and self._thread.is_alive()):
                return
            self._stop = threading.Event()
            self._thread = threading.Thread(target=self._follow, args=(self._stop,), name="guava-energy", daemon=True)
            self._thread.start()

    def _follow(self, stop: threading.Event) -> None:
        while not stop.is_set():
            self._wake.wait(self._interval_s)
            self._wake.clear()
            try:
                self._round()
            except Exception:
                logger.exception("the energy meter failed and stops")
                return
        if self._closed:
            self._give_back(0.0)  # a thread that still hangs in a reading gives them back itself after it

    def _rest(self) -> None:
        """Read no more where no window is open; a thread that hangs in a sensor is left behind."""
        with self._changed:
            if self._open:
                return
            thread, self._thread = self._thread, None
            unlisten(self._tasks)
            self._stop.set()
        self._wake.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join(_JOIN_S)

    def _give_back(self, timeout_s: float) -> None:
        """Close the sensors, unless a reading goes on for longer than this: none is closed under a call that uses it."""
        if not self._reading.acquire(timeout=timeout_s):
            return
        try:
            for one in self._followed:
                with contextlib.suppress(Exception):
                    one.sensor.close()
        finally:
            self._reading.release()


def _devices_of(devices: Any) -> Sequence[Any] | None:
    """Return devices as a sequence: a text is one."""
    if isinstance(devices, str):
        return [devices]
    if devices is not None and not isinstance(devices, Sequence):
        raise ConfigError(f"devices {devices!r}: give a list of torch devices, as in EnergyMeter(['cuda:0'])")
    return devices


def _events_of(devices: Sequence[Any] | None, clock: Callable[[], float]) -> CudaEvents | None:
    """The clock of the device that tasks run on: the only one given, else the one that is current there."""
    if devices is None:
        return CudaEvents(None, clock)
    found = [f"cuda:{one}" if isinstance(one, int) else str(one) for one in devices]
    of_cuda = [name for name in found if name.startswith("cuda")]
    if not of_cuda:
        return None
    return CudaEvents(of_cuda[0] if len(of_cuda) == 1 else None, clock)
