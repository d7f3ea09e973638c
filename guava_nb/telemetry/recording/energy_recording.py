"""The file of a recording: readings of one GPU over time, and the energy records of the runs that went on meanwhile."""

from __future__ import annotations

import os
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec

from guava_nb.errors import ConfigError
from guava_nb.telemetry.energy_record import EnergyRecord

__all__ = ["EnergyRecording", "Reading", "RecordedRun"]

_MINE = "assets/gpu_energy.json"


class Reading(msgspec.Struct, frozen=True, array_like=True):
    """What the GPU showed at one moment; None where it did not.

    Attributes:
        seconds: since the recording began.
        joules: of its energy counter, which begins anywhere.
        watts: at this moment.
        busy: part of the last moments in which a kernel ran, 0 to 1.
    """

    seconds: float
    joules: float | None = None
    watts: float | None = None
    busy: float | None = None
    memory_used_bytes: int | None = None


class RecordedRun(msgspec.Struct, frozen=True):
    """One stretch with a name.

    Attributes:
        record: the values of the run's `EnergyRecord`, which the worker on this GPU measured itself.
        curves: watts over time per worker.
    """

    name: str
    begin_s: float
    end_s: float
    record: dict[str, Any] = {}
    curves: dict[str, list[tuple[float, float]]] = {}

    def energy_record(self) -> EnergyRecord:
        """Return what `run.energy_record()` was."""
        return EnergyRecord(self.record, self.curves)


class EnergyRecording(msgspec.Struct, frozen=True):
    """Readings of one GPU, in order of time, and what ran. `EnergyRecorder` makes it, `ReplaySensor` plays it.

    Attributes:
        device: the GPU's name.
        date: when it was recorded, "2026-01-31".
        torch: its version there.
        method: how it was read ("NVML energy counter").
    """

    device: str
    date: str
    torch: str
    method: str
    readings: tuple[Reading, ...]
    runs: tuple[RecordedRun, ...] = ()

    @property
    def seconds(self) -> float:
        """From its begin to the last reading."""
        return self.readings[-1].seconds

    def run(self, name: str) -> RecordedRun:
        """Find a run.

        Raises:
            ConfigError: there is none of this name.
        """
        for one in self.runs:
            if one.name == name:
                return one
        raise ConfigError(f"no run {name!r} in this recording; there are: {', '.join(one.name for one in self.runs)}")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON."""
        Path(path).write_bytes(msgspec.json.encode(self) + b"\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str] | None = None) -> EnergyRecording:
        """Read one.

        Args:
            path: None for the one that ships in this package, of a real GPU.

        Raises:
            ConfigError: there is no such file, or it is no recording.
        """
        file = files("guava_nb").joinpath(_MINE) if path is None else Path(path)
        try:
            found = msgspec.json.decode(file.read_bytes(), type=cls)
        except OSError as problem:
            raise ConfigError(f"the recording {file} cannot be read: {problem.strerror or problem}") from problem
        except (msgspec.ValidationError, msgspec.DecodeError) as problem:
            raise ConfigError(f"{file} is no recording of an EnergyRecorder: {problem}") from problem
        times = [reading.seconds for reading in found.readings]
        if len(times) < 2 or any(later <= earlier for earlier, later in zip(times, times[1:], strict=False)):
            raise ConfigError(f"{file} is no recording to play: it needs two readings or more, in order of time")
        return found
