"""A hub inside rank 0, for programs that bring a store of their own and nothing else."""

from __future__ import annotations

import os
import threading
import time

from torch._C._distributed_c10d import Store

from guava_nb.errors import ConfigError
from guava_nb.hub.relay import Relay
from guava_nb.link.listener import Listener
from guava_nb.link.options import LinkOptions
from guava_nb.link.session_events import Event, MessageArrived
from guava_nb.protocol.joincode import JoinCode

__all__ = ["EmbeddedHub", "host_of"]

#: A rank that was killed is told from one whose connection broke by staying away for so long.
_OPTIONS = LinkOptions(grace_s=8.0)
_LOOPBACK = ("", "localhost", "127.0.0.1", "::1")


def host_of(store: Store) -> str:
    """Where rank 0 should listen: GUAVA_HOST, or the host that the others already reach it by; else loopback.

    Args:
        store: what torch was given; a TCPStore knows its host.
    """
    inner = store
    while hasattr(inner, "underlying_store"):
        inner = inner.underlying_store
    host = os.environ.get("GUAVA_HOST") or getattr(inner, "host", "") or os.environ.get("MASTER_ADDR", "")
    return "127.0.0.1" if host in _LOOPBACK else str(host)


class EmbeddedHub:
    """A listener with a relay.

    Args:
        host: where the others reach this machine. Traffic that leaves the machine is encrypted; the join code is as
            secret as the store that carries it.
    """

    def __init__(self, host: str) -> None:
        self.relay = Relay()
        tls = host != "127.0.0.1"
        try:
            self._listener = Listener(_OPTIONS, self._on_event, host=host, tls=tls)
            self._listener.start()
        except ConfigError:
            # The host's name belongs to a router or a container's outside: listen everywhere.
            self._listener = Listener(_OPTIONS, self._on_event, host="", tls=tls)
            self._listener.start()
        self.code: JoinCode = self._listener.join_code(host)

    @property
    def local_code(self) -> JoinCode:
        """The same for rank 0 itself."""
        return self.code

    def _on_event(self, event: Event) -> None:
        if not self.relay.on_event(event) and isinstance(event, MessageArrived):
            event.done()

    def close_when_left(self, limit_s: float) -> None:
        """Close when the other members have left, or after `limit_s`."""
        until = time.monotonic() + limit_s
        pause = threading.Event()
        while self._listener.sessions and time.monotonic() < until:
            pause.wait(0.01)
        self.close()

    def close(self) -> None:
        """Close now."""
        self._listener.close("rank 0 is done")
