"""Compressed chunks: exact when honest, harmless when not."""

from __future__ import annotations

import tracemalloc

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from guava_nb.errors import RemoteProtocolError
from guava_nb.protocol.compression import compress, decompress_into
from guava_nb.protocol.framing import CHUNK_BYTES, Decoder, Limits, OutgoingMessage, pack_chunk
from guava_nb.protocol.messages import Channel, FlatTensor, GradientBucket

READS = Limits(max_payload_bytes=64 << 20, compressed=True)


def message(payload: bytes) -> OutgoingMessage:
    bucket = GradientBucket(
        run_id="run", generation=1, step=2, shard=3, bucket=0, present=b"\x01", tensor=FlatTensor("uint8", len(payload))
    )
    return OutgoingMessage(bucket, Channel.GRADIENT, 1, [memoryview(payload)])


def packed_wire(payload: bytes, pack: list[bool], chunk_bytes: int = CHUNK_BYTES) -> bytes:
    """The message with some of its frames compressed, whether or not that is smaller."""
    out = b""
    for number, frame in enumerate(message(payload).frames(chunk_bytes)):
        squeezed = pack_chunk(frame[0], compress(frame[1:])) if pack[number % len(pack)] else frame
        out += b"".join(bytes(part) for part in squeezed)
    return out


@settings(max_examples=60, deadline=None)
@given(
    st.binary(min_size=1, max_size=50),
    st.integers(1, 4000),
    st.lists(st.booleans(), min_size=1, max_size=4),
    st.integers(1000, 60_000),
    st.integers(1, 9999),
)
def test_any_mixture_of_frames_comes_back_exactly(
    unit: bytes, times: int, pack: list[bool], chunk_bytes: int, piece: int
) -> None:
    payload = unit * times
    wire = packed_wire(payload, pack, chunk_bytes)
    decoder, arrived = Decoder(READS), []
    for at in range(0, len(wire), piece):
        arrived += decoder.receive(wire[at : at + piece])
    if decoder.error is not None:  # a chunk that grew is longer than what is left: no sender of ours sends that
        assert "bytes of a payload" in str(decoder.error)
        return
    assert bytes(arrived[0].payload) == payload and arrived[0].wire_bytes == len(wire)


def test_a_long_payload_shrinks_on_the_wire_and_counts_in_full_against_the_window() -> None:
    payload = bytes(range(256)) * (3 * CHUNK_BYTES // 256) + b"tail"
    wire = packed_wire(payload, [True, False])
    (arrived,) = Decoder(READS).receive(wire)
    assert bytes(arrived.payload) == payload
    assert arrived.wire_bytes == len(wire) < len(payload) * 0.4
    assert arrived.total_bytes == message(payload).total_bytes


def hostile(chunk: bytes, payload_bytes: int = CHUNK_BYTES) -> str:
    """What the decoder says of a frame with this chunk."""
    frame = next(message(bytes(payload_bytes)).frames())
    decoder = Decoder(READS)
    assert decoder.receive(b"".join(bytes(part) for part in pack_chunk(frame[0], chunk))) == []
    return str(decoder.error)


def test_a_bomb_is_refused_before_anything_is_decompressed() -> None:
    bomb = zstandard.ZstdCompressor(level=1).compress(bytes(1 << 30))  # 1 GiB of zeros in some 30 KiB
    assert len(bomb) < 200_000
    tracemalloc.start()
    try:
        assert f"states {1 << 30} bytes, where 1 to {CHUNK_BYTES}" in hostile(bomb)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_a_chunk_never_reaches_beyond_its_payload() -> None:
    assert "states 5000 bytes, where 1 to 4096" in hostile(compress([bytes(5000)]), payload_bytes=4096)


def test_frames_that_lie_are_refused() -> None:
    honest = compress([b"some text " * 1000])
    assert "does not state its size" in hostile(
        zstandard.ZstdCompressor(write_content_size=False).compress(b"some text " * 1000)
    )
    assert "cannot be read" in hostile(b"no zstd at all, but long enough")
    assert "cannot be read" in hostile(honest[:-4])
    assert "cannot be read" in hostile(honest + honest)  # more behind it
    assert "where 1 to" in hostile(compress([b""]))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_are_content_or_an_error_of_ours(data: bytes) -> None:
    target = memoryview(bytearray(1000))
    try:
        size = decompress_into(memoryview(data), target)
    except RemoteProtocolError:
        return
    assert 0 < size <= 1000


def test_who_did_not_offer_to_read_it_refuses_it() -> None:
    wire = packed_wire(b"x" * 50_000, [True])
    decoder = Decoder(Limits())
    assert decoder.receive(wire) == []
    with pytest.raises(RemoteProtocolError, match="did not offer"):
        raise decoder.error  # type: ignore[misc]
