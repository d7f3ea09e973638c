"""Frames out and frames in, without a socket."""

from __future__ import annotations

import struct

import pytest

from guava_nb.errors import FrameTooLarge, LocalProtocolError, RemoteProtocolError, VersionMismatch
from guava_nb.protocol.framing import CHUNK_BYTES, HEADER_BYTES, WIRE_VERSION, Decoder, Limits, OutgoingMessage
from guava_nb.protocol.messages import (
    Ack,
    Attach,
    Channel,
    EndRun,
    FlatTensor,
    GradientBucket,
    LoadState,
    Log,
    Ping,
    TensorSpec,
    Tree,
)

LAYOUT = struct.Struct("<4sBBBBQIIQ")


def bucket(nbytes: int, index: int = 0) -> GradientBucket:
    return GradientBucket(
        run_id="run", generation=1, step=2, shard=3, bucket=index, present=b"\x01", tensor=FlatTensor("uint8", nbytes)
    )


def gradient(sequence: int, data: bytes) -> OutgoingMessage:
    return OutgoingMessage(bucket(len(data)), Channel.GRADIENT, sequence, [memoryview(data)])


def wire(outgoing: OutgoingMessage) -> bytes:
    return b"".join(bytes(part) for frame in outgoing.frames() for part in frame)


def frame(
    kind=35, channel=1, sequence=1, record=b"", chunk=0, payload=0, version=WIRE_VERSION, magic=b"GVNB", flags=0
) -> bytes:
    return LAYOUT.pack(magic, version, kind, channel, flags, sequence, len(record), chunk, payload) + record


def error_of(data: bytes, limits: Limits | None = None) -> RemoteProtocolError:
    decoder = Decoder(limits)
    assert decoder.receive(data) == []
    assert decoder.error is not None
    assert decoder.receive(b"more") == []
    return decoder.error


def test_small_message_comes_back():
    outgoing = OutgoingMessage(Ping(5), Channel.HEARTBEAT, 0)
    (arrived,) = Decoder().receive(wire(outgoing))
    assert (arrived.message, arrived.channel, arrived.sequence, arrived.payload) == (Ping(5), Channel.HEARTBEAT, 0, b"")
    assert arrived.total_bytes == arrived.wire_bytes == outgoing.total_bytes == len(wire(outgoing))


