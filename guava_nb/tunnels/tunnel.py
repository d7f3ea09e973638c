"""What every tunnel can do: forward from an address that others reach to a port of this machine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

__all__ = ["LOOPBACK", "Address", "Tunnel"]

LOOPBACK = "127.0.0.1"


class Address(NamedTuple):
    """Where others connect.

    Attributes:
        host: name or address; IPv6 without brackets.
        scheme: "tcp" where bytes pass as they are; "ws" or "wss" where only WebSocket passes, in plain HTTP or in the
            operator's own TLS. What guava_nb encrypts itself runs inside all three.
    """

    host: str
    port: int
    scheme: str = "tcp"


class Tunnel(ABC):
    """Something that forwards connections from an address others can reach to a port of this machine.

    What passes is encrypted from end to end, so a tunnel needs no trust. A package of its own can bring one: an entry
    point of the group `guava_nb.tunnels` names a class whose constructor takes the text behind the colon of
    `--tunnel NAME:WHAT` ("" without one).

    Attributes:
        name: as in `--tunnel NAME`.
        bind: address that the listener must listen on for this tunnel; the loopback, except where others reach this
            machine by itself.
    """

    name: str = ""
    bind: str = LOOPBACK

    @abstractmethod
    def start(self, port: int) -> Address:
        """Forward to a port of the loopback; returns where others connect. Started already: returns where it is now.

        Blocks until it forwards, at most about half a minute; leaves nothing running when it raises.

        Raises:
            ConfigError: it cannot; one sentence that says why and what to do next.
        """

    @abstractmethod
    def stop(self) -> None:
        """Forward no more, and leave nothing running. Safe to call twice, and before `start`."""

    def alive(self) -> bool:
        """Whether it forwards, as far as this side can tell within a second; from any thread. False before `start`."""
        return True

    def address(self) -> Address | None:
        """Where others connect now, which may change while it is alive; None when it does not forward. From any thread."""
        return None

    def note(self) -> str:
        """What people must know or do to come through it, in a sentence or two; "" when nothing. From any thread."""
        return ""
