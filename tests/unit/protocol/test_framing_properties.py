"""Any messages in any chunking come back; any bytes give messages or a recorded error, in bounded memory."""

from __future__ import annotations

import itertools
import struct
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guava_nb.errors import FrameTooLarge, RemoteProtocolError
from guava_nb.protocol.framing import WIRE_VERSION, Decoder, Limits, OutgoingMessage
from guava_nb.protocol.messages import (
    KIND_OF,
    MESSAGE_KINDS,
    Attach,
    Channel,
    EndRun,
    FlatTensor,
    GradientBucket,
    Prepare,
)
from tests.unit.protocol.wire_cases import examples, feed, messages, mixed, numbered, small_buffers, struct_of

LIMITS = Limits(max_record_bytes=1 << 16, max_payload_bytes=1 << 12)
LAYOUT = struct.Struct("<4sBBBBQIIQ")

step_sizes = st.lists(st.integers(1, 200), min_size=1, max_size=20)


def stepper(sizes):
    cycle = itertools.cycle(sizes)
    return lambda room: next(cycle)


class CountingAllocator:
    """Hands out memory and remembers how much."""

    def __init__(self) -> None:
        self.total_bytes = 0

    def __call__(self, nbytes: int) -> memoryview:
        self.total_bytes += nbytes
        return memoryview(bytearray(nbytes))


@pytest.mark.parametrize("record", MESSAGE_KINDS.values(), ids=lambda record: record.__name__)
def test_every_record_comes_back(record):
    @examples(8)
    @given(struct_of(record, 0))
    def check(message):
        sequence = 0 if KIND_OF[record] < 16 else 1
        outgoing = OutgoingMessage(message, Channel.CONTROL, sequence)
        (frame,) = outgoing.frames()
        (arrived,) = Decoder().receive(frame[0])
        assert arrived.message == message

    check()


@examples(100)
@given(st.data(), st.lists(messages(), max_size=8), st.integers(1, 400), step_sizes)
def test_any_messages_in_any_chunking_come_back(data, drawn, chunk_bytes, sizes):
    starts = {channel: 1 + 10 * channel for channel in Channel}
    outgoing = numbered(drawn, starts)
    with small_buffers():
        stream = mixed(outgoing, chunk_bytes, lambda n: data.draw(st.integers(0, n - 1)))
        arrived, decoder = feed(stream, stepper(sizes))
    assert decoder.error is None
    assert not decoder.unfinished
    for channel in Channel:
        ours = [(a.message, a.sequence, bytes(a.payload)) for a in arrived if a.channel is channel]
        sent = zip(outgoing, drawn, strict=True)
        assert ours == [(o.message, o.sequence, payload) for o, (_, _, payload) in sent if o.channel is channel]
    assert sum(a.wire_bytes for a in arrived) == len(stream)


def outcome(stream, sizes):
    allocator = CountingAllocator()
    with small_buffers():
        arrived, decoder = feed(stream, stepper(sizes), LIMITS, allocator)
    told = [(a.message, a.channel, a.sequence, bytes(a.payload)) for a in arrived]
    return told, decoder, allocator.total_bytes


def check_outcome(stream, sizes):
    """No exception, an error with words or none, allocations within the limits, and the same for any chunking."""
    told, decoder, allocated = outcome(stream, sizes)
    again, other, _ = outcome(stream, [len(stream) or 1])
    assert repr(told) == repr(again)
    assert str(decoder.error) == str(other.error)
    assert decoder.error is None or isinstance(decoder.error, RemoteProtocolError)
    num_headers = len(stream) // 32
    assert allocated <= num_headers * LIMITS.max_payload_bytes
    return told, decoder


@examples(100)
@given(st.binary(max_size=400), step_sizes)
def test_any_bytes(stream, sizes):
    check_outcome(stream, sizes)


@examples(100)
@given(
    st.lists(
        st.builds(
            lambda kind, channel, sequence, record, chunk, payload, rest: (
                LAYOUT.pack(b"GVNB", WIRE_VERSION, kind, channel, 0, sequence, len(record), chunk, payload)
                + record
                + rest
            ),
            st.sampled_from([0, *MESSAGE_KINDS, 99]),
            st.integers(0, 8),
            st.sampled_from([0, 1, 2, 3, (1 << 63) - 1, 1 << 63]),
            st.binary(max_size=30),
            st.sampled_from([0, 1, 8, 1 << 20, (1 << 20) + 1, (1 << 32) - 1]),
            st.sampled_from([0, 1, 8, 16, 1 << 12, 1 << 13, 1 << 63, (1 << 64) - 1]),
            st.binary(max_size=16),
        ),
        max_size=4,
    ),
    step_sizes,
)
def test_any_headers(frames, sizes):
    check_outcome(b"".join(frames), sizes)


