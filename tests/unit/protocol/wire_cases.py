"""Messages and streams for the tests of this room: records of every kind, cut and mixed in any way."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from unittest import mock

import msgspec
from hypothesis import settings
from hypothesis import strategies as st

from guava_nb.protocol import decoder as decoder_module
from guava_nb.protocol.framing import UNSEQUENCED, Decoder, Limits, OutgoingMessage
from guava_nb.protocol.messages import MESSAGE_KINDS, Channel, FlatTensor, Message, TensorSpec, Tree

# Payloads here are tiny; with thresholds to match, every way through the decoder is walked.
SMALL_STAGING_BYTES = 96
SMALL_DIRECT_BYTES = 8

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
LEAVES = {
    int: st.integers(-(1 << 63), (1 << 64) - 1),
    float: st.floats(allow_nan=False),
    str: st.text(max_size=40),
    bytes: st.binary(max_size=40),
    bool: st.booleans(),
    type(None): st.none(),
    typing.Any: PLAIN,
}


def examples(number: int) -> settings:
    """The same so many examples in every run."""
    return settings(max_examples=number, deadline=None, derandomize=True)


@contextmanager
def small_buffers() -> Iterator[None]:
    with (
        mock.patch.object(decoder_module, "_STAGING_BYTES", SMALL_STAGING_BYTES),
        mock.patch.object(decoder_module, "_DIRECT_BYTES", SMALL_DIRECT_BYTES),
    ):
        yield


def tree_of(payload_bytes: int) -> st.SearchStrategy[Tree]:
    half = payload_bytes // 4 * 2
    specs = (TensorSpec("bfloat16", (half // 2,), 0, half), TensorSpec("uint8", (payload_bytes,), 0, payload_bytes))
    return st.binary(max_size=20).map(lambda structure: Tree(structure, specs))


def value_of(hint: object, payload_bytes: int) -> st.SearchStrategy:
    """Values of a field's type; tensors fit a payload of so many bytes."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Tree:
        return tree_of(payload_bytes)
    if hint is FlatTensor:
        return st.just(FlatTensor("uint8", payload_bytes))
    if hint in LEAVES:
        return LEAVES[hint]
    if origin in (types.UnionType, typing.Union):
        return st.one_of([value_of(arg, payload_bytes) for arg in args])
    if origin is tuple and args[-1] is Ellipsis:
        return st.lists(value_of(args[0], payload_bytes), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*(value_of(arg, payload_bytes) for arg in args))
    if origin is dict:
        return st.dictionaries(value_of(args[0], payload_bytes), value_of(args[1], payload_bytes), max_size=3)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return st.sampled_from(hint)
    assert isinstance(hint, type) and issubclass(hint, msgspec.Struct), hint
    return struct_of(hint, payload_bytes)


def struct_of(record: type, payload_bytes: int) -> st.SearchStrategy:
    hints = typing.get_type_hints(record)
    return st.builds(record, **{name: value_of(hints[name], payload_bytes) for name in record.__struct_fields__})


def has_payload(record: type[Message]) -> bool:
    return bool({Tree, FlatTensor} & set(typing.get_type_hints(record).values()))


@st.composite
def messages(draw: st.DrawFn, max_payload_bytes: int = 300) -> tuple[Message, Channel, bytes]:
    record = draw(st.sampled_from(list(MESSAGE_KINDS.values())))
    payload = draw(st.binary(max_size=max_payload_bytes)) if has_payload(record) else b""
    return draw(struct_of(record, len(payload))), draw(st.sampled_from(list(Channel))), payload


def numbered(drawn: list[tuple[Message, Channel, bytes]], starts: dict[Channel, int]) -> list[OutgoingMessage]:
    """Give each message its sequence; a channel starts where `starts` says."""
    following = dict(starts)
    out = []
    for message, channel, payload in drawn:
        sequence = 0
        if type(message) not in UNSEQUENCED:
            sequence = following.get(channel, 1)
            following[channel] = sequence + 1
        half = len(payload) // 2
        buffers = [memoryview(payload[:half]), memoryview(payload[half:])]
        out.append(OutgoingMessage(message, channel, sequence, buffers))
    return out


def mixed(outgoing: list[OutgoingMessage], chunk_bytes: int, choose) -> bytes:
    """Interleave the frames of different channels as `choose(number of choices)` likes; in order within a channel."""
    lanes: dict[Channel, list[bytes]] = {}
    for message in outgoing:
        frames = [b"".join(bytes(part) for part in frame) for frame in message.frames(chunk_bytes)]
        lanes.setdefault(message.channel, []).extend(frames)
    stream = b""
    while lanes:
        channel = sorted(lanes)[choose(len(lanes))]
        stream += lanes[channel].pop(0)
        if not lanes[channel]:
            del lanes[channel]
    return stream


def feed(stream: bytes, step, limits: Limits | None = None, allocate=None) -> tuple[list, Decoder]:
    """Receive in place, `step(room)` bytes at a time."""
    decoder = Decoder(limits, allocate) if allocate else Decoder(limits)
    arrived, at = [], 0
    while at < len(stream):
        buffer = decoder.get_buffer()
        taken = max(1, min(step(buffer.nbytes), buffer.nbytes, len(stream) - at))
        buffer[:taken] = stream[at : at + taken]
        at += taken
        arrived += decoder.buffer_updated(taken)
    return arrived, decoder
