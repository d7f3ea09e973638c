"""Settings of a TCP socket, and how far each system lets us have them."""

from __future__ import annotations

import contextlib
import socket
from dataclasses import dataclass

__all__ = ["SocketOptions"]

_SMALLEST_BUFFER_BYTES = 64 << 10
#: Idle seconds before the first probe, and between probes, which also keep NAT entries alive.
_PROBE_S = 20


@dataclass(frozen=True)
class SocketOptions:
    """How a socket is tuned; small messages always go at once, and the system probes idle connections.

    Attributes:
        buffer_bytes: kernel buffer of each direction; None leaves it to the system, which follows the link. A fixed
            16 MB buffer is a queue of 6 s on an uplink of 20 Mbit/s.
        unsent_bytes: bytes that may wait in the kernel before they are sent (TCP_NOTSENT_LOWAT, where there is one), so
            that an urgent message does not queue behind megabytes of bulk; None for no limit.
    """

    buffer_bytes: int | None = None
    unsent_bytes: int | None = 256 << 10

    def apply_before_connect(self, sock: socket.socket) -> None:
        """Set what must stand before the handshake: buffers decide the window scale; accepted sockets inherit them."""
        if self.buffer_bytes is not None:
            _set_buffer(sock, socket.SO_RCVBUF, self.buffer_bytes)
            _set_buffer(sock, socket.SO_SNDBUF, self.buffer_bytes)

    def apply(self, sock: socket.socket) -> None:
        """Set the rest on a connected socket. A system that lacks an option goes without: none changes meaning."""
        _try(sock, socket.IPPROTO_TCP, "TCP_NODELAY", 1)
        _try(sock, socket.SOL_SOCKET, "SO_KEEPALIVE", 1)
        _try(sock, socket.IPPROTO_TCP, "TCP_KEEPIDLE", _PROBE_S)
        _try(sock, socket.IPPROTO_TCP, "TCP_KEEPINTVL", _PROBE_S)
        if self.unsent_bytes is not None:
            _try(sock, socket.IPPROTO_TCP, "TCP_NOTSENT_LOWAT", self.unsent_bytes)


def _set_buffer(sock: socket.socket, option: int, wanted_bytes: int) -> None:
    """Ask for a buffer and for half of it where the system has a lower cap (Linux cuts silently, macOS refuses)."""
    while wanted_bytes >= _SMALLEST_BUFFER_BYTES:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, option, wanted_bytes)
            return
        wanted_bytes //= 2


def _try(sock: socket.socket, level: int, name: str, value: int) -> None:
    option = getattr(socket, name, None)
    if option is not None:
        with contextlib.suppress(OSError):
            sock.setsockopt(level, option, value)