@examples(100)
@given(st.data(), st.lists(messages(), min_size=1, max_size=4), st.integers(1, 400), step_sizes)
def test_damaged_streams(data, drawn, chunk_bytes, sizes):
    stream = bytearray(mixed(numbered(drawn, {}), chunk_bytes, lambda n: 0))
    damage = data.draw(st.sampled_from(["flip", "cut", "drop", "insert", "repeat"]))
    at = data.draw(st.integers(0, len(stream) - 1))
    end = min(len(stream), at + data.draw(st.integers(1, 40)))
    if damage == "flip":
        stream[at] ^= 1 << data.draw(st.integers(0, 7))
    elif damage == "cut":
        del stream[at:]
    elif damage == "drop":
        del stream[at:end]
    elif damage == "insert":
        stream[at:at] = data.draw(st.binary(min_size=1, max_size=40))
    else:
        stream[at:at] = stream[at:end]
    told, decoder = check_outcome(bytes(stream), sizes)
    if damage == "cut":
        assert decoder.error is None
        assert len(told) < len(drawn)


@given(st.binary(max_size=60))
@examples(100)
def test_any_bytes_as_a_record(record):
    for kind in MESSAGE_KINDS:
        sequence = 0 if kind < 16 else 1
        decoder = Decoder()
        arrived = decoder.receive(LAYOUT.pack(b"GVNB", WIRE_VERSION, kind, 1, 0, sequence, len(record), 0, 0) + record)
        assert bool(arrived) != (decoder.error is not None)


def framed(kind: int, record: bytes) -> bytes:
    return LAYOUT.pack(b"GVNB", WIRE_VERSION, kind, 1, 0, 1, len(record), 0, 0) + record


@pytest.mark.parametrize("nesting", [b"\x91", b"\x81\xa1a", b"\xdd\x00\x00\x00\x01"])
def test_endless_nesting_is_a_recorded_error(nesting):
    spec = b"\x91\x92\xa1m\x81\xa1x"  # RunSpec(model=Factory("m", {"x": ...
    decoder = Decoder()
    decoder.receive(framed(KIND_OF[Prepare], b"\x93\xa1r\x90" + spec + nesting * 200_000))
    assert "cannot be read" in str(decoder.error)


@pytest.mark.parametrize("length", [1 << 63, (1 << 64) - 1, (64 << 30) + 1])
def test_a_giant_length_costs_nothing(length):
    tracemalloc.start()
    try:
        decoder = Decoder()
        message = GradientBucket(
            run_id="r", generation=0, step=0, shard=0, bucket=0, present=b"", tensor=FlatTensor("uint8", 0)
        )
        record = next(OutgoingMessage(message, Channel.GRADIENT, 1).frames())[0][32:]
        decoder.receive(
            LAYOUT.pack(b"GVNB", WIRE_VERSION, KIND_OF[GradientBucket], 4, 0, 1, len(record), 1, length) + record
        )
        assert isinstance(decoder.error, FrameTooLarge)
        for _ in range(200):
            decoder.receive(b"\xff" * 65536)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_failed_decoder_lets_go_of_its_payload():
    buffer = bytearray(1 << 20)
    decoder = Decoder(allocate=lambda nbytes: memoryview(buffer)[:nbytes])
    message = GradientBucket(
        run_id="r", generation=0, step=0, shard=0, bucket=0, present=b"", tensor=FlatTensor("uint8", 1 << 20)
    )
    first, _ = OutgoingMessage(message, Channel.GRADIENT, 1, [memoryview(bytes(1 << 20))]).frames(1 << 19)
    decoder.receive(b"".join(map(bytes, first)) + b"\0" * 32)
    assert decoder.error is not None
    buffer.append(0)


def test_memory_before_the_join_is_one_small_record():
    decoder = Decoder(Limits.before_join())
    attach = Attach(session_id=b"s" * 16, identity=b"i" * (65 << 10), purpose="control", incarnation=0, received={})
    decoder.receive(next(OutgoingMessage(attach, Channel.CONTROL, 0).frames())[0])
    assert isinstance(decoder.error, FrameTooLarge)


def test_many_messages_in_one_read_keep_their_order():
    stream = b"".join(next(OutgoingMessage(EndRun(str(i)), Channel.CONTROL, i).frames())[0] for i in range(1, 3000))
    assert [a.message.run_id for a in Decoder().receive(stream)] == [str(i) for i in range(1, 3000)]
