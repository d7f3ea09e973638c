"""Sockets must not live on in forked children.

A DataLoader worker forked from a notebook kernel inherits every open socket. The connection then stays open after the
kernel is gone, and the peer waits for a dead process. So each socket is remembered weakly and its copy is closed in the
child. The copy is only closed, never shut down: a shutdown would reach through to the parent's connection.
"""

from __future__ import annotations

import os
import socket
import weakref

__all__ = ["close_in_children", "own_descriptors"]

_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def close_in_children(sock: socket.socket) -> None:
    """Close the inherited copy of `sock` in every child that this process forks from now on."""
    _sockets.add(sock)


def own_descriptors() -> set[int]:
    """Return the descriptors of all sockets that `transport` has opened in this process."""
    return {number for sock in list(_sockets) if (number := sock.fileno()) >= 0}


def _close_copies() -> None:
    for sock in list(_sockets):
        sock.close()
    _sockets.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_copies)
