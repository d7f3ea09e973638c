"""A session with one peer: two lanes that survive the breaking of their connections.

States: "joining" until both lanes stood once, "open", "suspect" while a lane is broken, "closed". Changes of state and
the events that tell of them happen under one lock (`_events`), so that they are told in the order in which they
happened; under it a message is also judged and handed over, so that none of a replaced connection comes after one of
its successor. Locks are taken in the order `_events`, lane; a thread that only sends does not take `_events`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from guava_nb.errors import GuavaError, LinkBroken, LinkClosed, LinkTimeout, ProtocolError
from guava_nb.link.connection import Connection
from guava_nb.link.hearing import Hearing, Silences
from guava_nb.link.lane import BULK, CONTROL, Lane, Progress, Wire, lane_of
from guava_nb.link.options import LinkOptions
from guava_nb.link.session_events import (
    Event,
    MessageArrived,
    SessionClosed,
    SessionOpened,
    SessionResumed,
    SessionSuspect,
)
from guava_nb.protocol.compression import CODECS
from guava_nb.protocol.framing import Arrived, Decoder, Incoming
from guava_nb.protocol.messages import Attach, Attached, Channel, Goodbye, Message
from guava_nb.protocol.state import Role
from guava_nb.transport.stream import Stream

__all__ = ["Session"]

logger = logging.getLogger(__name__)

_JOIN_S = 5.0


class Session:
    """Messages to and from one peer, each once and in order per channel. Made by `dial` or by a `Listener`.

    Attributes:
        session_id: 16 bytes, public.
        peer_address: where the peer was last seen.
        progress: of this side; the owner sets its fields.
        peer_progress: of the peer, as of the newest connection.
    """

    role = Role.LISTENER

    def __init__(
        self,
        session_id: bytes,
        identity: bytes,
        peer_address: str,
        options: LinkOptions,
        on_event: Callable[[Event], None],
    ) -> None:
        self.session_id = session_id
        self.peer_address = peer_address
        self.progress, self.peer_progress = Progress(), Progress()
        self.identity = identity
        self.close_cause: GuavaError | None = None
        self._options, self._on_event = options, on_event
        self._events = threading.RLock()
        self._state = "joining"
        self._closing = False
        self._teller: int | None = None  # thread that is telling an event
        self._hearing = Hearing(options.heartbeat_s)
        self._lanes: dict[str, Lane[Connection]] = {
            name: Lane(name, options.window_bytes, options.compression, options.most_unread_bytes, self._hearing)
            for name in (CONTROL, BULK)
        }
        self._connections: list[Connection] = []  # all whose threads may still run
        self._began = time.monotonic()

    def __repr__(self) -> str:
        return f"<Session {self.session_id.hex()[:8]} with {self.peer_address}, {self._state}>"

    # ---------------------------------------------------------------------------------------------- what owners call

    @property
    def state(self) -> str:
        """One of "joining", "open", "suspect", "closed"."""
        return self._state

    @property
    def round_trip_s(self) -> float | None:
        """Seconds from here to the peer and back on the control connection, smoothed; None until measured."""
        return self._lanes[CONTROL].round_trip_s

    @property
    def silent_s(self) -> float:
        """Seconds since anything came from the peer, whose heartbeats fill silence."""
        return time.monotonic() - self._hearing.heard_at

    @property
    def silences(self) -> Silences:
        """How often nothing came from the peer for longer than its heartbeats leave."""
        return self._hearing.silences(time.monotonic())

    @property
    def rate_bytes_s(self) -> tuple[float | None, float | None]:
        """Bytes a second that the line to the peer does at least, and that came from it lately; None until seen.

        What comes is as much as the peer sends, so it says how fast the line is only while that is busy; the peer knows.
        """
        lane = self._lanes[BULK]
        return lane.delivery.bytes_s, lane.arrivals.bytes_s

    @property
    def saved(self) -> Wire:
        """Bytes that compression spared so far, per channel, both ways."""
        lanes = self._lanes.values()
        return Wire(
            {channel: sum(lane.out_saved[channel] for lane in lanes) for channel in Channel},
            {channel: sum(lane.in_saved[channel] for lane in lanes) for channel in Channel},
        )

    @property
    def wire(self) -> Wire:
        """Bytes sent and received so far, per channel, as they are on the wire: compressed where they were."""
        lanes = self._lanes.values()
        return Wire(
            {channel: sum(lane.out_bytes[channel] for lane in lanes) for channel in Channel},
            {channel: sum(lane.in_bytes[channel] for lane in lanes) for channel in Channel},
        )

    def send(self, message: Message, channel: Channel, buffers: Sequence[memoryview] = ()) -> None:
        """Queue a message; never waits for the network. While the session is suspect it is kept.

        Args:
            message: any record of the session.
            channel: its traffic class.
            buffers: the payload is their concatenation. They are not copied: their owner leaves them alone until the
                peer's answer shows that it has the message.

        Raises:
            LinkClosed: the session is closed; the message was not queued.
            LocalProtocolError: the message cannot be sent.
        """
        lane = self._lanes[lane_of(channel)]
        batch = None
        with lane.lock:
            if self._closing or self._state == "closed":
                raise LinkClosed(f"the session with {self.peer_address} is closed: {self.close_cause or 'closed here'}")
            lane.outbox.enqueue(message, channel, buffers)
            connection = lane.connection
            if connection is not None:
                batch = connection.claim()
        if batch and connection is not None:
            connection.send_claimed(batch)

    def backlog_bytes(self, channel: Channel | None = None) -> int:
        """Bytes that wait to be sent on one channel, or on all."""
        lanes = self._lanes.values() if channel is None else (self._lanes[lane_of(channel)],)
        total = 0
        for lane in lanes:
            with lane.lock:
                total += lane.outbox.backlog_bytes(channel)
        return total

    def close(self, reason: str = "closed") -> None:
        """End the session: what was sent before goes out first, for at most `linger_s`, then the peer is told.

        Leaves no thread and no socket behind. May be called again. From within an event it returns at once, because
        the other connection's reader may be waiting for that event to be over; the rest is done in the background.
        """
        self.begin_close(reason)
        until = time.monotonic() + self._options.linger_s
        if self._teller == threading.get_ident():
            name = f"guava-close-{self.session_id.hex()[:8]}"
            threading.Thread(target=self.end_close, args=(until, reason), name=name, daemon=True).start()
        else:
            self.end_close(until, reason)

    def begin_close(self, reason: str) -> None:
        """First half of `close`: refuse new messages and let the connections say goodbye."""
        with self._events:
            if self._closing or self._state == "closed":
                return
            self._closing = True
            for connection in self._standing():
                connection.finish(Goodbye(reason))

    def end_close(self, until: float, reason: str) -> None:
        """Second half of `close`: wait for the goodbyes until a monotonic time, then end."""
        for connection in self._standing():
            connection.join(until)
        self.end(LinkClosed(f"closed here: {reason}"), by_peer=False)
        self._wake()
        self._join()

    # ------------------------------------------------------------------------------- what dialler and listener call

    def end(self, cause: GuavaError, by_peer: bool, farewell: str = "") -> None:
        """End the session at once.

        Args:
            cause: why, for the event.
            by_peer: whether the peer wanted it.
            farewell: what the peer is told, as an error; nothing when empty.
        """
        with self._events:
            if self._state == "closed":
                return
            was_open = self._state != "joining"
            self._state, self.close_cause = "closed", cause
            standing = self._standing()
            for lane in self._lanes.values():
                with lane.lock:
                    lane.connection = None
                    lane.outbox.let_go()  # its owner may keep the session, for its figures
                lane.begun = {}
            self._forget()
            if was_open:
                self._tell(SessionClosed(self, cause, by_peer))
        for connection in standing:
            if farewell:
                connection.say(Goodbye(farewell, error=True))
            connection.abort(LinkClosed(f"the session with {self.peer_address} is over"))
        self._wake()

    def fence(self, name: str) -> tuple[dict[int, int], dict[int, Incoming]]:
        """Take a lane from its connection: nothing of that one is accepted any more.

        Returns:
            What the lane has received, for `Attach` or `Attached`, and what came of the message after it, by channel: for
            the decoder of the next connection.
        """
        lane = self._lanes[name]
        with self._events:
            with lane.lock:
                old = lane.connection
                received = lane.inbox.received()
            if old is not None:
                cause = LinkBroken(f"a newer {name} connection of the same session took over")
                self._lose(lane, cause)
                old.abort(cause)
        begun = lane.begun if old is None else old.begun()
        # What came whole after the lane was taken from its connection was dropped, so what follows it is not the next.
        lane.begun = {c: one for c, one in begun.items() if one.header.sequence == received.get(c, 0) + 1}
        return received, lane.begun

    def adopt(
        self, name: str, stream: Stream, decoder: Decoder, peer: Attach | Attached, early: Iterable[Arrived] = ()
    ) -> None:
        """Let a new connection carry a lane; it starts at once unless the session is still joining.

        Args:
            name: of the lane.
            stream, decoder: the connection, and what reads its frames.
            peer: what the other side said when it came.
            early: messages that came with that.

        Raises:
            LinkClosed: the session was closed meanwhile.
            RemoteProtocolError: the peer's account of what it received cannot be true; the session is over then.
        """
        lane = self._lanes[name]
        with self._events:
            if self._closing or self._state == "closed":
                raise LinkClosed(f"the session was closed: {self.close_cause or 'closed here'}")
            connection = Connection(
                *(stream, decoder, self.role, lane, self._options),
                *(partial(self._arrived, lane), partial(self._over, lane), early),
            )
            try:
                self._install(lane, connection, peer)
            except ProtocolError as problem:
                self.end(problem, by_peer=False, farewell=str(problem))
                raise
            if isinstance(peer, Attach):
                lane.incarnation = peer.incarnation
            self.peer_address = stream.peer
            self.peer_progress = Progress(peer.last_generation, peer.last_step, peer.last_kind)
            if self._state != "joining":
                connection.start()
                self._resumed_if_whole()

    def open(self, resumed: bool) -> None:
        """Both lanes stand for the first time: tell it, then begin to read."""
        with self._events:
            if self._state != "joining":
                return
            self._state = "open"
            self._tell(SessionOpened(self, resumed))
            for connection in self._standing():
                connection.start()

    def incarnation(self, name: str) -> int:
        """Number of the newest connection of a lane, from 0; -1 before the first."""
        return self._lanes[name].incarnation

    @property
    def whole(self) -> bool:
        """Whether both lanes have a connection."""
        return len(self._standing()) == len(self._lanes)

    def vouch(self) -> None:
        """Another process sees that the peer's is there, so its silence says nothing for `silence_s` from now on."""
        until = time.monotonic() + self._options.silence_s
        for lane in self._lanes.values():
            lane.vouched_until = until
        self._wake()

    def patience_s(self, now: float) -> float | None:
        """Seconds until a lane has been away too long, 0 when it has; None when nothing is awaited."""
        with self._events:
            if self._state == "joining":
                return max(0.0, self._began + self._options.auth_timeout_s - now)
            lost_at = self.lost_at
            return None if lost_at is None else max(0.0, self._kept_until(lost_at) - now)

    @property
    def lost_at(self) -> float | None:
        """Since when a connection of an open session is away, on the monotonic clock; None when both stand."""
        with self._events:
            lost = [lane.lost_at for lane in self._lanes.values() if lane.lost_at is not None]
            return min(lost) if lost and self._state == "suspect" else None

    @property
    def in_outage(self) -> bool:
        """Whether it is waited for longer than a peer that is gone: what broke is the way to it, as far as one can tell."""
        return False

    def _kept_until(self, lost_at: float) -> float:
        """When to give up what is away since `lost_at`."""
        return lost_at + self._options.grace_s

    def give_up(self, last: GuavaError | None = None) -> None:
        """The grace period is over."""
        lost_at = self.lost_at
        waited_s = self._options.grace_s if lost_at is None else round(self._kept_until(lost_at) - lost_at, 1)
        problem = LinkTimeout(
            f"{self.peer_address} was away for more than {waited_s:g} s, and this side waits for it no longer"
            + (f" (last try: {last})" if last is not None else "")
        )
        problem.__cause__ = last
        self.end(problem, by_peer=False)

    # ---------------------------------------------------------------------------------------------------- what happens

    def _install(self, lane: Lane[Connection], connection: Connection, peer: Attach | Attached) -> None:
        with lane.lock:
            lane.outbox.resume(peer.received, peer.begun)
            lane.reads_compressed = bool(set(peer.codecs) & set(CODECS))
            lane.connection, lane.begun = connection, {}
            lane.lost_at = lane.acks_due_at = None
            for ack in lane.inbox.resume():
                connection.queue(ack)
        self._connections.append(connection)

    def _arrived(self, lane: Lane[Connection], connection: Connection, arrived: Arrived) -> None:
        with self._events:
            if lane.connection is not connection:
                return  # a newer one took over
            with lane.lock:
                if not lane.inbox.accept(arrived):
                    return
            consumed = partial(lane.consumed, arrived, self._options.ack_delay_s)
            self._tell(MessageArrived(self, arrived.channel, arrived.message, arrived.payload, consumed))

    def _over(self, lane: Lane[Connection], connection: Connection) -> None:
        """A reader has ended."""
        with self._events:
            self._connections.remove(connection)
            if lane.connection is not connection:
                return
            if connection.goodbye is not None:
                lane.goodbye = connection.goodbye
            lane.begun = connection.begun()
            self._lose(lane, connection.cause)
            farewell = next((other.goodbye for other in self._lanes.values() if other.goodbye is not None), None)
            if self._closing:
                return  # `close` waits for this and tells the end
            if farewell is not None:
                # What the peer sent before its goodbye may still be on its way on the other lane.
                if not self._standing():
                    self.end(_cause_of(farewell, self.peer_address), by_peer=True)
            elif isinstance(connection.cause, ProtocolError):
                self.end(connection.cause, by_peer=False, farewell=str(connection.cause))

    def _lose(self, lane: Lane[Connection], cause: GuavaError | None) -> None:
        """Take a lane from its connection, and tell if that makes the session suspect."""
        with lane.lock:
            lane.connection = None
            lane.lost_at = time.monotonic()
        fatal = cause is None or isinstance(cause, ProtocolError) or self._closing
        if self._state == "open" and not fatal and cause is not None:
            self._state = "suspect"
            self._tell(SessionSuspect(self, cause))
        self._wake()

    def _resumed_if_whole(self) -> None:
        if self._state == "suspect" and self.whole:
            self._state = "open"
            self._tell(SessionResumed(self))

    def _tell(self, event: Event) -> None:
        """Hand an event over. A bug of the owner must not stop the reader, on whom the session's life depends."""
        outer, self._teller = self._teller, threading.get_ident()
        try:
            self._on_event(event)
        except Exception:
            logger.exception("the owner of %r failed on %s", self, type(event).__name__)
        finally:
            self._teller = outer

    def _forget(self) -> None:
        """The session is over: its keeper may let it go."""

    def _wake(self) -> None:
        """Something changed that the watch over grace periods must look at."""

    def _standing(self) -> list[Connection]:
        return [lane.connection for lane in self._lanes.values() if lane.connection is not None]

    def _join(self) -> None:
        until = time.monotonic() + _JOIN_S
        for connection in list(self._connections):
            connection.join(until)


def _cause_of(goodbye: Goodbye, peer: str) -> GuavaError:
    if goodbye.error:
        return LinkBroken(f"{peer} ended the session: {goodbye.reason}")
    return LinkClosed(f"{peer} ended the session: {goodbye.reason}")
