"""The 32 bytes before every frame, and what they may say.

Knows the layout, the limits and the checks that need no memory of earlier frames.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from guava_nb.errors import FrameTooLarge, RemoteProtocolError, VersionMismatch
from guava_nb.protocol.messages import (
    KIND_OF,
    MESSAGE_KINDS,
    Ack,
    Attach,
    Attached,
    Channel,
    Goodbye,
    Message,
    Ping,
    Pong,
    Refused,
)

__all__ = [
    "CHANNELS",
    "COMPRESSED",
    "CHUNK_BYTES",
    "CONTINUATION",
    "HEADER_BYTES",
    "MAGIC",
    "MAX_SEQUENCE",
    "UNSEQUENCED",
    "WIRE_VERSION",
    "Header",
    "Limits",
    "check_header",
    "pack_header",
    "unpack_header",
]

MAGIC = b"GVNB"
WIRE_VERSION = 9
HEADER_BYTES = 32
#: Most payload bytes in one frame: what a more urgent message may have to wait for.
CHUNK_BYTES = 1 << 20
MAX_SEQUENCE = (1 << 63) - 1
#: Kind of a frame that goes on with a payload.
CONTINUATION = 0
#: Flag of a frame whose chunk is one zstd frame.
COMPRESSED = 1
#: Records about the connection itself. They carry sequence 0, are never re-sent and need no credit.
UNSEQUENCED: frozenset[type[Message]] = frozenset({Attach, Attached, Refused, Ping, Pong, Ack, Goodbye})
#: Channels by number; looking one up here is quicker than making it.
CHANNELS = tuple(Channel)

_UNSEQUENCED_KINDS = frozenset(KIND_OF[record] for record in UNSEQUENCED)
_LAYOUT = struct.Struct("<4sBBBBQIIQ")


@dataclass(frozen=True, slots=True)
class Limits:
    """What a receiver accepts; judged before anything is allocated.

    Attributes:
        max_record_bytes: most bytes of one msgpack record.
        max_payload_bytes: most payload bytes of one message.
        compressed: this side offered to read compressed chunks.
        payload_of: gives the most payload bytes of one message by its record, such as 0 for an answer that was not asked for.
    """

    max_record_bytes: int = 8 << 20
    max_payload_bytes: int = 64 << 30
    compressed: bool = False
    payload_of: Callable[[Message], int] | None = None

    @classmethod
    def before_join(cls) -> Limits:
        """What a listener accepts until it has answered `Attach`: 64 KiB records without payload."""
        return cls(max_record_bytes=64 << 10, max_payload_bytes=0)


class Header(NamedTuple):
    """One header, field by field in wire order.

    Attributes:
        magic: b"GVNB".
        version: `WIRE_VERSION`.
        kind: number of the record, or `CONTINUATION`.
        channel: the traffic class.
        flags: `COMPRESSED` or 0.
        sequence: number of the message on its channel; 0 for the records in `UNSEQUENCED`.
        record_bytes: length of the msgpack record that follows; 0 in a continuation.
        chunk_bytes: bytes of the chunk that follows in this frame, as they are on the wire.
        payload_bytes: payload bytes of the whole message, the same in each of its frames.
    """

    magic: bytes
    version: int
    kind: int
    channel: int
    flags: int
    sequence: int
    record_bytes: int
    chunk_bytes: int
    payload_bytes: int


def pack_header(
    kind: int, channel: int, sequence: int, record_bytes: int, chunk_bytes: int, payload_bytes: int, flags: int = 0
) -> bytes:
    """Make the 32 bytes of a header; lengths in bytes."""
    return _LAYOUT.pack(MAGIC, WIRE_VERSION, kind, channel, flags, sequence, record_bytes, chunk_bytes, payload_bytes)


def unpack_header(buffer: memoryview, start: int) -> Header:
    """Read the 32 bytes at `start`; judges nothing."""
    return Header._make(_LAYOUT.unpack_from(buffer, start))


def check_header(header: Header, limits: Limits) -> None:
    """Judge what can be judged without knowing earlier frames.

    Raises:
        VersionMismatch: the peer frames by another version.
        FrameTooLarge: a length beyond `limits` or `CHUNK_BYTES`.
        RemoteProtocolError: anything else that no peer of this version sends.
    """
    _check_identity(header, limits)
    _check_lengths(header, limits)
    if header.kind == CONTINUATION:
        return
    if header.sequence > MAX_SEQUENCE or (header.sequence == 0) != (header.kind in _UNSEQUENCED_KINDS):
        name = MESSAGE_KINDS[header.kind].__name__
        raise RemoteProtocolError(f"the peer sent {name} with sequence {header.sequence}, which it cannot have")


def _check_identity(header: Header, limits: Limits) -> None:
    magic, version, kind, channel, flags = header[:5]
    if magic != MAGIC:
        raise RemoteProtocolError(f"the peer sent {magic!r} where a frame begins with {MAGIC!r}: the stream is damaged")
    if version != WIRE_VERSION:
        raise VersionMismatch(
            f"the peer frames by wire version {version}, this side by {WIRE_VERSION}; install the same guava-nb on both"
        )
    if kind != CONTINUATION and kind not in MESSAGE_KINDS:
        raise RemoteProtocolError(
            f"the peer sent a record of kind {kind}, which wire version {WIRE_VERSION} does not have"
        )
    if channel >= len(CHANNELS):
        raise RemoteProtocolError(f"the peer sent a frame on channel {channel}; there are {len(CHANNELS)}")
    if flags & ~COMPRESSED:
        raise RemoteProtocolError(f"the peer set the reserved flags {flags:#04x}")
    if flags and not limits.compressed:
        raise RemoteProtocolError("the peer sent a compressed chunk, which this side did not offer to read")


def _check_lengths(header: Header, limits: Limits) -> None:
    _, _, kind, _, _, _, record_bytes, chunk_bytes, payload_bytes = header
    if record_bytes > limits.max_record_bytes:
        raise FrameTooLarge(
            f"the peer announced a record of {record_bytes} bytes; the limit is {limits.max_record_bytes}"
        )
    if payload_bytes > limits.max_payload_bytes:
        raise FrameTooLarge(
            f"the peer announced a payload of {payload_bytes} bytes; the limit is {limits.max_payload_bytes}"
        )
    if chunk_bytes > CHUNK_BYTES:
        raise FrameTooLarge(f"the peer announced {chunk_bytes} payload bytes in one frame; the limit is {CHUNK_BYTES}")
    if chunk_bytes > payload_bytes or (payload_bytes and not chunk_bytes):
        raise RemoteProtocolError(f"the peer sent a frame with {chunk_bytes} bytes of a payload of {payload_bytes}")
    if header.flags and not chunk_bytes:
        raise RemoteProtocolError("the peer sent a compressed chunk without bytes")
    if (kind == CONTINUATION) != (record_bytes == 0):
        raise RemoteProtocolError(f"the peer sent a frame of kind {kind} with a record of {record_bytes} bytes")
