"""What a session remembers so that a broken connection costs nothing: what was sent, what came, what was consumed.

Knows sequences, windows and acknowledgements of one set of channels; knows nothing of bytes, threads or clocks. Both
halves of a set live as long as the session and outlive its connections. Callers bring their own lock.

Credit is counted per channel: were it shared, batches that are not read yet would keep out the very gradients whose
arrival makes a thread read them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from guava_nb.errors import LocalProtocolError, RemoteProtocolError
from guava_nb.protocol.framing import UNSEQUENCED, Arrived, OutgoingMessage
from guava_nb.protocol.messages import Ack, Channel, Message

__all__ = ["Inbox", "Outbox"]

_ACK_EVERY_MESSAGES = 64
_ACK_WINDOW_SHARE = 4


class _SendQueue:
    """One channel's messages: waiting, sent, and those the peer holds without having consumed them."""

    __slots__ = ("held", "last", "sent", "sent_up_to", "unacked_bytes", "waiting", "waiting_bytes")

    def __init__(self) -> None:
        self.waiting: deque[OutgoingMessage] = deque()
        self.waiting_bytes = 0
        # Sent and not acknowledged, oldest first: sequence, size, and the message until the peer is known to hold it.
        self.sent: deque[tuple[int, int, OutgoingMessage | None]] = deque()
        self.unacked_bytes = 0
        self.last = 0  # sequence given last
        self.sent_up_to = 0  # highest sequence that ever went out; re-sending does not lower it
        self.held = 0  # the peer said that it holds everything up to here: those buffers are gone

    def wait(self, message: OutgoingMessage) -> None:
        self.waiting.append(message)
        self.waiting_bytes += message.total_bytes

    def may_send(self, window_bytes: int) -> bool:
        """Whether the window has room for the first that waits; there is one."""
        return not self.sent or self.unacked_bytes + self.waiting[0].total_bytes <= window_bytes

    def take(self) -> OutgoingMessage:
        message = self.waiting.popleft()
        self.waiting_bytes -= message.total_bytes
        self.sent.append((message.sequence, message.total_bytes, message))
        self.unacked_bytes += message.total_bytes
        self.sent_up_to = max(self.sent_up_to, message.sequence)
        return message

    def forget_consumed(self, sequence: int) -> int:
        """Returns the bytes that need not be sent any more."""
        spared_bytes = 0
        while self.sent and self.sent[0][0] <= sequence:
            self.unacked_bytes -= self.sent.popleft()[1]
        # A message put back by `resume` may turn out to have arrived over the old connection after all.
        while self.waiting and self.waiting[0].sequence <= sequence:
            spared_bytes += self.waiting.popleft().total_bytes
        self.waiting_bytes -= spared_bytes
        return spared_bytes

    def put_back(self, received: int, begun_bytes: int) -> int:
        """Returns the bytes that wait again; of the first message the peer has `begun_bytes`."""
        again_bytes = 0
        self.held = received
        # What an Ack over the other connection named meanwhile is not among `sent` any more.
        while self.sent and self.sent[-1][0] > received:
            _, size, message = self.sent.pop()
            assert message is not None
            self.waiting.appendleft(message)
            again_bytes += size
        self.unacked_bytes -= again_bytes
        self.waiting_bytes += again_bytes
        # The peer holds the rest: their bytes stay in the window, their buffers can go.
        self.sent = deque((sequence, size, None) for sequence, size, _ in self.sent)
        if self.waiting and self.waiting[0].sequence == received + 1:
            self.waiting[0].begun_bytes = begun_bytes
        return again_bytes

    def check_begun(self, received: int, begun_bytes: int) -> bool:
        """Whether so many payload bytes of the message after `received` can have come; one consumed by now is not judged."""
        if begun_bytes < 0 or (begun_bytes and received >= self.sent_up_to):
            return False
        queued = (message for message in (*(sent[2] for sent in self.sent), *self.waiting) if message is not None)
        return all(
            message.sequence != received + 1 or begun_bytes < max(1, message.payload_bytes) for message in queued
        )

    def let_go(self) -> None:
        """Keep the numbers, which a late Ack is judged by, and no message."""
        self.waiting.clear()
        self.waiting_bytes = 0
        self.sent = deque((sequence, size, None) for sequence, size, _ in self.sent)


