"""Bytes of one connection to messages, received where they stay.

Knows frames and their order on one connection; knows nothing of sockets, threads, or the session's other connections. What
the connection before brought of a message is handed from one decoder to the next.
The owner of the stream asks `get_buffer` where the next bytes shall go, fills some of it, and tells `buffer_updated`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from guava_nb.errors import FrameTooLarge, LocalProtocolError, RemoteProtocolError
from guava_nb.protocol.compression import decompress_into
from guava_nb.protocol.header import (
    CHANNELS,
    CHUNK_BYTES,
    CONTINUATION,
    HEADER_BYTES,
    Header,
    Limits,
    check_header,
    unpack_header,
)
from guava_nb.protocol.messages import MESSAGE_KINDS, Channel, Message
from guava_nb.protocol.payload import PayloadMemory
from guava_nb.protocol.tensor_bounds import check_tensors

__all__ = ["Arrived", "Decoder", "Incoming"]

_STAGING_BYTES = 64 << 10
# Below this, one receive call into the staging area that also brings the next frame is cheaper than saving the copy.
_DIRECT_BYTES = 16 << 10
_RECORD_DECODERS = {kind: msgspec.msgpack.Decoder(record, strict=True) for kind, record in MESSAGE_KINDS.items()}


class Arrived(msgspec.Struct, frozen=True):
    """One message that has come whole.

    Attributes:
        message: the record.
        channel: the traffic class.
        sequence: number on its channel; 0 for the records in `UNSEQUENCED`.
        payload: its bytes, owned by the receiver; `b""` when there are none.
        total_bytes: one header, record and payload: what it counts against its sender's window.
        wire_bytes: bytes it took on the wire, every header included.
    """

    message: Message
    channel: Channel
    sequence: int
    payload: memoryview | bytes
    total_bytes: int
    wire_bytes: int


class Incoming:
    """A message of which not everything has come.

    Attributes:
        header: of its first frame.
        received_bytes: of its payload, from the first on.
    """

    __slots__ = ("carried", "header", "message", "packed", "payload", "received_bytes", "wire_bytes")

    def __init__(self, header: Header) -> None:
        self.header = header
        self.message: Message | None = None
        self.payload: memoryview | bytes = b""
        self.received_bytes = 0
        self.wire_bytes = header.record_bytes
        self.packed = False  # whether the chunk at hand is compressed
        self.carried = False  # whether it came over an earlier connection, and the peer has not gone on with it yet

    @property
    def left_bytes(self) -> int:
        """Payload bytes still to come."""
        return self.header.payload_bytes - self.received_bytes


def _read_record(kind: int, record: memoryview) -> Message:
    try:
        return _RECORD_DECODERS[kind].decode(record)
    # Whatever the decoder makes of hostile bytes (wrong types, bad text, nesting without end), they are the peer's.
    except Exception as error:
        name = MESSAGE_KINDS[kind].__name__
        raise RemoteProtocolError(f"the peer sent a {name} that cannot be read: {error}") from error


class Decoder:
    """Turns the bytes of one connection into messages.

    Nothing a peer sends makes it raise: the first violation is recorded in `error`, what was complete before it is
    still returned, and everything after it is discarded. Memory is bounded by the limits: one record, and one payload
    per channel. On a new connection each channel may start at any sequence; from there on without gaps.

    Attributes:
        limits: what is accepted from the next header on; may be replaced, as after a join.
        error: the violation that ended this connection; None as long as there was none.
    """

    __slots__ = (
        "_allocate",
        "_direct",
        "_end",
        "_filled",
        "_given",
        "_incoming",
        "_last",
        "_open",
        "_packed",
        "_staging",
        "_start",
        "_streaming",
        "_target",
        "_wanted",
        "error",
        "limits",
    )

    def __init__(self, limits: Limits | None = None, allocate: Callable[[int], memoryview] | None = None) -> None:
        """Start between two frames.

        Args:
            limits: what is accepted; the defaults of `Limits` when None.
            allocate: gives a writable, flat byte view of the asked length in bytes for a payload; `PayloadMemory`
                when None.
        """
        self.limits = limits or Limits()
        self.error: RemoteProtocolError | None = None
        self._allocate = allocate or PayloadMemory()
        self._staging = memoryview(bytearray(_STAGING_BYTES))
        self._start = self._end = 0  # the unread part of the staging area
        self._given, self._direct = 0, False  # length of the buffer given last, and whether it was the target
        self._incoming: Incoming | None = None  # message of the frame at hand; None while its header is awaited
        self._wanted, self._filled = HEADER_BYTES, 0  # bytes that complete this stage, and those already in the target
        self._target: memoryview | None = None  # where this stage's bytes are gathered, when not in the staging area
        self._open: list[Incoming | None] = [None] * len(CHANNELS)  # messages with more frames to come
        self._last = [0] * len(CHANNELS)  # last sequence per channel; 0 before the first
        self._packed: memoryview | None = None  # where compressed chunks are gathered, once there was one
        self._streaming = False  # a long payload is open: read no further than this stage and save the copy

    def carry(self, begun: Mapping[int, Incoming]) -> None:
        """Let the peer go on with messages that earlier connections brought in part, by channel; or begin them anew."""
        for channel, incoming in begun.items():
            incoming.carried = True
            self._open[channel] = incoming
        self._streaming = self._has_long_payload()

    def let_go(self) -> dict[int, Incoming]:
        """Give up what is not whole, by channel, for the decoder of the next connection; nothing more is received here."""
        begun = {channel: incoming for channel, incoming in enumerate(self._open) if incoming is not None}
        at_hand = self._incoming
        if at_hand is not None and at_hand.message is not None:
            at_hand.wire_bytes -= self._wanted - self._filled
            if not at_hand.packed and self._target is not None:
                at_hand.received_bytes += self._filled
                begun[at_hand.header.channel] = at_hand
        self._incoming = self._target = None
        self._open = [None] * len(CHANNELS)
        return {channel: incoming for channel, incoming in begun.items() if incoming.received_bytes}

    @property
    def unfinished(self) -> bool:
        """Whether a connection that ends now ends inside a message."""
        return self._incoming is not None or self._start != self._end or any(self._open)

    def get_buffer(self) -> memoryview:
        """Give the place where the next received bytes go.

        Returns:
            A writable view, at least one byte long, to be filled from its start; valid until `buffer_updated`.
        """
        if self.error is not None:
            return self._staging
        missing = self._wanted - self._filled
        self._direct = self._target is not None and missing >= _DIRECT_BYTES
        if self._direct and self._target is not None:
            view = self._target[self._filled :]
        else:
            self._compact()
            view = self._staging[self._end : missing if self._streaming else _STAGING_BYTES]
        self._given = view.nbytes
        return view

    def buffer_updated(self, num_bytes: int) -> list[Arrived]:
        """Take notice of received bytes.

        Args:
            num_bytes: how many bytes were written at the start of the buffer that `get_buffer` gave.

        Returns:
            The messages that are whole now, in the order in which their last bytes came.

        Raises:
            LocalProtocolError: more bytes than the buffer holds; a bug of this side.
        """
        if self.error is not None:
            return []
        if not 0 <= num_bytes <= self._given:
            raise LocalProtocolError(f"{num_bytes} bytes were reported for a buffer of {self._given}")
        self._given = 0
        if self._direct:
            self._filled += num_bytes
        else:
            self._end += num_bytes
        arrived: list[Arrived] = []
        try:
            self._parse(arrived)
        except RemoteProtocolError as error:
            self._fail(error)
        return arrived

    def receive(self, data: bytes | bytearray | memoryview) -> list[Arrived]:
        """Copy `data` through the buffers: for bytes that were not received in place."""
        arrived: list[Arrived] = []
        rest = memoryview(data)
        while rest and self.error is None:
            buffer = self.get_buffer()
            taken = min(buffer.nbytes, rest.nbytes)
            buffer[:taken] = rest[:taken]
            rest = rest[taken:]
            arrived += self.buffer_updated(taken)
        return arrived

    def _compact(self) -> None:
        if self._start == self._end:  # as after every message that is whole
            self._start = self._end = 0
        elif self._start:
            unread = bytes(self._staging[self._start : self._end])
            self._start, self._end = 0, len(unread)
            self._staging[: self._end] = unread

    def _expect(self, num_bytes: int, target: memoryview | None = None) -> None:
        self._wanted, self._filled, self._target = num_bytes, 0, target

    def _parse(self, arrived: list[Arrived]) -> None:
        """Go from stage to stage (header, record, chunk) as far as the bytes reach."""
        while self._stage_is_whole():
            incoming = self._incoming
            if incoming is None:
                self._header_came()
            elif incoming.message is None:
                self._record_came(incoming)
            else:
                incoming.received_bytes += self._chunk_bytes(incoming)
                self._frame_came(incoming, arrived)

    def _stage_is_whole(self) -> bool:
        staged = self._end - self._start
        if self._target is None:
            return staged >= self._wanted
        if staged:
            taken = min(staged, self._wanted - self._filled)
            self._target[self._filled : self._filled + taken] = self._staging[self._start : self._start + taken]
            self._start += taken
            self._filled += taken
        return self._filled == self._wanted

    def _header_came(self) -> None:
        header = unpack_header(self._staging, self._start)
        self._start += HEADER_BYTES
        check_header(header, self.limits)
        if header.kind == CONTINUATION:
            self._go_on(header)
            return
        if header.sequence:
            self._take_sequence(header)
        self._incoming = Incoming(header)
        fits = header.record_bytes <= _STAGING_BYTES
        self._expect(header.record_bytes, None if fits else memoryview(bytearray(header.record_bytes)))

    def _take_sequence(self, header: Header) -> None:
        channel = header.channel
        begun = self._open[channel]
        if begun is not None and begun.carried:
            self._open[channel] = None  # the peer begins it anew
        elif begun is not None:
            raise RemoteProtocolError(f"the peer began a message on {CHANNELS[channel].name} inside another one")
        last = self._last[channel]
        if last and header.sequence != last + 1:
            raise RemoteProtocolError(
                f"the peer sent message {header.sequence} after {last} on {CHANNELS[channel].name}: the order is broken"
            )
        self._last[channel] = header.sequence

    def _go_on(self, header: Header) -> None:
        incoming = self._open[header.channel]
        name = CHANNELS[header.channel].name
        if incoming is None:
            raise RemoteProtocolError(f"the peer went on with a message on {name} that it never began")
        first = incoming.header
        if header.sequence != first.sequence or header.payload_bytes != first.payload_bytes:
            raise RemoteProtocolError(f"the peer went on with another message than {first.sequence} on {name}")
        if incoming.carried:
            incoming.carried = False
            self._last[header.channel] = header.sequence
        self._incoming = incoming
        self._expect_chunk(incoming, header)

    def _expect_chunk(self, incoming: Incoming, header: Header) -> None:
        chunk_bytes = header.chunk_bytes
        if chunk_bytes > incoming.left_bytes:
            raise RemoteProtocolError(
                f"the peer sent {chunk_bytes} bytes where {incoming.left_bytes} are left of a payload"
            )
        incoming.wire_bytes += HEADER_BYTES + chunk_bytes
        incoming.packed = bool(header.flags)
        if incoming.packed:
            if self._packed is None or len(self._packed) < chunk_bytes:
                self._packed = memoryview(bytearray(chunk_bytes))
            self._expect(chunk_bytes, self._packed[:chunk_bytes])
            return
        start = incoming.received_bytes
        payload = incoming.payload[start : start + chunk_bytes]
        self._expect(chunk_bytes, payload if isinstance(payload, memoryview) else None)

    def _chunk_bytes(self, incoming: Incoming) -> int:
        """How far a chunk that is whole brings the payload."""
        if not incoming.packed:
            return self._wanted
        assert self._packed is not None and isinstance(incoming.payload, memoryview)
        start = incoming.received_bytes
        target = incoming.payload[start : start + CHUNK_BYTES]
        return decompress_into(self._packed[: self._wanted], target)

    def _record_came(self, incoming: Incoming) -> None:
        header = incoming.header
        record = self._target
        if record is None:
            record = self._staging[self._start : self._start + self._wanted]
            self._start += self._wanted
        incoming.message = _read_record(header.kind, record)
        check_tensors(incoming.message, header.payload_bytes)
        if header.payload_bytes:
            self._check_asked(incoming.message, header.payload_bytes)
            incoming.payload = self._payload(header.payload_bytes)
            if header.chunk_bytes < header.payload_bytes:
                self._open[header.channel] = incoming
                self._streaming = self._streaming or header.payload_bytes >= _STAGING_BYTES
        # A message without payload waits for a chunk of no bytes, which is whole at once.
        self._expect_chunk(incoming, header)

    def _check_asked(self, message: Message, payload_bytes: int) -> None:
        """Before anything is allocated: compressed, gigabytes come in a few kilobytes."""
        if self.limits.payload_of is None:
            return
        most = self.limits.payload_of(message)
        if payload_bytes > most:
            name = type(message).__name__
            raise FrameTooLarge(
                f"the peer announced a {name} of {payload_bytes} bytes; it was asked for {most} at most"
            )

    def _payload(self, num_bytes: int) -> memoryview:
        try:
            return self._allocate(num_bytes)
        except MemoryError as error:
            raise FrameTooLarge(f"this machine has no memory for a payload of {num_bytes} bytes") from error

    def _frame_came(self, incoming: Incoming, arrived: list[Arrived]) -> None:
        self._incoming = None
        self._expect(HEADER_BYTES)
        if incoming.left_bytes:
            return
        header, message, payload = incoming.header, incoming.message, incoming.payload
        if self._open[header.channel] is incoming:
            self._open[header.channel] = None
            self._streaming = self._has_long_payload()
        assert message is not None
        total_bytes = HEADER_BYTES + header.record_bytes + header.payload_bytes
        channel = CHANNELS[header.channel]
        arrived.append(Arrived(message, channel, header.sequence, payload, total_bytes, incoming.wire_bytes))

    def _has_long_payload(self) -> bool:
        return any(incoming is not None and incoming.left_bytes >= _STAGING_BYTES for incoming in self._open)

    def _fail(self, error: RemoteProtocolError) -> None:
        self.error = error
        self._incoming = self._target = None
        self._open = [None] * len(CHANNELS)