@pytest.mark.parametrize("size", [1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES + 7])
def test_payload_comes_back_and_is_writable(size):
    data = bytes(i * 7 & 255 for i in range(1 << 10)) * (size // 1024 + 1)
    outgoing = gradient(9, data[:size])
    (arrived,) = Decoder().receive(wire(outgoing))
    assert arrived.payload == data[:size]
    assert not arrived.payload.readonly
    assert arrived.wire_bytes == len(wire(outgoing))
    assert (
        arrived.total_bytes == outgoing.total_bytes == len(wire(outgoing)) - HEADER_BYTES * ((size - 1) // CHUNK_BYTES)
    )


def test_frames_reference_the_buffers_and_can_be_cut_again():
    first, second = bytearray(b"a" * 10), bytearray(b"b" * 7)
    outgoing = OutgoingMessage(bucket(17), Channel.GRADIENT, 1, [memoryview(first), memoryview(second)])
    once = wire(outgoing)
    first[0] = second[0] = ord("z")
    again = wire(outgoing)
    assert once[-17:] == b"a" * 10 + b"b" * 7
    assert again[-17:] == b"z" + b"a" * 9 + b"z" + b"b" * 6


def test_frame_sizes_follow_the_asked_chunk():
    sizes = [sum(len(part) for part in frame) for frame in gradient(1, b"x" * 25).frames(chunk_bytes=10)]
    assert [size - HEADER_BYTES for size in sizes[1:]] == [10, 5]


def test_payload_is_received_in_place():
    data = bytes(3 * CHUNK_BYTES)
    decoder, stream, given = Decoder(), memoryview(wire(gradient(1, data))), []
    arrived = []
    while stream:
        buffer = decoder.get_buffer()
        taken = min(len(buffer), len(stream))
        buffer[:taken] = stream[:taken]
        stream = stream[taken:]
        given.append(len(buffer))
        arrived += decoder.buffer_updated(taken)
    # One staging read; then whole rests of chunks, and exactly a header between them.
    assert given[2:] == [HEADER_BYTES, CHUNK_BYTES, HEADER_BYTES, CHUNK_BYTES]
    assert len(arrived) == 1
    assert len(decoder.get_buffer()) == given[0] > HEADER_BYTES


def test_channels_interleave():
    parts = [list(OutgoingMessage(bucket(30), c, 4, [memoryview(bytes([c]) * 30)]).frames(8)) for c in Channel]
    stream = b"".join(bytes(p) for frames in zip(*parts, strict=True) for frame in frames for p in frame)
    arrived = Decoder().receive(stream)
    assert [a.channel for a in arrived] == list(Channel)
    assert all(a.payload == bytes([a.channel]) * 30 for a in arrived)


def test_connection_records_may_stand_between_the_frames_of_a_message():
    one, two = gradient(1, b"x" * 10).frames(5)
    ack = wire(OutgoingMessage(Ack(4, 7), Channel.GRADIENT, 0))
    arrived = Decoder().receive(b"".join(map(bytes, one)) + ack + b"".join(map(bytes, two)))
    assert [type(a.message) for a in arrived] == [Ack, GradientBucket]


def test_non_byte_and_empty_buffers():
    numbers = memoryview(bytearray(16)).cast("d")
    outgoing = OutgoingMessage(bucket(16), Channel.GRADIENT, 1, [memoryview(b""), numbers])
    (arrived,) = Decoder().receive(wire(outgoing))
    assert arrived.payload == bytes(16)


def test_fields_of_a_later_version_are_ignored():
    (arrived,) = Decoder().receive(frame(record=b"\x93\xa1r\x01\xc0"))
    assert arrived.message == EndRun("r")


def test_large_record_comes_back():
    log = Log("stdout", ("x" * 300_000, "y" * 300_000))
    (arrived,) = Decoder().receive(wire(OutgoingMessage(log, Channel.METRICS, 1)))
    assert arrived.message == log


def test_any_first_sequence_then_no_gap():
    decoder = Decoder()
    assert len(decoder.receive(wire(gradient(41, b"a")) + wire(gradient(42, b"b")))) == 2
    assert decoder.receive(wire(gradient(44, b"c"))) == []
    assert "message 44 after 42" in str(decoder.error)


def test_complete_messages_before_a_violation_are_returned():
    decoder = Decoder()
    arrived = decoder.receive(wire(gradient(1, b"a")) + b"\xff" * 64)
    assert len(arrived) == 1
    assert decoder.error is not None


def test_limits_can_be_widened():
    decoder = Decoder(Limits.before_join())
    attach = Attach(session_id=b"s" * 16, identity=b"i" * 32, purpose="control", incarnation=0, received={1: 4})
    (arrived,) = decoder.receive(wire(OutgoingMessage(attach, Channel.CONTROL, 0)))
    assert arrived.message == attach
    decoder.limits = Limits()
    assert len(decoder.receive(wire(gradient(1, b"abc")))) == 1


RECORD = wire(OutgoingMessage(EndRun("r"), Channel.CONTROL, 1))[HEADER_BYTES:]


@pytest.mark.parametrize(
    ("data", "kind", "words"),
    [
        (frame(magic=b"HTTP", record=RECORD), RemoteProtocolError, "stream is damaged"),
        (frame(version=1, record=RECORD), VersionMismatch, "wire version 1"),
        (frame(kind=200, record=RECORD), RemoteProtocolError, "kind 200"),
        (frame(channel=8, record=RECORD), RemoteProtocolError, "channel 8"),
        (frame(flags=2, record=RECORD), RemoteProtocolError, "flags"),
        (frame(flags=1, record=RECORD), RemoteProtocolError, "did not offer"),
        (frame(sequence=0, record=RECORD), RemoteProtocolError, "sequence 0"),
        (frame(sequence=1 << 63, record=RECORD), RemoteProtocolError, "sequence"),
        (frame(kind=4, sequence=1, record=RECORD), RemoteProtocolError, "Ping with sequence 1"),
        (frame(record=b""), RemoteProtocolError, "record of 0"),
        (frame(kind=0, sequence=3, chunk=4, payload=4), RemoteProtocolError, "never began"),
        (frame(kind=0, sequence=3, record=RECORD, chunk=4, payload=4), RemoteProtocolError, "record of"),
        (frame(record=RECORD, payload=1 << 63, chunk=1), FrameTooLarge, str(1 << 63)),
        (frame(record=RECORD, payload=5 << 20, chunk=2 << 20), FrameTooLarge, "one frame"),
        (frame(record=RECORD, payload=5, chunk=6), RemoteProtocolError, "6 bytes of a payload of 5"),
        (frame(record=RECORD, payload=5, chunk=0), RemoteProtocolError, "0 bytes of a payload of 5"),
        (frame(record=RECORD, payload=5, chunk=5), FrameTooLarge, "it has none"),
        (frame(record=b"\x91\x05"), RemoteProtocolError, "cannot be read"),
        (frame(record=b"\x91\xa2\xff\xff"), RemoteProtocolError, "cannot be read"),
        (frame(record=RECORD + b"\x00"), RemoteProtocolError, "cannot be read"),
        (LAYOUT.pack(b"GVNB", WIRE_VERSION, 35, 1, 0, 1, 0xFFFFFFFF, 0, 0), FrameTooLarge, "record of 4294967295"),
    ],
)
def test_violations_are_recorded_not_raised(data, kind, words):
    error = error_of(data)
    assert type(error) is kind
    assert words in str(error)


def test_payload_before_the_join_is_refused():
    assert isinstance(error_of(wire(gradient(1, b"x")), Limits.before_join()), FrameTooLarge)


def test_message_inside_another_is_refused():
    one, _ = gradient(1, b"x" * 10).frames(5)
    assert "inside another" in str(error_of(b"".join(map(bytes, one)) + wire(gradient(2, b"y"))))


@pytest.mark.parametrize(
    ("continuation", "words"),
    [
        (frame(kind=0, channel=4, sequence=2, chunk=5, payload=10), "another message"),
        (frame(kind=0, channel=4, sequence=1, chunk=5, payload=11), "another message"),
        (frame(kind=0, channel=4, sequence=1, chunk=6, payload=10), "5 are left"),
        (frame(kind=0, channel=5, sequence=1, chunk=5, payload=10), "never began"),
    ],
)
def test_wrong_continuations_are_refused(continuation, words):
    one, _ = gradient(1, b"x" * 10).frames(5)
    assert words in str(error_of(b"".join(map(bytes, one)) + continuation))


def test_nothing_is_allocated_for_a_refused_length():
    asked = []

    def allocate(nbytes):
        asked.append(nbytes)
        return memoryview(bytearray(nbytes))

    decoder = Decoder(Limits(max_payload_bytes=1 << 20), allocate)
    decoder.receive(frame(record=RECORD, payload=1 << 62, chunk=1))
    assert asked == []
    assert isinstance(decoder.error, FrameTooLarge)


def test_lack_of_memory_is_a_recorded_error():
    def allocate(nbytes):
        raise MemoryError

    decoder = Decoder(allocate=allocate)
    decoder.receive(wire(gradient(1, b"x")))
    assert "no memory for a payload of 1 bytes" in str(decoder.error)


def test_unfinished_tells_of_a_truncated_message():
    data = wire(gradient(1, b"x" * 10))
    for cut in range(len(data) + 1):
        decoder = Decoder()
        arrived = decoder.receive(data[:cut])
        assert decoder.unfinished == (0 < cut < len(data))
        assert len(arrived) == (cut == len(data))


def test_too_many_reported_bytes_are_our_bug():
    decoder = Decoder()
    buffer = decoder.get_buffer()
    with pytest.raises(LocalProtocolError, match="reported"):
        decoder.buffer_updated(len(buffer) + 1)


@pytest.mark.parametrize(
    ("message", "sequence", "buffers", "words"),
    [
        (Ping(1), 1, [], "sequence 1"),
        (EndRun("r"), 0, [], "sequence 0"),
        (EndRun("r"), 1 << 63, [], "sequence"),
        (EndRun("r"), 1, [b"x"], "cannot be sent"),
        (bucket(3), 1, [b"x"], "cannot be sent"),
        (EndRun(object()), 1, [], "cannot be sent"),
        (Log("s", ("x" * (9 << 20),)), 1, [], "at most 8388608"),
        (FlatTensor("uint8", 1), 1, [], "no record"),
    ],
)
def test_what_cannot_be_received_is_not_sent(message, sequence, buffers, words):
    with pytest.raises(LocalProtocolError, match=words):
        OutgoingMessage(message, Channel.CONTROL, sequence, [memoryview(b) for b in buffers])


def tree(*specs: TensorSpec) -> LoadState:
    return LoadState("r", 0, 0, Tree(b"", specs))


def test_trees_that_fit():
    specs = [
        TensorSpec("bfloat16", (2, 3), 0, 12),
        TensorSpec("float64", (), 16, 8),
        TensorSpec("int64", (0, 5), 24, 0),
    ]
    OutgoingMessage(tree(*specs), Channel.CHECKPOINT, 1, [memoryview(bytes(24))])


@pytest.mark.parametrize(
    "spec",
    [
        TensorSpec("object", (1,), 0, 8),
        TensorSpec("float32", (2,), 0, 4),
        TensorSpec("float32", (2,), 4, 8),
        TensorSpec("float32", (2,), -8, 8),
        TensorSpec("float32", (-1, -2), 0, 8),
        TensorSpec("float32", (1 << 62, 1 << 62), 0, 8),
        TensorSpec("float32", (0, 1 << 62, 1 << 62), 0, 0),
        TensorSpec("float32", (1,) * 65, 0, 4),
        TensorSpec("float32", (1,), (1 << 63) - 1, 4),
        TensorSpec("uint8", (1 << 63,), 0, 1 << 63),
    ],
)
def test_trees_that_do_not_fit(spec):
    with pytest.raises(LocalProtocolError):
        OutgoingMessage(tree(spec), Channel.CHECKPOINT, 1, [memoryview(bytes(8))])
