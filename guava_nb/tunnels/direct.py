"""No tunnel at all: both sides on one machine, or a machine that others reach by itself."""

from __future__ import annotations

import socket

from guava_nb.tunnels.tunnel import LOOPBACK, Address, Tunnel

__all__ = ["DirectTunnel", "LocalTunnel", "own_address"]


class _NoTunnel(Tunnel):
    """Nothing runs: an address is all there is to know."""

    def __init__(self) -> None:
        self._at: Address | None = None

    def stop(self) -> None:
        """Nothing runs."""
        self._at = None

    def alive(self) -> bool:
        """Whether it was started."""
        return self._at is not None

    def address(self) -> Address | None:
        """Where others connect."""
        return self._at


class LocalTunnel(_NoTunnel):
    """Both sides run on this machine."""

    name = "local"

    def start(self, port: int) -> Address:
        """Return the loopback's address."""
        self._at = Address(LOOPBACK, port)
        return self._at


class DirectTunnel(_NoTunnel):
    """Others reach this machine by itself, as in one network, over a VPN, or behind a forwarded port.

    Args:
        host: name or address by which they do; None takes the address that this machine has in its network, which need not
            be the one that others far away see.
        port: where they knock, when a router forwards another number; None is the port that is listened on.
    """

    name = "direct"
    bind = "0.0.0.0"

    def __init__(self, host: str | None = None, port: int | None = None) -> None:
        super().__init__()
        self._host, self._port = host, port
        if host is not None and ":" in host:
            self.bind = ""  # an IPv6 address is reached on all interfaces of both families only
        self._is_known = True

    def start(self, port: int) -> Address:
        """Return that address; the listener must be bound beyond the loopback, as `bind` says."""
        self._is_known = self._host is None or _is_known(self._host)
        self._at = Address(self._host or own_address(), self._port or port)
        return self._at

    def note(self) -> str:
        """Where others look for this machine, when no address was given; and a name that may be misspelt."""
        at = self._at
        if at is not None and not self._is_known:
            return f"the name {at.host} is not known on this machine: check it, unless workers know it (--tunnel direct:HOST)"
        if at is None or self._host is not None:
            return ""
        return (
            f"workers look for this machine at {at.host}, its address in its own network; if they are elsewhere, name the one "
            "by which they reach it: --tunnel direct:HOST or direct:HOST:PORT"
        )


def own_address() -> str:
    """The address that this machine sends from; nothing is sent to find out. Its name where it has no network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # set aside for documentation: routed like any address far away
        except OSError:
            return socket.gethostname()
        return str(probe.getsockname()[0])


def _is_known(host: str) -> bool:
    try:
        socket.getaddrinfo(host, None)
    except (OSError, UnicodeError):
        return False
    return True
