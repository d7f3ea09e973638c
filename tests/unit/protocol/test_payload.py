"""Payload memory is used again only when nobody holds it."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from guava_nb.protocol.framing import Decoder, OutgoingMessage
from guava_nb.protocol.messages import Channel, FlatTensor, GradientBucket
from guava_nb.protocol.payload import PayloadMemory

MIB = 1 << 20


def address(view: memoryview) -> int:
    return np.frombuffer(view, np.uint8).__array_interface__["data"][0]


def test_a_dropped_buffer_is_given_again():
    memory = PayloadMemory()
    first = memory(2 * MIB)
    where = address(first)
    del first
    second = memory(2 * MIB - 5)
    assert address(second) == where
    assert second.nbytes == 2 * MIB - 5


@pytest.mark.parametrize(
    "hold",
    [
        lambda view: view,
        lambda view: view[10:20],
        lambda view: view.cast("d"),
        lambda view: np.frombuffer(view, np.float32)[3:4],
        lambda view: [memoryview(view)],
        lambda view: view.toreadonly(),
    ],
)
def test_a_buffer_that_anything_refers_to_is_not_given_again(hold):
    memory = PayloadMemory()
    view = memory(MIB)
    where, held = address(view), hold(view)
    del view
    other = memory(MIB)
    assert address(other) != where
    del held, other
    assert {address(a) for a in [memory(MIB), memory(MIB)]} >= {where}


def test_a_small_payload_does_not_take_a_large_buffer():
    memory = PayloadMemory()
    where = address(memory(8 * MIB))
    assert address(memory(2 * MIB)) != where
    assert address(memory(4 * MIB)) == where


def test_no_more_is_kept_than_allowed():
    memory = PayloadMemory(4 * MIB)
    held = [memory(MIB) for _ in range(10)]
    assert memory._kept_bytes == sum(buffer.nbytes for buffer in memory._buffers) == 4 * MIB
    assert len({address(view) for view in held}) == 10
    memory(3 * MIB)
    assert memory._kept_bytes <= 4 * MIB


@pytest.mark.parametrize(("max_kept", "nbytes"), [(0, MIB), (4 * MIB, 5 * MIB), (4 * MIB, 1), (4 * MIB, 0)])
def test_what_is_not_worth_keeping_is_not_kept(max_kept, nbytes):
    memory = PayloadMemory(max_kept)
    view = memory(nbytes)
    assert (view.nbytes, view.readonly, view.format) == (nbytes, False, "B")
    assert memory._kept_bytes == 0


def test_payloads_of_a_decoder_stay_as_they_came_while_held():
    decoder, held = Decoder(), []
    for sequence in range(1, 8):
        message = GradientBucket(
            run_id="r", generation=0, step=0, shard=0, bucket=0, present=b"", tensor=FlatTensor("uint8", MIB)
        )
        outgoing = OutgoingMessage(message, Channel.GRADIENT, sequence, [memoryview(bytes([sequence]) * MIB)])
        (arrived,) = decoder.receive(b"".join(bytes(part) for frame in outgoing.frames() for part in frame))
        if sequence % 2:
            held.append((sequence, arrived.payload))
        del arrived
    assert all(payload == bytes([sequence]) * MIB for sequence, payload in held)


def test_connections_may_share_what_is_kept():
    memory = PayloadMemory(lock=threading.Lock())
    # Each with memory of its own, two hundred workers would pin two hundred times the limit.
    head = GradientBucket(
        run_id="r", generation=0, step=0, shard=0, bucket=0, present=b"", tensor=FlatTensor("uint8", MIB)
    )
    frames = b"".join(
        b"".join(frame) for frame in OutgoingMessage(head, Channel.GRADIENT, 1, [memoryview(bytes(MIB))]).frames()
    )
    places = set()
    for _ in range(5):
        (arrived,) = Decoder(allocate=memory).receive(frames)
        places.add(address(arrived.payload))
        del arrived
    assert len(places) == 1
