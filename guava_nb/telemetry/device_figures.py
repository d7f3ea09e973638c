"""What a worker's newest energy report says of its device, under the names of a status."""

from __future__ import annotations

from typing import Any

from guava_nb.protocol.messages import Energy
from guava_nb.telemetry.window import total_joules

__all__ = ["device_now"]


def device_now(told: Energy, on_cpu: bool, at_work: bool) -> dict[str, Any]:
    """Return what a worker's newest report says of its device, under the names of a status.

    Args:
        on_cpu: its device is the processor, whose load counts then.
        at_work: it has a run; what its device did at the end of the last one says nothing of now.
    """
    spent = {"joules": total_joules(told.boards)}
    if not at_work:
        return spent
    of_gpu = told.memory_bytes is not None
    return {
        **spent,
        "power_w": told.power_w,
        "busy": told.cpu_busy if told.busy is None and on_cpu else told.busy,
        "memory_used_bytes": told.memory_used_bytes if of_gpu else told.host_memory_used_bytes,
        "memory_bytes": told.memory_bytes if of_gpu else told.host_memory_bytes,
    }
