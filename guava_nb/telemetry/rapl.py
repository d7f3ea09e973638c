"""The processors of a Linux machine, by the counters of RAPL in /sys/class/powercap, where this user may read them.

Most systems let only root: then there is no figure, and no guess from a data sheet either.
"""

from __future__ import annotations

from pathlib import Path

from guava_nb.telemetry.energy_integral import EnergyIntegral
from guava_nb.telemetry.sensor import Board, Sensor, SensorError

__all__ = ["RaplSensor", "open_rapl"]

ROOT = Path("/sys/class/powercap")


class _Package:
    def __init__(self, folder: Path) -> None:
        self._file = folder / "energy_uj"
        self.wrap_j = int((folder / "max_energy_range_uj").read_text()) / 1e6

    def read(self) -> float:
        return int(self._file.read_text()) / 1e6


class RaplSensor(Sensor):
    """All processor packages of this machine together; each counter wraps by itself, so each is followed by itself."""

    method = "RAPL"
    counts = True
    refresh_s = 0.01

    def __init__(self, packages: list[Path], host_id: str) -> None:
        self.board = Board(f"{host_id}/cpu", f"{len(packages)} CPU package(s)")
        self._packages = [_Package(folder) for folder in packages]
        self._sums = [EnergyIntegral(counts=True, wrap_j=package.wrap_j) for package in self._packages]
        self._tick = 0

    def read(self) -> float:
        """Return joules since the first reading."""
        self._tick += 1
        try:
            for package, total in zip(self._packages, self._sums, strict=True):
                total.add(float(self._tick), package.read())
        except (OSError, ValueError) as problem:
            raise SensorError(f"RAPL cannot be read: {problem}") from problem
        return sum(total.total().joules for total in self._sums)


def open_rapl(host_id: str, root: Path = ROOT) -> RaplSensor | str:
    """Find the packages' counters; returns the sensor, or one sentence why not."""
    folders = []
    for folder in sorted(root.glob("intel-rapl:*")):  # AMD's processors stand under the same name
        name = folder / "name"
        # Sub-domains (core, dram, ...) have a second number; "psys" holds the packages and more.
        if folder.name.count(":") == 1 and name.is_file() and name.read_text().strip().startswith("package"):
            folders.append(folder)
    if not folders:
        return "this machine shows no RAPL counters"
    try:
        sensor = RaplSensor(folders, host_id)
        sensor.read()
    except PermissionError:
        return "RAPL's counters may be read by root only"
    except (OSError, ValueError, SensorError) as problem:
        cause = problem.__cause__ if isinstance(problem, SensorError) else problem
        if isinstance(cause, PermissionError):
            return "RAPL's counters may be read by root only"
        return f"RAPL cannot be read: {cause}"
    return sensor
