"""Room for sockets: many systems give a process 256 or 1,024 descriptors, and a worker at the hub takes two."""

from __future__ import annotations

import contextlib
import errno

try:
    import resource
except ImportError:  # Windows has no such limit
    resource = None  # type: ignore[assignment]

__all__ = ["advice_if_full", "make_room"]

_MOST = 1 << 16


def make_room(number: int) -> None:
    """Raise this process's limit of descriptors, as far as the system lets us, where `number` shows that half are in use.

    `number` is a descriptor that was just opened: the system gives the lowest that is free.
    """
    if resource is None:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft != resource.RLIM_INFINITY and 2 * number >= soft and soft < most:
        with contextlib.suppress(OSError, ValueError):  # macOS has a second limit, of the kernel
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(4 * soft, most), hard))


def advice_if_full(problem: OSError) -> str:
    """Return what to do where a system call failed for want of descriptors; "" where it failed for another reason."""
    if problem.errno not in (errno.EMFILE, errno.ENFILE) or resource is None:
        return ""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        f"this process may hold {soft} files and sockets, and each worker takes two: start Python with more (ulimit -n, or "
        "LimitNOFILE= of its service)"
    )
