"""What a session tells its owner.

Events come to one callable, from the link's own threads, one at a time per session: `SessionOpened` first,
`SessionClosed` exactly once and last. The callable must be quick (usually `queue.SimpleQueue.put`): while it runs,
nothing is read from that peer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, Union

from guava_nb.errors import GuavaError
from guava_nb.link.hearing import Silences
from guava_nb.link.lane import Progress, Wire
from guava_nb.protocol.messages import Channel, Message

__all__ = [
    "Event",
    "MessageArrived",
    "SessionClosed",
    "SessionHandle",
    "SessionOpened",
    "SessionResumed",
    "SessionSuspect",
    "VisitArrived",
]

_DONE_LOCK = threading.Lock()  # held for two assignments: one for all messages is enough


class SessionHandle(Protocol):
    """A session as the owner of its events sees it; `guava_nb.link.session.Session` says what each member does."""

    session_id: bytes
    identity: bytes
    peer_address: str
    progress: Progress

    @property
    def state(self) -> str:
        """One of "joining", "open", "suspect", "closed"."""

    @property
    def round_trip_s(self) -> float | None:
        """Seconds to the peer and back."""

    @property
    def silent_s(self) -> float:
        """Seconds since anything came."""

    @property
    def silences(self) -> Silences:
        """How often nothing came for longer than heartbeats leave."""

    @property
    def rate_bytes_s(self) -> tuple[float | None, float | None]:
        """Bytes a second out and in."""

    @property
    def wire(self) -> Wire:
        """Bytes so far."""

    @property
    def saved(self) -> Wire:
        """Bytes that compression spared."""

    @property
    def in_outage(self) -> bool:
        """Whether the way to the peer broke."""

    def send(self, message: Message, channel: Channel, buffers: Sequence[memoryview] = ()) -> None:
        """Queue a message.

        Args:
            message: a record.
            channel: its traffic class.
            buffers: its payload; left alone until the peer has it.
        """

    def close(self, reason: str = "closed") -> None:
        """End the session."""

    def end(self, cause: GuavaError, by_peer: bool, farewell: str = "") -> None:
        """End the session at once; `farewell` is what the peer is told.

        Args:
            cause: what ended it.
            by_peer: the peer did.
            farewell: what the peer is told; "" for nothing.
        """

    def patience_s(self, now: float) -> float | None:
        """Return for how many seconds more the seat is kept; None while it is not in doubt."""


@dataclass(frozen=True)
class SessionOpened:
    """All connections of a session stand.

    Attributes:
        session: the session.
        resumed: this identity had a session at this listener before; that one is closed by now.
    """

    session: SessionHandle
    resumed: bool


@dataclass(frozen=True)
class SessionSuspect:
    """A connection broke; the session waits for it. What is sent meanwhile is kept."""

    session: SessionHandle
    cause: GuavaError


@dataclass(frozen=True)
class SessionResumed:
    """All connections stand again; nothing was lost or doubled."""

    session: SessionHandle


@dataclass(frozen=True)
class SessionClosed:
    """The session is over. `by_peer` tells who ended it; a grace period that ran out counts as False."""

    session: SessionHandle
    cause: GuavaError
    by_peer: bool


class MessageArrived:
    """A message of the session.

    Attributes:
        session: where it came.
        channel: its traffic class.
        message: the record.
        payload: its bytes; valid as long as the view or a slice of it is held. `b""` when there are none.
    """

    __slots__ = ("_consumed", "channel", "message", "payload", "session")

    def __init__(
        self,
        session: SessionHandle,
        channel: Channel,
        message: Message,
        payload: memoryview | bytes,
        consumed: Callable[[], None],
    ) -> None:
        self.session = session
        self.channel = channel
        self.message = message
        self.payload = payload
        self._consumed: Callable[[], None] | None = consumed

    def done(self) -> None:
        """Tell that the message is consumed, which lets the peer send more. Further calls do nothing."""
        with _DONE_LOCK:
            consumed, self._consumed = self._consumed, None
        if consumed is not None:
            consumed()

    def __repr__(self) -> str:
        return (
            f"MessageArrived({type(self.message).__name__} on {self.channel.name}, {len(self.payload)} payload bytes)"
        )


@dataclass(frozen=True)
class VisitArrived:
    """A visitor came with one message and left.

    Attributes:
        session_id: the session of the visitor's identity, live or past; b"" when there was none.
        message: what it said.
    """

    session_id: bytes
    message: Message


Event = Union[  # noqa: UP007 - an alias is evaluated at run time
    SessionOpened, SessionSuspect, SessionResumed, SessionClosed, MessageArrived, VisitArrived
]
