"""How much memory programs may still take here: of the machine, or of what a host gives to its container."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from guava_nb.config.units import show_bytes
from guava_nb.errors import ConfigError
from guava_nb.processes.placement import GROUPS, OWN_GROUPS, own_groups

__all__ = ["WORKER_BYTES", "Memory", "check_room_for", "memory_here"]

#: What one more worker on the CPU takes, with torch loaded and a small model: 240 to 275 MB measured, rounded up. Its own pages
#: only: libraries are there once for all.
WORKER_BYTES = 300_000_000
#: Of a control group: what it may use, what it uses, and the name of the part of that which the kernel gives back when asked.
_FILES = {
    2: ("memory.max", "memory.current", "inactive_file"),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


@dataclass(frozen=True, slots=True)
class Memory:
    """What is there, and what of it is free.

    Attributes:
        is_limited: a control group allows less than the machine has, as in the container of a host.
    """

    free_bytes: int
    total_bytes: int
    is_limited: bool = False


def memory_here(groups: Path = GROUPS, own: Path = OWN_GROUPS) -> Memory:
    """Return the memory that this process and those it starts may use.

    Args:
        groups: where the control groups of Linux are mounted; elsewhere there are none.
        own: which of them this process belongs to.
    """
    import psutil

    machine = psutil.virtual_memory()
    found = Memory(int(machine.available), int(machine.total))
    for limit, used in _limits(groups, own):
        if 0 < limit < machine.total:
            total = min(limit, found.total_bytes)
            found = Memory(min(found.free_bytes, max(0, limit - used)), total, is_limited=True)
    return found


def check_room_for(count: int, option: str, memory: Memory) -> None:
    """Refuse to start more workers on this machine than its whole memory has room for: it would stand still for all.

    Raises:
        ConfigError: naming `option`, the one that asks for them.
    """
    if count * WORKER_BYTES > memory.total_bytes:
        raise ConfigError(
            f"{option} {count}: a worker takes about {show_bytes(WORKER_BYTES)} beside its model, and this machine has "
            f"{show_bytes(memory.total_bytes)} in all, room for {memory.total_bytes // WORKER_BYTES}: give a smaller number"
        )


def _limits(groups: Path, own: Path) -> Iterator[tuple[int, int]]:
    """Limit and use of each group that this process is in."""
    for folder, version in own_groups("memory", groups, own):
        yield from _limit(folder, version)


def _limit(folder: Path, version: int) -> Iterator[tuple[int, int]]:
    most, now, reclaimable = _FILES[version]
    try:
        limit, used = (
            (folder / most).read_text(encoding="utf-8").strip(),
            int((folder / now).read_text(encoding="utf-8")),
        )
        counts = dict(line.split() for line in (folder / "memory.stat").read_text(encoding="utf-8").splitlines())
    except (OSError, ValueError):
        return
    if limit != "max":
        yield int(limit), used - int(counts.get(reclaimable, 0))
