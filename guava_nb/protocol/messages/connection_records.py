"""Records about the connection itself: they attach it, keep it alive, measure it and end it."""

from __future__ import annotations

from typing import ClassVar

from guava_nb.protocol.messages.wire_types import Message

__all__ = ["Ack", "Attach", "Attached", "Goodbye", "Ping", "Pong", "Refused"]


class Attach(Message, frozen=True, kw_only=True):
    """Dialler to listener, first record after the mutual proof: this connection belongs to that session.

    Attributes:
        session_id: 16 bytes that name the session; public.
        identity: 32 secret bytes; who shows the same ones again resumes the session.
        purpose: "control", "bulk", "report" (a short visit that tells of a worker's death), "measure" (one that
            measures the line), or "wheel" (one that fetches this package; its bytes follow as they are).
        incarnation: how many times this session's connection of this purpose was dialled before.
        received: highest sequence number received whole, per channel of this connection.
        last_generation: generation of the last committed step, -1 before the first.
        last_step: last committed step, -1 before the first.
        last_kind: kind number of the last message handled.
        codecs: how chunks that come here may be compressed.
        begun: payload bytes that have come of the message after the last whole one, per channel: go on behind them.
    """

    NUMBER: ClassVar[int] = 1

    session_id: bytes
    identity: bytes
    purpose: str
    incarnation: int
    received: dict[int, int]
    last_generation: int = -1
    last_step: int = -1
    last_kind: int = 0
    codecs: tuple[str, ...] = ()
    begun: dict[int, int] = {}


class Attached(Message, frozen=True, kw_only=True):
    """Listener to dialler: accepted; `received`, `codecs` and `begun` as in `Attach`.

    Attributes:
        resumed: the session was known.
        outage_s: behind a tunnel, how long it keeps all of them when the tunnel broke; 0 without one. Dial for so long.
    """

    NUMBER: ClassVar[int] = 2

    resumed: bool
    received: dict[int, int]
    last_generation: int = -1
    last_step: int = -1
    last_kind: int = 0
    codecs: tuple[str, ...] = ()
    outage_s: float = 0.0
    begun: dict[int, int] = {}


class Refused(Message, frozen=True):
    """Either side: no, for this reason; `next_step` tells a person what to do."""

    NUMBER: ClassVar[int] = 3

    code: str
    reason: str
    next_step: str = ""


class Ping(Message, frozen=True):
    """Asks for a `Pong` with the same number; fills silence."""

    NUMBER: ClassVar[int] = 4

    sent_ns: int


class Pong(Message, frozen=True):
    """Answers a `Ping`."""

    NUMBER: ClassVar[int] = 5

    sent_ns: int


class Ack(Message, frozen=True):
    """Everything up to `sequence` on `channel` has been consumed: its bytes count no longer against the window."""

    NUMBER: ClassVar[int] = 6

    channel: int
    sequence: int


class Goodbye(Message, frozen=True):
    """This side ends the session on purpose; nothing follows."""

    NUMBER: ClassVar[int] = 7

    reason: str
    error: bool = False
