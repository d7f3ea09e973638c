"""How busy a machine is, by psutil: processor, memory, disk and network, as rates between two looks."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psutil

from guava_nb.protocol.messages import Energy
from guava_nb.telemetry.window import total_joules

__all__ = ["RATES", "MachineLoad", "MachineMeter", "device_now"]


def device_now(told: Energy, on_cpu: bool, at_work: bool) -> dict[str, Any]:
    """Return what a worker's newest report says of its device, under the names of a status.

    Args:
        on_cpu: its device is the processor; load and memory of its machine count then.
        at_work: it has a run; what its device did at the end of the last one says nothing of now.
    """
    spent = {"joules": total_joules(told.boards)}
    if not at_work:
        return spent
    return {
        **spent,
        "power_w": told.power_w,
        "busy": told.cpu_busy if on_cpu else told.busy,
        "memory_used_bytes": told.host_memory_used_bytes if on_cpu else told.memory_used_bytes,
        "memory_bytes": told.host_memory_bytes if on_cpu else told.memory_bytes,
    }


#: Names of a load's rates, in the order in which `Energy.rates` carries them.
RATES = ("disk_read_bytes_s", "disk_write_bytes_s", "network_out_bytes_s", "network_in_bytes_s")
#: Looks that follow each other faster than this give the same figures again.
SHORTEST_S = 0.5


@dataclass(frozen=True, slots=True)
class MachineLoad:
    """One look at a machine; None where the system does not tell, or before the second look.

    Attributes:
        cpu_busy: part of all cores' time, 0 to 1.
    """

    cpu_busy: float | None = None
    memory_used_bytes: int | None = None
    memory_bytes: int | None = None
    disk_read_bytes_s: float | None = None
    disk_write_bytes_s: float | None = None
    network_out_bytes_s: float | None = None
    network_in_bytes_s: float | None = None


class MachineMeter:
    """Gives the rates since its last look."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, source: Any = psutil) -> None:
        self._clock, self._source = clock, source
        self._last: tuple[float, dict[str, float]] | None = None
        self._load = MachineLoad()
        self._cores: Any = None  # seconds of all cores; psutil's own percentage says 0 to each thread that asks first

    def look(self) -> MachineLoad:
        """Return the load since the last look."""
        now = self._clock()
        if self._last is not None and now < self._last[0] + SHORTEST_S:
            return self._load  # too short for rates to mean anything
        counters = self._counters()
        rates: dict[str, float] = {}
        if self._last is not None and now > self._last[0]:
            before = self._last[1]
            seconds = now - self._last[0]
            rates = {k: max(0.0, v - before[k]) / seconds for k, v in counters.items() if k in before}
        self._last = (now, counters)
        before, self._cores = self._cores, self._ask(self._source.cpu_times)
        memory = self._ask(self._source.virtual_memory)
        self._load = MachineLoad(
            cpu_busy=_busy(before, self._cores),
            memory_used_bytes=None if memory is None else int(memory.total - memory.available),
            memory_bytes=None if memory is None else int(memory.total),
            **{name: rates.get(name) for name in RATES},
        )
        return self._load

    def _counters(self) -> dict[str, float]:
        disk = self._ask(self._source.disk_io_counters)
        network = self._ask(self._source.net_io_counters)
        found: dict[str, float] = {}
        if disk is not None:
            found |= {"disk_read_bytes_s": disk.read_bytes, "disk_write_bytes_s": disk.write_bytes}
        if network is not None:
            found |= {"network_out_bytes_s": network.bytes_sent, "network_in_bytes_s": network.bytes_recv}
        return found

    @staticmethod
    def _ask(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception:  # a container may hide any of them
            return None


def _busy(before: Any, now: Any) -> float | None:
    """Return which part of the cores' time between two looks was not idle; None where it cannot be told."""
    if before is None or now is None:
        return None
    passed = {name: max(0.0, b - a) for name, a, b in zip(now._fields, before, now, strict=True)}
    # A guest's time is in the host's, too.
    total = sum(seconds for name, seconds in passed.items() if name not in ("guest", "guest_nice"))
    return (total - passed["idle"] - passed.get("iowait", 0.0)) / total if total > 0 else None
