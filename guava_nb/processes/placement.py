"""Where workers on this machine compute: one for each GPU while there are GPUs, then on the processor, whose cores they share."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["GROUPS", "OWN_GROUPS", "Placement", "allowed_cores", "describe", "own_groups", "place", "visible_gpus"]

# The control groups of Linux that this process is in: what a container may take of its machine.

GROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")


def own_groups(controller: str, groups: Path = GROUPS, own: Path = OWN_GROUPS) -> Iterator[tuple[Path, int]]:
    """Yield folder and version of each group that this process is in, innermost last; none where there are none.

    The outermost one holds where a path is hidden, as in a container.

    Args:
        controller: "memory" or "cpu"; groups of version 2 have both.
        groups: where they are mounted.
        own: the file that lists those of this process.
    """
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):  # no Linux, or a text that is none
        return
    for line in lines:
        if line.count(":") < 2:
            continue
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        version, folder = (1, groups / controller) if controllers else (2, groups)
        yield folder, version
        for name in path.split("/"):
            if name and name != "..":
                folder = folder / name
                yield folder, version


@dataclass(frozen=True, slots=True)
class Placement:
    """One worker's device, and torch's threads in it."""

    device: str
    threads: int | None


def allowed_cores(groups: Path = GROUPS, own: Path = OWN_GROUPS) -> int:
    """Return how many cores this process and those it starts may use: of the machine, its affinity and its time quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for folder, version in own_groups("cpu", groups, own):
        quota = _quota(folder, version)
        if quota is not None:
            cores = min(cores, max(1, math.floor(quota)))
    return cores


def _quota(folder: Path, version: int) -> float | None:
    """Return the processor time that a group may take in a second of the clock, in seconds; None: no limit is known."""
    try:
        if version == 2:
            most, period = (folder / "cpu.max").read_text(encoding="utf-8").split()
        else:
            most, period = (
                (folder / f"cpu.cfs_{name}_us").read_text(encoding="utf-8").strip() for name in ("quota", "period")
            )
        return None if most in ("max", "-1") else int(most) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None


def visible_gpus() -> list[str]:
    """Return the GPUs that torch sees here, without starting CUDA in this process."""
    import torch

    return [f"cuda:{index}" for index in range(torch.cuda.device_count())]


def place(
    count: int,
    device: str = "auto",
    threads: int | None = None,
    *,
    gpus: Sequence[str],
    cores: int,
    running: Collection[str] = (),
) -> list[Placement]:
    """Give each of some new workers a device and its threads.

    One core is left to this process, which has the data, sums and draws the panel.

    Args:
        count: new workers.
        device: "auto", or the device of all of them.
        threads: of each; None shares the cores out among all workers that run here then.
        gpus: that are here.
        cores: that may be used here.
        running: devices of the workers that run here already.
    """
    free = [gpu for gpu in gpus if gpu not in running]
    devices = [free[k] if k < len(free) else "cpu" for k in range(count)] if device == "auto" else [device] * count
    share = max(1, (cores - 1) // max(1, count + len(running)))
    return [Placement(one, threads or share) for one in devices]


def describe(names: Sequence[str], placements: Sequence[Placement]) -> str:
    """Say in one sentence what each worker takes."""
    words = [
        f"{name} takes {_device_text(one)}, {one.threads} thread{'' if one.threads == 1 else 's'}"
        for name, one in zip(names, placements, strict=True)
    ]
    return "; ".join(words)


def _device_text(placement: Placement) -> str:
    return "the processor" if placement.device == "cpu" else placement.device