class Outbox:
    """Messages on their way to the peer, kept until the peer has consumed them.

    Attributes:
        window_bytes: most bytes per channel that may be sent and not yet consumed. A message larger than that goes
            when nothing else of its channel is under way.
    """

    def __init__(self, window_bytes: int) -> None:
        """Start empty, every sequence at 1; `window_bytes` as the attribute, in bytes."""
        self.window_bytes = window_bytes
        self._queues: dict[int, _SendQueue] = {channel: _SendQueue() for channel in Channel}
        self._waiting_bytes = 0  # of all queues: asked for with every message, so it is kept instead of summed

    def enqueue(self, message: Message, channel: Channel, buffers: Sequence[memoryview] = ()) -> OutgoingMessage:
        """Give the message its sequence and queue it.

        Args:
            message: any record but those in `UNSEQUENCED`.
            channel: the traffic class.
            buffers: the payload; left alone by their owner until the message is acknowledged.

        Raises:
            LocalProtocolError: see `OutgoingMessage`; nothing was queued then.
        """
        if type(message) in UNSEQUENCED:
            raise LocalProtocolError(f"{type(message).__name__} belongs to a connection, not to a session")
        queue = self._queues[channel]
        outgoing = OutgoingMessage(message, channel, queue.last + 1, buffers)
        queue.last += 1
        queue.wait(outgoing)
        self._waiting_bytes += outgoing.total_bytes
        return outgoing

    def next_sendable(self, before: Channel | None = None) -> OutgoingMessage | None:
        """Take the next message that may go, lowest channel first, in order within a channel.

        It counts as sent from here on: the caller sends all of it, or the connection breaks and `resume` follows.

        Args:
            before: only consider channels more urgent than this one, as between two frames of a long message.
        """
        if not self._waiting_bytes:
            return None
        for channel, queue in self._queues.items():
            if before is not None and channel >= before:
                return None
            if queue.waiting and queue.may_send(self.window_bytes):
                message = queue.take()
                self._waiting_bytes -= message.total_bytes
                return message
        return None

    def acked(self, channel: int, sequence: int) -> None:
        """The peer has consumed everything up to `sequence` on `channel`; older news than known is ignored.

        Raises:
            RemoteProtocolError: no such channel, or a sequence that was never sent.
        """
        queue = self._queue(channel, sequence, "acknowledged")
        self._waiting_bytes -= queue.forget_consumed(sequence)

    def resume(self, received: Mapping[int, int], begun: Mapping[int, int] | None = None) -> None:
        """A new connection stands: put back in order, before all that waits, what the peer has not received whole.

        Args:
            received: highest sequence received whole per channel, as the peer told; 0 for a channel it does not name.
            begun: payload bytes that it holds of the next one, per channel; that message goes on behind them.

        Raises:
            RemoteProtocolError: no such channel, a sequence or bytes that were never sent, or less than the peer said it had
                when the session was resumed before; nothing was changed then.
        """
        begun = begun or {}
        for channel, sequence in received.items():
            self._queue(channel, sequence, "received")
        for number, queue in self._queues.items():
            if received.get(number, 0) < queue.held:
                raise RemoteProtocolError(
                    f"the peer lost messages: it received {received.get(number, 0)} on {Channel(number).name}, "
                    f"but had {queue.held} before; this session cannot be resumed"
                )
        for channel, begun_bytes in begun.items():
            sequence = received.get(channel, 0)
            if not self._queue(channel, sequence, "received").check_begun(sequence, begun_bytes):
                raise RemoteProtocolError(
                    f"the peer received {begun_bytes} bytes of message {sequence + 1} on {Channel(channel).name}, "
                    "which were never sent"
                )
        for number, queue in self._queues.items():
            self._waiting_bytes += queue.put_back(received.get(number, 0), begun.get(number, 0))

    def let_go(self) -> None:
        """The session is over: nothing is sent any more, and the payloads of all messages can go."""
        for queue in self._queues.values():
            queue.let_go()
        self._waiting_bytes = 0

    def backlog_bytes(self, channel: Channel | None = None) -> int:
        """Bytes that wait to be sent, of one channel or of all."""
        return self._waiting_bytes if channel is None else self._queues[channel].waiting_bytes

    @property
    def unacked_bytes(self) -> int:
        """Bytes that were sent and not yet consumed by the peer, over all channels."""
        return sum(queue.unacked_bytes for queue in self._queues.values())

    def _queue(self, channel: int, sequence: int, claim: str) -> _SendQueue:
        queue = self._queues.get(channel)
        if queue is None:
            raise RemoteProtocolError(f"the peer {claim} messages on channel {channel}, which does not exist")
        if not 0 <= sequence <= queue.sent_up_to:
            raise RemoteProtocolError(
                f"the peer {claim} message {sequence} on {Channel(channel).name}, "
                f"but the last one sent is {queue.sent_up_to}"
            )
        return queue


