"""The control groups of Linux that this process is in: what a container may take of its machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

__all__ = ["GROUPS", "OWN_GROUPS", "own_groups"]

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
