"""A sensor that plays a recording: for machines that measure nothing, and for code that shall see known figures."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable

from guava_nb.errors import ConfigError
from guava_nb.telemetry.recording.energy_recording import EnergyRecording, Reading
from guava_nb.telemetry.sensor import Board, Sensor, SensorError

__all__ = ["ReplaySensor"]


class ReplaySensor(Sensor):
    """Says now what a GPU said then, second for second: `EnergyMeter(sensors=[ReplaySensor(recording)])`.

    The figures are the GPU's of that day and tell nothing of this machine; name and method say so. It starts with the first
    call of `read`; between two readings of the recording it gives the straight line, after the last one it cannot be read.

    Args:
        recording: see `EnergyRecording.load`.
        begin_s: where in the recording to start, in seconds.
        clock: monotonic seconds.

    Raises:
        ConfigError: the recording has nothing there.
    """

    def __init__(
        self, recording: EnergyRecording, begin_s: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Find the figures; nothing plays yet."""
        if not 0 <= begin_s < recording.seconds:
            raise ConfigError(
                f"begin_s {begin_s!r}: the recording of {recording.device} plays from 0 to {recording.seconds:.1f} s"
            )
        self.counts = all(reading.joules is not None for reading in recording.readings)
        kept = [reading for reading in recording.readings if self.counts or reading.watts is not None]
        if len(kept) < 2:
            raise ConfigError(f"the recording of {recording.device} has neither joules nor watts to play")
        self.board = Board(
            f"recording/{recording.device}/{recording.date}", f"{recording.device}, recorded {recording.date}"
        )
        self.method = f"replayed: {recording.method} of {recording.date}"
        self._readings, self._times = kept, [reading.seconds for reading in kept]
        self._begin_s, self._clock = max(begin_s, self._times[0]), clock
        self._started_s: float | None = None

    def read(self) -> float:
        """Return joules of the counter, or watts, at this moment of the recording.

        Raises:
            SensorError: the recording is over.
        """
        earlier, later, part = self._between()
        pair = (earlier.joules, later.joules) if self.counts else (earlier.watts, later.watts)
        first, second = (float(value or 0.0) for value in pair)
        return first + part * (second - first)

    def power(self) -> float | None:
        """Return the watts of the newest reading at this moment of the recording."""
        try:
            return self._between()[0].watts
        except SensorError:
            return None

    def _between(self) -> tuple[Reading, Reading, float]:
        """The readings around this moment, and how far it is from one to the other."""
        now_s = self._clock()
        if self._started_s is None:
            self._started_s = now_s
        at_s = self._begin_s + now_s - self._started_s
        if at_s > self._times[-1]:
            raise SensorError(f"the recording is over after {self._times[-1]:.1f} s")
        k = min(bisect_right(self._times, at_s), len(self._times) - 1)
        earlier, later = self._readings[k - 1], self._readings[k]
        return earlier, later, (at_s - earlier.seconds) / (later.seconds - earlier.seconds)
