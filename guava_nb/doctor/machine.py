"""Checks of memory, cores and disk."""

from __future__ import annotations

import shutil
from pathlib import Path

from guava_nb.doctor.check import Check
from guava_nb.doctor.memory import WORKER_BYTES, memory_here
from guava_nb.processes.placement import allowed_cores

__all__ = ["check_cores", "check_disk", "check_memory"]

GIB = 1 << 30
ENOUGH_DISK_BYTES = GIB


def check_memory() -> Check:
    """Free memory, in workers that it holds."""
    memory = memory_here()
    fitting = memory.free_bytes // WORKER_BYTES
    whose = "that this host gives " if memory.is_limited else ""
    detail = (
        f"{memory.free_bytes / GIB:.1f} of {memory.total_bytes / GIB:.1f} GiB {whose}free, room for about {fitting} small "
        "workers"
    )
    if fitting < 2:
        return Check("memory", "warning", detail, "close other programs, or start fewer workers here")
    return Check("memory", "ok", detail)


def check_cores() -> Check:
    """Cores that this process may use, which in a container are fewer than the machine has."""
    cores = allowed_cores()
    if cores < 2:
        return Check(
            "cores", "warning", f"{cores}: orchestrator and workers share it", "expect slow steps on this machine"
        )
    return Check("cores", "ok", str(cores))


def check_disk(folder: Path | None = None) -> Check:
    """Free space where checkpoints go by default: the current folder."""
    place = folder or Path.cwd()
    free = shutil.disk_usage(place).free
    detail = f"{free / GIB:.1f} GiB free in {place}"
    if free < ENOUGH_DISK_BYTES:
        return Check("disk", "warning", detail, "free some space, or set checkpoint_dir to another disk")
    return Check("disk", "ok", detail)
