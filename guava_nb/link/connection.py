"""One connection after its handshake: a thread that reads, a thread that writes; no caller waits for them.

Sending. A message queued by any thread goes out from that thread when it is small, nothing waits before it, and the
stream takes it at once: no thread is woken for it. All else is sent by the writer, most urgent channel first, in frames
of at most 1 MiB; a more urgent message goes between two frames of a long one. Who sends holds the claim (`_sending`),
which is what a stream asks for: one sender at a time.

Ending. The first thread that notices that it is over calls `abort`; the reader, woken by it, tells the session. So events come
from readers only, and never from a thread that merely wanted to send.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from guava_nb.errors import GuavaError, JoinRefused, LinkBroken, LinkClosed, LinkTimeout, LocalProtocolError
from guava_nb.link.adaptive_compression import Frame
from guava_nb.link.lane import CONTROL, TIMED_BYTES, Lane
from guava_nb.link.options import LinkOptions
from guava_nb.protocol.framing import CHUNK_BYTES, Arrived, Decoder, Incoming, OutgoingMessage
from guava_nb.protocol.messages import Ack, Channel, Goodbye, Message, Ping, Pong, Refused
from guava_nb.protocol.shown_text import cleaned
from guava_nb.protocol.state import Event, Role, State, advance, received, sent
from guava_nb.transport.stream import Buffer, Stream

__all__ = ["Connection"]

logger = logging.getLogger(__name__)

_INLINE_BYTES = 8 << 10  # what a stream that "can send now" takes without waiting
_BATCH_BYTES = 64 << 10  # small frames are sent together up to here
_ROUND_TRIP_WEIGHT = 0.25
_JOIN_S = 10.0
_READ_OUT_S = 2.0  # for a reader that was woken; it may be telling an owner, who has to be quick
_HEARTBEATS = frozenset({Ping, Pong})


class _Frames:
    """A message of which not all frames are sent."""

    __slots__ = ("began_at", "began_s", "channel", "frames", "sequence")

    def __init__(self, message: OutgoingMessage, began_at: int) -> None:
        self.began_s, self.began_at = time.monotonic(), began_at
        self.channel = message.channel
        self.sequence = message.sequence
        self.frames: Iterator[list[memoryview | bytes]] = message.frames()


class Connection:
    """Carries a lane until it breaks.

    Args:
        stream: proved and attached; the connection closes it.
        decoder: has read everything up to `Attach` or `Attached`.
        role: which side this is.
        lane: what to carry.
        options: patience.
        on_message: called by the reader for every message of the session, in order.
        on_over: called by the reader, once, when nothing more comes; `cause` and `goodbye` tell why.
        early: messages that were read together with `Attached`.

    Attributes:
        cause: why it ended; None while it stands or when the peer said goodbye.
        goodbye: the peer's goodbye.
    """

    def __init__(
        self,
        stream: Stream,
        decoder: Decoder,
        role: Role,
        lane: Lane[Connection],
        options: LinkOptions,
        on_message: Callable[[Connection, Arrived], None],
        on_over: Callable[[Connection], None],
        early: Iterable[Arrived] = (),
    ) -> None:
        self.cause: GuavaError | None = None
        self.goodbye: Goodbye | None = None
        self._stream, self._decoder, self._role, self._lane, self._options = stream, decoder, role, lane, options
        self._on_message, self._on_over, self._early = on_message, on_over, tuple(early)
        self._state = State.OPEN
        self._changed = threading.Condition(lane.lock)
        self._urgent: deque[OutgoingMessage] = deque()
        self._open: list[_Frames] = []  # long messages under way, the most urgent last
        self._farewell: Goodbye | None = None
        self._started = self._sending = self._aborted = False
        self._read_out = threading.Event()
        self._heartbeat_s = _heartbeat_s(role, lane.name, options)
        self._last_sent = time.monotonic() - self._heartbeat_s  # the first Ping goes at once and measures
        names = f"{lane.name}-{stream.peer}"
        self._reader = threading.Thread(target=self._read, name=f"guava-read-{names}", daemon=True)
        self._writer = threading.Thread(target=self._write, name=f"guava-write-{names}", daemon=True)

    @property
    def peer(self) -> str:
        """Address of the other end."""
        return self._stream.peer

    def start(self) -> None:
        """Begin to read and write."""
        self._started = True
        self._stream.set_deadline(self._options.silence_s)
        self._writer.start()
        self._reader.start()

    # ------------------------------------------------------------------------------------------ ending, from any thread

    def abort(self, cause: GuavaError) -> None:
        """End at once; the first cause counts."""
        with self._lane.lock:
            self._abort(cause)

    def _abort(self, cause: GuavaError) -> None:
        if self.cause is None:
            self.cause = cause
        self._aborted = True
        self._changed.notify_all()
        self._stream.shutdown()
        if not self._started:
            self._stream.close()  # no reader will

    def say(self, record: Message) -> None:
        """Send a record about the connection itself, at once if that cannot wait for the network."""
        with self._lane.lock:
            batch = self.claim(record)
        if batch:
            self.send_claimed(batch)

    def finish(self, goodbye: Goodbye) -> None:
        """Say goodbye after all that waits; the peer ends the connection when it has heard."""
        with self._lane.lock:
            self._farewell = goodbye
            self._changed.notify_all()

    def join(self, until: float) -> bool:
        """Wait for both threads to end, until a monotonic time; True when they have, or when this is one of them."""
        for thread in (self._reader, self._writer):
            if thread is threading.current_thread() or not self._started:
                continue
            thread.join(max(0.0, until - time.monotonic()))
            if thread.is_alive():
                return False
        return True

    def begun(self) -> dict[int, Incoming]:
        """Messages of which a part came, by channel, for the next connection; this one was aborted, or its reader asks.

        Nothing, if its reader does not come to its end: then it might still write to their memory.
        """
        return self._decoder.let_go() if not self._started or self._read_out.wait(_READ_OUT_S) else {}

    # ---------------------------------------------------------------------- sending; the caller holds the lane's lock

    def wake(self) -> None:
        """Lock held: let the writer look again."""
        self._changed.notify()

    def queue(self, record: Message) -> None:
        """Lock held: queue a record about the connection itself, ahead of all messages."""
        channel = Channel.HEARTBEAT if type(record) in _HEARTBEATS else Channel.CONTROL
        if type(record) is Pong:  # only the newest answer counts: a peer that asks and never reads must not fill memory
            self._urgent = deque(waiting for waiting in self._urgent if type(waiting.message) is not Pong)
        self._urgent.append(OutgoingMessage(record, channel, 0))

    def claim(self, record: Message | None = None) -> list[Buffer | Frame] | None:
        """Lock held: queue `record` and take what can go out at once.

        Returns:
            Buffers that the caller must give to `send_claimed` after releasing the lock; None when the writer does it.
        """
        if record is not None:
            self.queue(record)
        if self._sending or self._state is not State.OPEN or self._aborted:
            return None
        small = not self._open and self._lane.outbox.backlog_bytes() <= _INLINE_BYTES
        batch = self._take_batch() if small and self._stream.can_send_now() else None
        if batch:
            self._sending = True
        else:
            self._changed.notify()
        return batch

    def send_claimed(self, batch: list[Buffer | Frame]) -> None:
        """Lock not held: send what `claim` gave. A failure breaks the connection, which the reader tells."""
        sent_bytes = planned_bytes = 0
        try:
            planned_bytes = sum(map(len, batch))
            buffers = self._squeezed(batch)
            sent_bytes = sum(map(len, buffers)) if buffers is not batch else planned_bytes
            if sent_bytes <= _INLINE_BYTES and len(buffers) > 1:
                buffers = [b"".join(buffers)]  # cheaper than what each layer below does with each of them
            self._stream.send_all(buffers)
        except GuavaError as problem:
            self.abort(problem)
        except (ValueError, BufferError) as problem:
            self.abort(_payload_gone(problem))
        except BaseException as problem:
            # Half a frame may be out, as when a cell was interrupted here: only a new connection can go on.
            self.abort(LinkBroken(f"sending to {self.peer} was interrupted: {problem!r}"))
            raise
        finally:
            self._sent(sent_bytes, planned_bytes)

    def _squeezed(self, batch: list[Buffer | Frame]) -> list[Buffer]:
        """The batch as it goes out. Compressing takes milliseconds, so it is done here, by who holds the claim."""
        if Frame not in map(type, batch):
            return batch  # type: ignore[return-value]
        buffers: list[Buffer] = []
        for part in batch:
            if not isinstance(part, Frame):
                buffers.append(part)
                continue
            packed = self._lane.squeezer.squeeze(part, self._lane.delivery.bytes_s)
            buffers += packed
            saved = sum(map(len, part.buffers)) - sum(map(len, packed))
            with self._lane.lock:
                self._lane.out_bytes[part.channel] -= saved
                self._lane.out_saved[part.channel] += saved
        return buffers

    def _sent(self, sent_bytes: int, planned_bytes: int) -> None:
        with self._lane.lock:
            self._sending = False
            self._lane.delivery.sent(sent_bytes, planned_bytes)
            self._last_sent = time.monotonic()
            if self._open or self._urgent or self._aborted or self._farewell or self._lane.outbox.backlog_bytes():
                self._changed.notify_all()

    def _take_batch(self) -> list[Buffer | Frame]:
        """Take the next frames: one big one, or small ones together."""
        batch: list[Buffer | Frame] = []
        size, rate = 0, self._lane.delivery.bytes_s
        try:
            while size < _BATCH_BYTES and (frame := self._next_frame()) is not None:
                channel, buffers = frame
                frame_bytes = sum(map(len, buffers))
                self._lane.out_bytes[channel] += frame_bytes
                size += frame_bytes
                if self._lane.reads_compressed and self._lane.squeezer.wants(channel, frame_bytes, rate):
                    batch.append(Frame(channel, buffers))
                else:
                    batch += buffers
        except (ValueError, BufferError) as problem:
            self._abort(_payload_gone(problem))
            return []
        return batch

    def _next_frame(self) -> tuple[Channel, list[memoryview | bytes]] | None:
        if self._state is not State.OPEN:
            return None
        if self._urgent:
            message = self._urgent.popleft()
            return message.channel, next(message.frames())
        while True:
            fresh = self._lane.outbox.next_sendable(before=self._open[-1].channel if self._open else None)
            if fresh is not None:
                if fresh.payload_bytes <= CHUNK_BYTES:
                    if fresh.payload_bytes >= TIMED_BYTES:
                        self._lane.delivery.finished(
                            fresh.channel,
                            fresh.sequence,
                            time.monotonic(),
                            self._lane.delivery.position,
                            fresh.total_bytes - fresh.begun_bytes,
                        )
                    return fresh.counted_as, next(fresh.frames())
                self._open.append(_Frames(fresh, self._lane.delivery.position))
            if not self._open:
                return self._goodbye_frame()
            current = self._open[-1]
            frame = next(current.frames, None)
            if frame is not None:
                return current.channel, frame
            self._lane.delivery.finished(current.channel, current.sequence, current.began_s, current.began_at)
            self._open.pop()

    def _goodbye_frame(self) -> tuple[Channel, list[memoryview | bytes]] | None:
        if self._farewell is None or self._lane.outbox.backlog_bytes():
            return None
        message = OutgoingMessage(self._farewell, Channel.CONTROL, 0)
        self._state = advance(self._state, self._role, sent(Goodbye))
        return message.channel, next(message.frames())

    # ------------------------------------------------------------------------------------------------------ the writer

    def _write(self) -> None:
        while (batch := self._wait_for_batch()) is not None:
            self.send_claimed(batch)

    def _wait_for_batch(self) -> list[Buffer | Frame] | None:
        with self._lane.lock:
            while self._state is State.OPEN and not self._aborted:
                if not self._sending:
                    self._queue_what_is_due()
                    batch = self._take_batch()
                    if batch:
                        self._sending = True
                        return batch
                self._changed.wait(self._idle_s())
        return None

    def _queue_what_is_due(self) -> None:
        now = time.monotonic()
        if self._lane.acks_due_at is not None and now >= self._lane.acks_due_at:
            self._lane.acks_due_at = None
            for ack in self._lane.inbox.due_acks():
                self.queue(ack)
        if now - self._last_sent >= self._heartbeat_s and not self._urgent:
            self.queue(Ping(time.monotonic_ns()))

    def _idle_s(self) -> float:
        next_at = self._last_sent + self._heartbeat_s
        if self._sending:  # a caller sends from its own thread and wakes us if anything is left
            next_at = time.monotonic() + self._heartbeat_s
        if self._lane.acks_due_at is not None:
            next_at = min(next_at, self._lane.acks_due_at)
        return max(0.001, next_at - time.monotonic())

    # ------------------------------------------------------------------------------------------------------ the reader

    def _read(self) -> None:
        try:
            self._read_to_the_end()
        except GuavaError as problem:
            self.abort(problem)
        except Exception as problem:
            logger.exception("the reader of %s failed", self.peer)
            error = LocalProtocolError(f"a bug in the reader of {self.peer}: {problem!r}")
            error.__cause__ = problem
            self.abort(error)
        self._read_out.set()
        with self._lane.lock:
            self._aborted = True  # also where the peer said goodbye: the writer ends
            self._changed.notify_all()
        self._stream.shutdown()
        self._writer.join(_JOIN_S)
        with self._lane.lock:
            self._changed.wait_for(lambda: not self._sending, _JOIN_S)
        self._stream.close()
        self._on_over(self)

    def _read_to_the_end(self) -> None:
        for arrived in self._early:
            self._take(arrived)
        while self.goodbye is None:
            count = self._receive()
            if not count:
                self._end_of_stream()
                return
            for arrived in self._decoder.buffer_updated(count):
                self._take(arrived)
            if self._decoder.error is not None:
                raise self._decoder.error

    def _receive(self) -> int:
        """Wait for bytes, for longer than `silence_s` only while the peer's process is known to be there."""
        while True:
            try:
                count = self._stream.recv_into(self._decoder.get_buffer())
                self._lane.hearing.heard(time.monotonic())
                return count
            except LinkTimeout:
                if time.monotonic() > self._lane.vouched_until:
                    raise

    def _end_of_stream(self) -> None:
        with self._lane.lock:
            self._state = advance(self._state, self._role, Event.ENDED)
            state = self._state
        if state is State.CLOSED:
            raise LinkClosed(f"the connection to {self.peer} was closed here")
        where = " in the middle of a message" if self._decoder.unfinished else ""
        raise LinkBroken(f"{self.peer} closed the {self._lane.name} connection{where}")

    def _take(self, arrived: Arrived) -> None:
        # Texts about the connection are for people, on either side; those of a session may be code: its owner knows who spoke.
        message = arrived.message if arrived.sequence else cleaned(arrived.message)
        with self._lane.lock:
            if not arrived.sequence or self._state is not State.OPEN:  # a session's message leaves an open one open
                self._state = advance(self._state, self._role, received(type(message)))
            self._lane.in_bytes[arrived.channel] += arrived.wire_bytes
            self._lane.in_saved[arrived.channel] += max(0, arrived.total_bytes - arrived.wire_bytes)
            self._lane.arrivals.count(arrived.wire_bytes, time.monotonic())
        if arrived.sequence:
            self._on_message(self, arrived)
        elif isinstance(message, Ack):
            with self._lane.lock:
                self._lane.outbox.acked(message.channel, message.sequence)
                self._lane.delivery.acknowledged(message.channel, message.sequence, time.monotonic())
                if self._lane.outbox.backlog_bytes():
                    self._changed.notify()
        elif isinstance(message, Ping):
            self.say(Pong(message.sent_ns))
        elif isinstance(message, Pong):
            self._measure(message)
        elif isinstance(message, Goodbye):
            self.goodbye = message
        elif isinstance(message, Refused):
            raise JoinRefused(f"{self.peer} refused: {message.reason}", message.code)

    def _measure(self, pong: Pong) -> None:
        seconds = (time.monotonic_ns() - pong.sent_ns) / 1e9
        if seconds < 0:
            return
        known = self._lane.round_trip_s
        self._lane.round_trip_s = seconds if known is None else known + _ROUND_TRIP_WEIGHT * (seconds - known)


def _heartbeat_s(role: Role, lane: str, options: LinkOptions) -> float:
    """Return after how many seconds without a sent byte a connection sends a Ping.

    The listener asks, and the dialler's answer is its sign of life; the dialler asks where it hears nothing. Were both to ask,
    and as often on the bulk connection, 1,000 workers would cost the hub 4,000 messages a second instead of 1,400.
    """
    every_s = options.heartbeat_s
    if lane != CONTROL:  # and never so seldom that one late Ping breaks it
        every_s = max(every_s, min(2.5 * every_s, options.silence_s / 3))
    return every_s if role is Role.LISTENER else 1.25 * every_s


def _payload_gone(problem: Exception) -> LocalProtocolError:
    error = LocalProtocolError(f"a payload was released before the peer had it: {problem}")
    error.__cause__ = problem
    return error
