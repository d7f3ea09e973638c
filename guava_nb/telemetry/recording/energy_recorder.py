"""Records a GPU's sensors while something runs, for machines that have none."""

from __future__ import annotations

import contextlib
import datetime
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any

from guava_nb.errors import ConfigError
from guava_nb.telemetry.devices import open_device
from guava_nb.telemetry.energy_record import EnergyRecord
from guava_nb.telemetry.nvml import NvmlBoard
from guava_nb.telemetry.recording.energy_recording import EnergyRecording, Reading, RecordedRun
from guava_nb.telemetry.sensor import SensorError
from guava_nb.telemetry.versions import local_versions

if TYPE_CHECKING:
    from typing_extensions import Self  # of Python 3.11

__all__ = ["EnergyRecorder"]

_JOIN_S = 2.0


class EnergyRecorder:
    """Reads a GPU on a thread of its own, from the begin of a `with` block to its end.

        with EnergyRecorder("cuda:0") as recorder:
            with recorder.run("batches of 32") as keep:
                keep(orchestrator.start_training(loader, num_epochs=3).energy_record())
        recorder.recording().save("gpu.json")

    Args:
        device: a torch device with a sensor.
        interval_s: seconds between readings.
        board: this one, instead of the device's.
        clock: monotonic seconds.

    Raises:
        ConfigError: the device has no sensor here, with the reason.
    """

    def __init__(
        self,
        device: Any = "cuda:0",
        interval_s: float = 0.1,
        board: NvmlBoard | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Find the sensor; nothing is read before the block begins."""
        found = open_device(device) if board is None else board
        if isinstance(found, str) or found.sensor is None:
            why = found if isinstance(found, str) else found.why
            raise ConfigError(f"{device} cannot be recorded: {why}")
        self._board, self._sensor = found, found.sensor
        self._interval_s, self._clock = interval_s, clock
        self._readings: list[Reading] = []
        self._runs: list[RecordedRun] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="guava-recorder", daemon=True)
        self._began_s = 0.0

    def __enter__(self) -> Self:
        """Begin to read."""
        self._began_s = self._clock()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Read once more, stop, and give the sensor back."""
        self._stop.set()
        self._thread.join(_JOIN_S)
        if not self._thread.is_alive():  # else it hangs in the driver, which may not be closed under it
            self._board.close()

    @contextlib.contextmanager
    def run(self, name: str) -> Iterator[Callable[[EnergyRecord], None]]:
        """Name a stretch; call what is given with the run's energy record, to keep that too."""
        kept: list[EnergyRecord] = []
        begin_s = self._now_s()
        yield kept.append
        record, curves = (dict(kept[-1]), kept[-1].curves) if kept else ({}, {})
        self._runs.append(RecordedRun(name, begin_s, self._now_s(), record, curves))

    def recording(self) -> EnergyRecording:
        """Return what was read so far.

        Raises:
            ConfigError: the sensor gave fewer than two readings.
        """
        readings = tuple(self._readings)
        if len(readings) < 2:
            raise ConfigError(f"nothing to keep: {len(readings)} readings of {self._board.board.name}")
        today = datetime.date.today().isoformat()
        return EnergyRecording(
            self._board.board.name, today, local_versions()["torch"], self._sensor.method, readings, tuple(self._runs)
        )

    def _now_s(self) -> float:
        return round(self._clock() - self._began_s, 3)

    def _follow(self) -> None:
        while True:
            stopped = self._stop.wait(self._interval_s)
            with contextlib.suppress(SensorError):  # a gap, which is seen by its times
                reading = self._read()
                if not self._readings or reading.seconds > self._readings[-1].seconds:
                    self._readings.append(reading)
            if stopped:
                return

    def _read(self) -> Reading:
        value = self._sensor.read()
        seconds, gauges = self._now_s(), self._board.gauges()
        joules, watts = (value, gauges.power_w) if self._sensor.counts else (None, value)
        return Reading(seconds, joules, watts, gauges.busy, gauges.memory_used_bytes)
