"""Messages to frames; the one module the rooms above import framing from.

Knows how a message is cut into frames; knows nothing of sockets, threads or what messages mean. Payload bytes are never
copied on the way out: a frame is a list of buffers for `sendmsg`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from guava_nb.errors import LocalProtocolError, RemoteProtocolError
from guava_nb.protocol.decoder import Arrived, Decoder, Incoming
from guava_nb.protocol.header import (
    CHUNK_BYTES,
    COMPRESSED,
    CONTINUATION,
    HEADER_BYTES,
    MAGIC,
    MAX_SEQUENCE,
    UNSEQUENCED,
    WIRE_VERSION,
    Limits,
    pack_header,
    unpack_header,
)
from guava_nb.protocol.messages import KIND_OF, Channel, Message, channel_of, counted_as
from guava_nb.protocol.tensor_bounds import check_tensors

__all__ = [
    "CHUNK_BYTES",
    "HEADER_BYTES",
    "MAGIC",
    "UNSEQUENCED",
    "WIRE_VERSION",
    "Arrived",
    "Decoder",
    "Incoming",
    "Limits",
    "OutgoingMessage",
    "check_tensors",
    "message_bytes",
    "pack_chunk",
]

_ENCODER = msgspec.msgpack.Encoder()
_MAX_RECORD_BYTES = Limits().max_record_bytes


class OutgoingMessage:
    """One message on its way out; it can be cut into frames again after a connection broke.

    The buffers are referenced, never copied: the caller must leave them alone until the message is acknowledged.

    Attributes:
        message: the record.
        channel: the traffic class.
        sequence: number on its channel from 1; 0 for the records in `UNSEQUENCED`.
        payload_bytes: bytes of all buffers together.
        total_bytes: one header, record and payload: what it counts against the window, however it is cut.
        begun_bytes: payload bytes that the peer holds, from a connection that broke; fewer than all. The record came before them.
    """

    __slots__ = (
        "_buffers",
        "_kind",
        "_record",
        "begun_bytes",
        "channel",
        "message",
        "payload_bytes",
        "sequence",
        "total_bytes",
    )

    def __init__(self, message: Message, channel: Channel, sequence: int, buffers: Sequence[memoryview] = ()) -> None:
        """Encode the record and check what any receiver will check.

        Args:
            message: the record.
            channel: the traffic class.
            sequence: number on its channel from 1; 0 for the records in `UNSEQUENCED`.
            buffers: C-contiguous buffers; the payload is their concatenation.

        Raises:
            LocalProtocolError: the record is unknown, cannot be encoded, is larger than 8 MiB, does not describe the
                buffers, or has a sequence where none belongs (or none where one does).
        """
        kind = KIND_OF.get(type(message))
        if kind is None:
            raise LocalProtocolError(f"{type(message).__name__} is no record of MESSAGE_KINDS")
        if (sequence == 0) != (type(message) in UNSEQUENCED) or not 0 <= sequence <= MAX_SEQUENCE:
            raise LocalProtocolError(f"sequence {sequence} does not suit {type(message).__name__}")
        self._kind = kind
        self.message = message
        self.channel = channel
        self.sequence = sequence
        self._buffers = [_flat(buffer) for buffer in buffers if buffer.nbytes]
        self.payload_bytes = sum([buffer.nbytes for buffer in self._buffers])
        self._record = _encode(message, self.payload_bytes)
        self.total_bytes = HEADER_BYTES + len(self._record) + self.payload_bytes
        self.begun_bytes = 0

    @property
    def counted_as(self) -> Channel:
        """The channel under which its bytes are reported."""
        if self.channel is not Channel.BATCH or channel_of(self.message) is not Channel.BATCH:
            return self.channel
        return counted_as(self.message, self.payload_bytes)

    def frames(self, chunk_bytes: int = CHUNK_BYTES) -> Iterator[list[memoryview | bytes]]:
        """Cut what the peer does not hold of the message into frames, as often as asked.

        Args:
            chunk_bytes: payload bytes per frame, 1 to `CHUNK_BYTES`; fewer suit a slow link.

        Yields:
            One list of buffers per frame, in the order to be sent; the first holds the header.
        """
        kind, record = (CONTINUATION, b"") if self.begun_bytes else (self._kind, self._record)
        left = self.payload_bytes - self.begun_bytes
        buffers = _behind(self._buffers, self.begun_bytes) if self.begun_bytes else self._buffers
        if left <= chunk_bytes:
            yield [self._header(kind, len(record), left) + record, *buffers]
            return
        for piece in _cut(buffers, chunk_bytes):
            size = min(chunk_bytes, left)
            left -= size
            yield [self._header(kind, len(record), size) + record, *piece]
            kind, record = CONTINUATION, b""

    def _header(self, kind: int, record_bytes: int, chunk_bytes: int) -> bytes:
        return pack_header(kind, self.channel, self.sequence, record_bytes, chunk_bytes, self.payload_bytes)

    def __repr__(self) -> str:
        name = type(self.message).__name__
        return f"<{name} {self.channel.name} #{self.sequence}, payload {self.payload_bytes} bytes>"


def message_bytes(message: Message, payload_bytes: int = 0) -> int:
    """Return how many bytes a message takes on the wire, the headers of all its frames included, uncompressed."""
    frames = max(1, -(-payload_bytes // CHUNK_BYTES))
    return frames * HEADER_BYTES + len(_ENCODER.encode(message)) + payload_bytes


def pack_chunk(head: memoryview | bytes, packed: bytes) -> list[memoryview | bytes]:
    """Return a frame whose chunk was compressed.

    Args:
        head: header and record of the frame as it was.
        packed: its chunk as one zstd frame, smaller than the chunk.
    """
    fields = unpack_header(memoryview(head), 0)
    header = pack_header(
        fields.kind, fields.channel, fields.sequence, fields.record_bytes, len(packed), fields.payload_bytes, COMPRESSED
    )
    return [header + bytes(head[HEADER_BYTES:]), packed]


def _flat(buffer: memoryview) -> memoryview:
    if not buffer.c_contiguous:
        raise LocalProtocolError("a buffer of a payload is not C-contiguous")
    return buffer if buffer.ndim == 1 and buffer.format == "B" else buffer.cast("B")


def _encode(message: Message, payload_bytes: int) -> bytes:
    try:
        record = _ENCODER.encode(message)
        check_tensors(message, payload_bytes)
    except (TypeError, ValueError, OverflowError, RecursionError, RemoteProtocolError) as error:
        raise LocalProtocolError(f"{type(message).__name__} cannot be sent: {error}") from error
    if len(record) > _MAX_RECORD_BYTES:
        raise LocalProtocolError(
            f"{type(message).__name__} takes {len(record)} bytes as a record; at most {_MAX_RECORD_BYTES} may travel"
        )
    return record


def _behind(buffers: Sequence[memoryview], num_bytes: int) -> list[memoryview]:
    """The concatenation of buffers without its first bytes."""
    rest = []
    for buffer in buffers:
        if buffer.nbytes > num_bytes:
            rest.append(buffer[num_bytes:])
        num_bytes = max(0, num_bytes - buffer.nbytes)
    return rest


def _cut(buffers: Sequence[memoryview], chunk_bytes: int) -> Iterator[list[memoryview]]:
    """Slice the concatenation of non-empty buffers into pieces of `chunk_bytes`; the last one may be shorter."""
    piece: list[memoryview] = []
    room = chunk_bytes
    for buffer in buffers:
        at = 0
        while at < buffer.nbytes:
            part = buffer[at : at + room]
            at += part.nbytes
            room -= part.nbytes
            piece.append(part)
            if not room:
                yield piece
                piece, room = [], chunk_bytes
    if piece:
        yield piece
