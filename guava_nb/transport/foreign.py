"""Sockets in this process that others opened: torch's libraries keep theirs to themselves and never give them up on request.

A thread that waits inside such a library is woken by the end of what comes in; connections are found by their addresses.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Collection
from pathlib import Path
from typing import Any

from guava_nb.transport.forks import own_descriptors

__all__ = ["Stream", "connections", "expect_life", "shut_down"]

#: Descriptor, address here, address there.
Stream = tuple[int, tuple[Any, ...], tuple[Any, ...]]

#: The first of these folders that exists lists the descriptors of the process.
_LISTS = (Path("/proc/self/fd"), Path("/dev/fd"))


def connections(addresses: Collection[str]) -> set[Stream]:
    """Return the connections between two of these addresses that are not this package's own."""
    ours, found = own_descriptors(), set()
    for number in _descriptors() - ours:
        with contextlib.suppress(OSError), _borrowed(number) as sock:
            stream = _ends(number, sock)
            if stream is not None and stream[1][0] in addresses and stream[2][0] in addresses:
                found.add(stream)
    return found


def shut_down(streams: Collection[Stream]) -> int:
    """End what comes in, so that threads that wait for it are woken and close the connections; returns how many still were there.

    What goes out is left alone. gloo answers what it has read already, and where it cannot it forgets what it was to send: its
    thread then waits for that until its time limit.
    """
    count = 0
    for number, local, peer in streams:
        with contextlib.suppress(OSError), _borrowed(number) as sock:
            if _ends(number, sock) == (number, local, peer):  # the number may be another socket's by now
                sock.shutdown(socket.SHUT_RD)
                count += 1
    return count


def expect_life(streams: Collection[Stream], silence_s: int) -> None:
    """Have the kernel break connections whose peer's machine does not answer for so long.

    Without this a cut network is noticed after minutes, or never by one who only receives.
    """
    idle, every = max(1, silence_s // 2), max(1, silence_s // 6)
    wanted = {
        "TCP_KEEPIDLE": idle,
        "TCP_KEEPALIVE": idle,  # the same on macOS
        "TCP_KEEPINTVL": every,
        "TCP_KEEPCNT": 3,
        "TCP_USER_TIMEOUT": silence_s * 1000,
    }
    for number, *_ in streams:
        with contextlib.suppress(OSError), _borrowed(number) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in wanted.items():
                if hasattr(socket, name):
                    sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _descriptors() -> set[int]:
    folder = next((folder for folder in _LISTS if folder.exists()), None)
    return set() if folder is None else {int(name) for name in os.listdir(folder) if name.isdigit()}


def _borrowed(number: int) -> socket.socket:
    """A copy of a descriptor as a socket; closing it leaves the original alone.

    Raises:
        OSError: it is no socket, or gone.
    """
    copy = os.dup(number)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise


def _ends(number: int, sock: socket.socket) -> Stream | None:
    if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM:
        return None
    return number, sock.getsockname(), sock.getpeername()  # who listens has no peer, and raises
