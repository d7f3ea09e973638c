"""Which sensors stand for which torch devices on this machine."""

from __future__ import annotations

import platform
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from guava_nb.telemetry.energy_integral import EnergyIntegral
from guava_nb.telemetry.nvml import NvmlBoard, open_board
from guava_nb.telemetry.sensor import Board, Sensor, SensorError

__all__ = ["RaplSensor", "host_key", "open_device", "open_rapl", "sensors_of"]

# The processors of a Linux machine, by the counters of RAPL in /sys/class/powercap, where this user may read them.
#
# Most systems let only root: then there is no figure, and no guess from a data sheet either.

ROOT = Path("/sys/class/powercap")


class _Package:
    def __init__(self, folder: Path) -> None:
        self._file = folder / "energy_uj"
        self.wrap_j = int((folder / "max_energy_range_uj").read_text(encoding="utf-8")) / 1e6

    def read(self) -> float:
        return int(self._file.read_text(encoding="utf-8")) / 1e6


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
        if (
            folder.name.count(":") == 1
            and name.is_file()
            and name.read_text(encoding="utf-8").strip().startswith("package")
        ):
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


def host_key() -> str:
    """Tell machines apart, for keys of boards. Board UUIDs are unique by themselves; a machine's processors have none."""
    return socket.gethostname()


def open_device(device: Any) -> NvmlBoard | str:
    """Find the board of a CUDA device; returns one sentence why not where it has none.

    Args:
        device: torch device, its text, or its number.
    """
    import torch

    name = f"cuda:{device}" if isinstance(device, int) else str(device)
    if not name.startswith("cuda"):
        return f"{name} has no energy sensor that this version reads"
    try:
        facts = torch.cuda.get_device_properties(torch.device(name))
    except Exception as problem:
        return f"{name}: {problem}"
    return open_board(str(getattr(facts, "uuid", "")), host_key())


def sensors_of(devices: Sequence[Any] | None = None) -> tuple[list[Sensor], tuple[tuple[str, str], ...]]:
    """Find the sensors of devices, and of the machine's processors.

    Args:
        devices: None for all GPUs that torch sees; no GPU is looked for where torch is not loaded.

    Returns:
        The sensors, and (device, why) of what has none.
    """
    found: list[Sensor] = []
    missing: list[tuple[str, str]] = []
    torch = sys.modules.get("torch")
    if devices is None:
        there = torch is not None and torch.cuda.is_available()
        devices = [f"cuda:{index}" for index in range(torch.cuda.device_count())] if torch is not None and there else []
    for device in devices:
        name = f"cuda:{device}" if isinstance(device, int) else str(device)
        if name.startswith("cpu"):
            continue
        board = open_device(device)
        if isinstance(board, str):
            missing.append((name, board))
        elif board.sensor is None:
            missing.append((name, board.why))
            board.close()
        else:
            found.append(board.sensor)
    processors = open_rapl(host_key()) if platform.system() == "Linux" else "RAPL is read on Linux only"
    if isinstance(processors, str):
        missing.append(("cpu", processors))
    else:
        found.append(processors)
    return found, tuple(missing)
