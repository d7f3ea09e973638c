"""Which sensors stand for which torch devices on this machine."""

from __future__ import annotations

import platform
import socket
import sys
from collections.abc import Sequence
from typing import Any

from guava_nb.telemetry.nvml import NvmlBoard, open_board
from guava_nb.telemetry.rapl import open_rapl
from guava_nb.telemetry.sensor import Sensor

__all__ = ["host_key", "open_device", "sensors_of"]


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
