"""What outlives a connection: one lane's queues, windows and counters.

A session has two lanes, control and bulk; each is carried by one connection at a time. Everything here is guarded by
the lane's lock, which is never held while waiting for the network or while an event is told.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from guava_nb.link.adaptive_compression import AdaptiveCompression, Frame
from guava_nb.link.hearing import Hearing
from guava_nb.link.rate import Delivery, RateMeter
from guava_nb.protocol.framing import Arrived, Incoming
from guava_nb.protocol.messages import CONTROL_CHANNELS, Ack, Channel, Goodbye
from guava_nb.protocol.resume import Inbox, Outbox
from guava_nb.transport.stream import Buffer

__all__ = ["BULK", "CONTROL", "TIMED_BYTES", "Lane", "Progress", "Wire", "lane_of"]

CONTROL, BULK = "control", "bulk"
TIMED_BYTES = 32 << 10  # messages from this size on tell the rate of the line
#: Seconds that acknowledgements of shorter ones may wait: each wakes the writer here and the reader there, which would be half of
#: what a small question and its answer cost.
_SHORT_DELAY_S = 0.25


def lane_of(channel: Channel) -> str:
    """The lane that carries a channel."""
    return CONTROL if channel in CONTROL_CHANNELS else BULK


@dataclass(frozen=True)
class Wire:
    """Bytes of a session so far, headers included, before TLS; what was sent twice counts twice.

    Attributes:
        out_bytes: sent, per channel.
        in_bytes: received, per channel.
    """

    out_bytes: dict[Channel, int]
    in_bytes: dict[Channel, int]


@dataclass
class Progress:
    """How far a side has come; told to the peer whenever a connection is attached.

    Attributes:
        last_generation: generation of the last committed step, -1 before the first.
        last_step: last committed step, -1 before the first.
        last_kind: kind number of the last message handled.
    """

    last_generation: int = -1
    last_step: int = -1
    last_kind: int = 0


class Carrier(Protocol):
    """What a lane needs of the connection that carries it."""

    def claim(self, record: Ack) -> list[Buffer | Frame] | None:
        """Lock held: queue an acknowledgement; gives what the caller must pass to `send_claimed`."""

    def wake(self) -> None:
        """Lock held: let the writer look again."""

    def send_claimed(self, batch: list[Buffer | Frame]) -> None:
        """Lock not held: send what `claim` gave."""


C = TypeVar("C", bound=Carrier)


class Lane(Generic[C]):
    """One lane of a session.

    Attributes:
        name: "control" or "bulk", also the purpose in `Attach`.
        lock: guards all of it.
        connection: what carries it now; None while it is broken.
        lost_at: when it broke (monotonic seconds); None while it stands or before it first stood.
        incarnation: number of its newest connection, from 0; -1 before the first.
        goodbye: the peer's last word on it.
        begun: messages of which the broken connection brought a part, by channel; the next one goes on with them.
        round_trip_s: smoothed, from Ping to Pong; None before the first.
        hearing: notes when bytes come; all lanes of a session share it.
        vouched_until: until then a silent peer is not taken for gone, because another process sees that it is there.
        acks_due_at: when acknowledgements held back must go; None when there are none.
        delivery: how fast bytes arrive there; arrivals: and here.
        squeezer: decides what goes out compressed, where the peer of the present connection `reads_compressed`.
        out_saved, in_saved: bytes that compression spared, per channel.
    """

    def __init__(
        self, name: str, window_bytes: int, compression: str, limit_bytes: int | None, hearing: Hearing
    ) -> None:
        self.name = name
        self.lock = threading.Lock()
        self.outbox = Outbox(window_bytes)
        self.inbox = Inbox(window_bytes, limit_bytes)
        self.connection: C | None = None
        self.lost_at: float | None = None
        self.incarnation = -1
        self.goodbye: Goodbye | None = None
        self.begun: dict[int, Incoming] = {}
        self.round_trip_s: float | None = None
        self.hearing = hearing
        self.vouched_until = float("-inf")
        self.acks_due_at: float | None = None
        self.delivery, self.arrivals = Delivery(), RateMeter()
        self.squeezer, self.reads_compressed = AdaptiveCompression(compression), False
        self.out_bytes = dict.fromkeys(Channel, 0)
        self.in_bytes = dict.fromkeys(Channel, 0)
        self.out_saved = dict.fromkeys(Channel, 0)
        self.in_saved = dict.fromkeys(Channel, 0)

    def consumed(self, arrived: Arrived, ack_delay_s: float) -> None:
        """The owner is done with a message: acknowledge it, now or in company."""
        batch = None
        with self.lock:
            ack = self.inbox.consumed(arrived.channel, arrived.sequence)
            connection = self.connection
            if connection is None:
                return  # the next connection repeats every acknowledgement
            # A short message takes no room of the window to speak of, and its sender measures no rate by it.
            delay_s = ack_delay_s if arrived.total_bytes >= TIMED_BYTES else max(ack_delay_s, _SHORT_DELAY_S)
            due_at = time.monotonic() + delay_s
            if ack is not None:
                batch = connection.claim(ack)
            elif self.acks_due_at is None or due_at < self.acks_due_at:
                self.acks_due_at = due_at
                connection.wake()
        if batch:
            connection.send_claimed(batch)