class _ReceiveLog:
    """One channel's messages: received, consumed, told to the peer."""

    __slots__ = ("consumed", "done", "held_bytes", "received", "sizes", "told", "untold_bytes")

    def __init__(self) -> None:
        self.received = 0  # highest sequence that came whole
        self.consumed = 0  # everything up to here is consumed
        self.told = 0  # what the last Ack said
        self.untold_bytes = 0  # consumed in order since then
        self.sizes: dict[int, int] = {}  # total bytes of what came and is not consumed
        self.held_bytes = 0  # their sum
        self.done: dict[int, int] = {}  # consumed ahead of an earlier one: sequence to total bytes


class Inbox:
    """Messages from the peer: each taken once, in order, and acknowledged when consumed."""

    def __init__(self, window_bytes: int, limit_bytes: int | None = None) -> None:
        """Start empty.

        Args:
            window_bytes: the peer's window per channel in bytes; an Ack is due when a quarter of it was consumed.
            limit_bytes: most bytes of one channel to hold unconsumed, at least the peer's window; a peer that sends on
                has ignored its credit. None trusts the peer.
        """
        self._ack_bytes = max(1, window_bytes // _ACK_WINDOW_SHARE)
        self._limit_bytes = limit_bytes
        self._logs = {channel: _ReceiveLog() for channel in Channel}

    def accept(self, arrived: Arrived) -> bool:
        """Take a message from a connection.

        Returns:
            False for one that came before, over an earlier connection: drop it.

        Raises:
            RemoteProtocolError: messages before this one are missing, or the peer ignores its credit.
        """
        if not arrived.sequence:
            return True
        log = self._logs[arrived.channel]
        if arrived.sequence <= log.received:
            return False
        if arrived.sequence != log.received + 1:
            raise RemoteProtocolError(
                f"the peer sent message {arrived.sequence} on {arrived.channel.name}, "
                f"but the last one received is {log.received}: messages are missing"
            )
        if self._limit_bytes is not None and log.sizes and log.held_bytes + arrived.total_bytes > self._limit_bytes:
            raise RemoteProtocolError(
                f"the peer ignores its credit: {log.held_bytes + arrived.total_bytes} bytes of {arrived.channel.name} "
                f"wait to be consumed; the limit is {self._limit_bytes}. If it is a worker of yours, give it the window_mb of "
                "here"
            )
        log.received = arrived.sequence
        log.held_bytes += arrived.total_bytes
        log.sizes[arrived.sequence] = arrived.total_bytes
        return True

    def consumed(self, channel: Channel, sequence: int) -> Ack | None:
        """The owner is done with a message, in any order.

        Returns:
            An Ack to send now, or None when it can wait for `due_acks`.

        Raises:
            LocalProtocolError: the message never came or was consumed before.
        """
        if not sequence:
            return None
        log = self._logs[channel]
        size = log.sizes.pop(sequence, None)
        if size is None:
            raise LocalProtocolError(f"message {sequence} on {channel.name} is consumed twice, or never came")
        log.held_bytes -= size
        log.done[sequence] = size
        while (size := log.done.pop(log.consumed + 1, None)) is not None:
            log.consumed += 1
            log.untold_bytes += size
        due = log.untold_bytes >= self._ack_bytes or log.consumed - log.told >= _ACK_EVERY_MESSAGES
        return self._ack(channel, log) if due else None

    def due_acks(self) -> list[Ack]:
        """Acks that were held back; to be sent when there is nothing else to do, at the latest with a heartbeat."""
        return self._acks((channel, log) for channel, log in self._logs.items() if log.consumed > log.told)

    def resume(self) -> list[Ack]:
        """A new connection stands: repeat every Ack, for the last ones may have been lost with the old one."""
        return self._acks((channel, log) for channel, log in self._logs.items() if log.consumed)

    def received(self) -> dict[int, int]:
        """Highest sequence received whole per channel, for `Attach` and `Attached`; silent channels are left out."""
        return {int(channel): log.received for channel, log in self._logs.items() if log.received}

    def _acks(self, logs: Iterable[tuple[Channel, _ReceiveLog]]) -> list[Ack]:
        return [self._ack(channel, log) for channel, log in logs]

    def _ack(self, channel: Channel, log: _ReceiveLog) -> Ack:
        log.told = log.consumed
        log.untold_bytes = 0
        return Ack(int(channel), log.consumed)
