"""Settings of a link, in seconds and bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from guava_nb.config import DistributedConfig
from guava_nb.errors import ConfigError
from guava_nb.protocol.framing import Limits
from guava_nb.protocol.messages import Message
from guava_nb.transport.options import SocketOptions

__all__ = ["LinkOptions", "link_options"]


@dataclass(frozen=True)
class LinkOptions:
    """How patient a link is and how much it holds.

    Attributes:
        heartbeat_s: a control connection that sent nothing for so long sends a Ping; a bulk connection after 2.5 times as long
            (`silence_s` / 3 at most), and the dialler's 1.25 times later than the listener's.
        silence_s: a connection on which nothing came for so long counts as broken. Any byte is life; so is
            what another process says of the peer (`Vitals`).
        grace_s: how long a broken connection may stay away before the session is closed.
        connect_timeout_s: for one attempt to connect, from the name to `Attached`.
        window_bytes: most bytes per channel that may be on their way and not yet consumed.
        max_payload_bytes: the largest payload that is accepted from the peer.
        payload_of: gives the most payload bytes of one message by the session's id and its record; None: `max_payload_bytes`.
        socket: tuning of the TCP sockets.
        max_unauthenticated: connections that may stand at a listener before they have proved anything.
        auth_timeout_s: for TLS, proof and `Attach` of a newcomer together.
        linger_s: how long `Session.close` waits until what was sent before has gone out and the peer has heard.
        ack_delay_s: how long an acknowledgement may wait for company; of messages below 32 KiB a quarter second.
        rejoin_s: how long a worker whose session is over, and was not ended on purpose, tries to join again.
        compression: of payloads, where the peer reads it: "auto" where it was measured to pay, "on", or "off" both ways.
    """

    heartbeat_s: float = 2.0
    silence_s: float = 15.0
    grace_s: float = 30.0
    connect_timeout_s: float = 10.0
    window_bytes: int = 256 << 20
    max_payload_bytes: int = 64 << 30
    socket: SocketOptions = field(default_factory=SocketOptions)
    max_unauthenticated: int = 64
    auth_timeout_s: float = 10.0
    linger_s: float = 2.0
    ack_delay_s: float = 0.02
    compression: str = "auto"
    rejoin_s: float = 300.0
    payload_of: Callable[[bytes, Message], int] | None = None

    @property
    def most_unread_bytes(self) -> int | None:
        """Most bytes of one channel that may wait here; None: of a peer that is believed, as its payloads are.

        The peer's own window is not known here. One of the usual size is let in, whatever the size here.
        """
        return None if self.payload_of is None else max(self.window_bytes, LinkOptions.window_bytes)

    def limits(self, session_id: bytes, compressed: bool) -> Limits:
        """Return what is accepted of a session; `compressed`: this side offered to read compressed chunks."""
        payload_of = None if self.payload_of is None else partial(self.payload_of, session_id)
        return Limits(max_payload_bytes=self.max_payload_bytes, compressed=compressed, payload_of=payload_of)

    def __post_init__(self) -> None:
        """Refuse what cannot work.

        Raises:
            ConfigError: a value is out of its range; the message shows it.
        """
        for name in ("heartbeat_s", "silence_s", "connect_timeout_s", "window_bytes", "auth_timeout_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be above 0, not {getattr(self, name)}")
        if self.max_unauthenticated < 1:
            raise ConfigError(f"max_unauthenticated must be at least 1, not {self.max_unauthenticated}")
        if self.silence_s < 2 * self.heartbeat_s:
            raise ConfigError(
                f"silence_s ({self.silence_s:g}) must be at least twice heartbeat_s ({self.heartbeat_s:g}): "
                "else one late heartbeat breaks the connection"
            )


def link_options(config: DistributedConfig, payload_of: Callable[[bytes, Message], int] | None = None) -> LinkOptions:
    """Return the link settings of a configuration; `payload_of` as in `LinkOptions`."""
    return LinkOptions(
        payload_of=payload_of,
        heartbeat_s=config.heartbeat_s,
        silence_s=config.silence_s,
        grace_s=config.grace_s,
        connect_timeout_s=config.connect_timeout_s,
        window_bytes=config.window_mb << 20,
        compression=config.compression,
        rejoin_s=config.rejoin_timeout_s,
        socket=SocketOptions(buffer_bytes=int(config.socket_buffer_mb * (1 << 20)) or None),
    )
