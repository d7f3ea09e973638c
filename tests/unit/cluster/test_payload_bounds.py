from __future__ import annotations

import pytest

from guava_nb.cluster.payload_bounds import PayloadBounds
from guava_nb.errors import FrameTooLarge
from guava_nb.protocol.framing import Decoder, Limits, OutgoingMessage
from guava_nb.protocol.messages import (
    Channel,
    CodeRan,
    CodeValues,
    FetchState,
    Message,
    RunCode,
    State,
    TensorSpec,
    Tree,
)

GIB = 1 << 30


def state(nbytes: int) -> State:
    return State(1, "run-1", 0, Tree(b"", (TensorSpec("uint8", (nbytes,), 0, nbytes),)))


def test_a_state_may_come_once_for_each_question_and_never_unasked() -> None:
    bounds, asked = PayloadBounds(), FetchState(1, "run-1")
    assert bounds.most_bytes(0, state(0)) == 0
    bounds.sent(0, asked)
    assert bounds.most_bytes(0, state(0)) == GIB and bounds.most_bytes(1, state(0)) == 0
    assert bounds.most_bytes(None, state(0)) == 0
    bounds.came(0, state(0))
    assert bounds.most_bytes(0, state(0)) == 0


def test_the_bound_follows_from_the_model() -> None:
    bounds = PayloadBounds()
    bounds.sent(0, FetchState(1, "run-1"))
    bounds.expect_model(7 * GIB)
    bounds.expect_model(GIB)
    assert bounds.most_bytes(0, state(0)) == 64 * 7 * GIB


def test_a_payload_beyond_the_question_is_refused_before_memory_is_taken() -> None:
    taken: list[int] = []

    def allocate(nbytes: int) -> memoryview:
        taken.append(nbytes)
        return memoryview(bytearray(nbytes))

    def most(message: Message) -> int:
        return 100

    decoder = Decoder(Limits(payload_of=most), allocate)
    for size in (100, 101):
        message = OutgoingMessage(state(size), Channel.CHECKPOINT, size - 99, [memoryview(bytes(size))])
        for frame in message.frames():
            decoder.receive(b"".join(bytes(part) for part in frame))
    assert taken == [100]
    assert isinstance(decoder.error, FrameTooLarge) and "State of 101 bytes; it was asked for 100" in str(decoder.error)


@pytest.mark.parametrize("rank", [0, None])
def test_a_line_of_text_has_no_payload_to_bound(rank: int | None) -> None:
    from guava_nb.protocol.messages import Log

    assert PayloadBounds().most_bytes(rank, Log("stdout", ("x",))) <= 64 << 20


def test_values_of_code_come_once_for_their_request_and_no_larger_than_it_allows() -> None:
    bounds, values = PayloadBounds(), CodeValues(5, Tree(b""))
    assert bounds.most_bytes(0, values) == 0
    asked = RunCode(request_id=5, cell="px", text="", values=Tree(b""), wanted=(), rank=0, most_bytes=77)
    bounds.sent(0, asked)
    assert bounds.most_bytes(0, values) == 77
    assert [bounds.most_bytes(rank, values) for rank in (1, None)] == [0, 0]
    assert bounds.most_bytes(0, CodeValues(6, Tree(b""))) == 0
    bounds.came(0, CodeRan(request_id=5, nbytes=60))  # its values are on the way
    assert bounds.most_bytes(0, values) == 77
    bounds.came(0, values)
    assert bounds.most_bytes(0, values) == 0
    bounds.sent(0, asked)
    bounds.came(0, CodeRan(request_id=5, type_name="ValueError"))  # none come
    assert bounds.most_bytes(0, values) == 0
