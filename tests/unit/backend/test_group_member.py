"""A rank's end of a group against a hub that the test plays: order of arrival, tags, confirmations, endings."""

from __future__ import annotations

import time

import numpy as np
import pytest

from guava_nb.backend.endpoint import Endpoint
from guava_nb.backend.group_member import GroupMember, called_back
from guava_nb.backend.operation import CHUNK_BYTES, Operation, Part, Slot
from guava_nb.errors import CollectiveError, CollectiveTimeout, GroupBroken, LinkBroken
from guava_nb.protocol.messages import (
    CallSpec,
    Expire,
    FlatTensor,
    GroupEnded,
    LeaveGroup,
    OpenGroup,
    OperationFailed,
    Parcel,
    Piece,
    StoreAsk,
    StoreReply,
    Taken,
)

SPEC = CallSpec("all_gather", "", "uint8", (2,))


class Sent(list):
    def __call__(self, message, buffers) -> None:
        self.append((message, b"".join(bytes(buffer) for buffer in buffers)))

    def of(self, kind):
        return [message for message, _ in self if isinstance(message, kind)]


@pytest.fixture
def sent() -> Sent:
    return Sent()


@pytest.fixture
def circle(sent: Sent) -> GroupMember:
    made = GroupMember("g", 0, ["a", "b", "c"], sent)
    made.open()
    return made


def operation(*sources: int, size: int = 2, timeout_s: float = 60.0) -> Operation:
    made = Operation("all_gather", SPEC, timeout_s)
    for source in sources:
        made.add_slot(source, Slot(np.zeros(size, np.uint8), "uint8", 1))
    return made


def piece(sequence: int, source: int, data: bytes, offset: int = 0, total: int | None = None) -> tuple[Piece, bytes]:
    total = len(data) if total is None else total
    return Piece(
        group="g",
        sequence=sequence,
        target=-1,
        source=source,
        offset=offset,
        total=total,
        tensor=FlatTensor("uint8", len(data)),
    ), data


def parcel(source: int, number: int, data: bytes, tag: int = 0, offset: int = 0, total: int | None = None):
    total = len(data) if total is None else total
    return Parcel(
        group="g",
        source=source,
        target=0,
        tag=tag,
        number=number,
        offset=offset,
        total=total,
        tensor=FlatTensor("uint8", len(data)),
    ), data


def receive(circle: GroupMember, source: int, tag: int = 0, size: int = 2) -> tuple[Operation, Slot]:
    made, slot = Operation("receive", None, 60.0), Slot(np.zeros(size, np.uint8), "uint8", 1)
    circle.receive(made, source, tag, slot)
    return made, slot


def test_a_circle_opens_its_group_and_sends_chunks_with_the_call_on_the_first(circle: GroupMember, sent: Sent) -> None:
    assert sent[0] == (OpenGroup("g", 0, 3, "a"), b"")
    data = np.arange(CHUNK_BYTES + 10).astype(np.uint8)
    out = operation(1)
    out.parts = [Part(-1, data, 1)]
    out.await_confirmation()
    circle.start(out)
    first, second = sent.of(Piece)
    assert (first.call, first.confirm, first.offset, first.total) == (SPEC, False, 0, len(data))
    assert (second.call, second.confirm, second.offset) == (None, True, CHUNK_BYTES)
    circle.post(*piece(1, 1, b"xy"))
    assert not out.done  # the hub may still need our memory
    circle.post(Taken("g", 1), b"")
    assert out.done and out.error is None


def test_who_has_nothing_to_send_says_that_it_called(circle: GroupMember, sent: Sent) -> None:
    circle.start(operation(1))
    (only,) = sent.of(Piece)
    assert (only.target, only.call, only.tensor.numel) == (-2, SPEC, 0)


def test_what_comes_before_its_call_waits_for_it(circle: GroupMember) -> None:
    circle.post(*piece(1, 1, b"ab"))
    circle.post(*piece(2, 1, b"ef"))
    circle.post(*piece(1, 2, b"c", 0, 2))
    first = circle.start(operation(1, 2))
    assert not first.done
    circle.post(*piece(1, 2, b"d", 1, 2))
    assert first.done
    assert bytes(first.slots[1].data) + bytes(first.slots[2].data) == b"abcd"
    assert bytes(circle.start(operation(1)).slots[1].data) == b"ef"


def test_a_piece_that_does_not_fit_is_an_error_with_the_rank(circle: GroupMember) -> None:
    waiting = circle.start(operation(1))
    circle.post(*piece(1, 1, b"abc"))
    assert "rank 1 (b)" in str(waiting.error) and "3 elements of uint8 came where 2" in str(waiting.error)


def test_tags_and_sources_choose_and_order_is_kept(circle: GroupMember) -> None:
    for number, (tag, data) in enumerate([(1, b"aa"), (2, b"bb"), (1, b"cc")], 1):
        circle.post(*parcel(1, number, data, tag))
    circle.post(*parcel(2, 1, b"d", 1, 0, 2))
    assert bytes(receive(circle, 1, 2)[1].data) == b"bb"
    assert bytes(receive(circle, -1, 1)[1].data) == b"aa"
    late, slot = receive(circle, 2, 1)
    assert not late.done
    assert bytes(receive(circle, 1, 1)[1].data) == b"cc"
    circle.post(*parcel(2, 1, b"D", 1, 1, 2))
    assert late.done and late.source == 2 and bytes(slot.data) == b"dD"


def test_a_receive_that_waits_gets_the_next_and_knows_from_whom(circle: GroupMember) -> None:
    first, slot = receive(circle, -1)
    second, _ = receive(circle, -1)
    circle.post(*parcel(2, 1, b"x", 0, 0, 2))
    circle.post(*parcel(1, 1, b"yy"))
    assert second.done and second.source == 1
    circle.post(*parcel(2, 1, b"z", 0, 1, 2))
    assert first.done and first.source == 2 and bytes(slot.data) == b"xz"


def test_empty_tensors_arrive(circle: GroupMember) -> None:
    circle.post(*parcel(1, 1, b""))
    assert receive(circle, 1, size=0)[0].done
    waiting = receive(circle, 1, size=0)[0]
    assert not waiting.done
    circle.post(*parcel(1, 2, b""))
    assert waiting.done


def test_sends_are_numbered_per_target_and_end_when_taken(circle: GroupMember, sent: Sent) -> None:
    works = []
    for target in (1, 2, 1):
        work = Operation("send", None, 60.0)
        work.await_confirmation()
        works.append(circle.send(work, Part(target, np.ones(3, np.uint8), 1), "uint8", 4, None))
    assert [(m.target, m.number, m.tag, m.confirm) for m in sent.of(Parcel)] == [
        (1, 1, 4, True),
        (2, 1, 4, True),
        (1, 2, 4, True),
    ]
    circle.post(Taken("g", -2, 1), b"")
    assert [work.done for work in works] == [False, False, True]


def test_a_broken_group_ends_all_that_is_pending_and_all_that_comes(circle: GroupMember) -> None:
    pending = [circle.start(operation(1)), receive(circle, 1)[0], receive(circle, 2)[0]]
    circle.post(*parcel(2, 1, b"x", 0, 0, 2))
    circle.post(GroupEnded("g", "rank 1 (b) was lost: silence"), b"")
    pending += [circle.start(operation(1)), receive(circle, 1)[0]]
    for one in pending:
        assert isinstance(one.error, GroupBroken) and "rank 1 (b) was lost" in str(one.error)
    assert len({id(one.error) for one in pending}) == len(pending)


def test_who_left_is_waited_for_no_more_but_what_it_sent_before_is_there(circle: GroupMember) -> None:
    circle.post(*parcel(1, 1, b"ab"))
    waiting, anyone = receive(circle, 2)[0], receive(circle, -1, tag=9)[0]
    circle.post(LeaveGroup("g", 1), b"")
    assert receive(circle, 1)[0].error is None
    assert "rank 1 (b) has left" in str(receive(circle, 1)[0].error)
    assert not waiting.done and not anyone.done
    circle.post(LeaveGroup("g", 2), b"")
    assert waiting.error is not None and anyone.error is not None


def test_failures_reach_also_who_was_done_already(circle: GroupMember) -> None:
    done = circle.start(operation())
    assert done.done and done.error is None
    circle.post(OperationFailed("g", 1, "the ranks do not agree"), b"")
    assert "do not agree" in str(circle.start(operation(1)).error)
    assert circle.start(operation(1)).error is None  # the group stands


def test_time_is_asked_of_the_hub_and_then_taken(circle: GroupMember, sent: Sent) -> None:
    late = circle.start(operation(1, timeout_s=0.0))
    circle.check_deadlines(time.monotonic() + 1)
    assert sent.of(Expire) == [Expire("g", 1, 0.0)] and not late.done
    circle.check_deadlines(time.monotonic() + 60)
    assert isinstance(late.error, CollectiveTimeout) and "did not answer" in str(late.error)
    waiting = receive(circle, 1)[0]
    circle.check_deadlines(time.monotonic() + 120)
    assert isinstance(waiting.error, CollectiveTimeout)
    assert receive(circle, 1)[0].error is None


def test_leaving_ends_what_is_pending_and_is_said_once(circle: GroupMember, sent: Sent) -> None:
    pending = circle.start(operation(1))
    circle.leave()
    circle.leave()
    assert sent.of(LeaveGroup) == [LeaveGroup("g", 0)]
    assert "destroyed here" in str(pending.error)


def test_a_result_that_cannot_be_put_in_place_is_an_error(circle: GroupMember) -> None:
    made = operation(1)

    def explode() -> None:
        raise MemoryError("no room")

    made.finish = explode
    circle.start(made)
    circle.post(*piece(1, 1, b"ab"))
    assert isinstance(made.error, CollectiveError) and "no room" in str(made.error)


def test_an_endpoint_routes_and_wakes(sent: Sent) -> None:
    endpoint = Endpoint(sent, "a")
    circle = endpoint.open_group("g", 0, ["a", "b"])
    with pytest.raises(CollectiveError, match="is open in this process"):
        endpoint.open_group("g", 0, ["a", "b"])
    waiting = circle.start(operation(1))
    finished: list[int] = []
    assert endpoint.post(*piece(1, 1, b"ab"), lambda: finished.append(1)) and waiting.done and finished == [1]
    assert not endpoint.post(StoreAsk(1, "get"), b"", lambda: finished.append(2))
    assert endpoint.post(Taken("unknown", 1), b"", lambda: finished.append(3))
    with pytest.raises(CollectiveTimeout, match="waited 0 s for the store to get 'k'"):
        endpoint.ask("get", ["k"], timeout_s=0.0)
    assert sent.of(StoreAsk)[-1].op == "cancel"
    endpoint.closed(LinkBroken("the hub fell silent"))
    assert "the hub fell silent" in str(circle.start(operation(1)).error)
    with pytest.raises(GroupBroken, match="the hub fell silent"):
        endpoint.ask("get", ["k"])


def test_what_waited_at_the_hub_may_come_before_open_returns() -> None:
    def send(message, buffers) -> None:
        if isinstance(message, OpenGroup):
            endpoint.post(*parcel(1, 1, b"ab"), int)

    endpoint = Endpoint(send, "a")
    assert bytes(receive(endpoint.open_group("g", 0, ["a", "b"]), 1)[1].data) == b"ab"


def test_an_answer_of_the_store_comes_back(sent: Sent) -> None:
    endpoint = Endpoint(lambda message, buffers: answer(message), "a")

    def answer(message) -> None:
        if isinstance(message, StoreAsk):
            endpoint.post(
                StoreReply(message.request_id, (b"v",), problem="" if message.op == "get" else "no"), b"", int
            )

    assert endpoint.ask("get", ["k"]).values == (b"v",)
    with pytest.raises(CollectiveError, match="no"):
        endpoint.ask("set", ["k"], [b""])


def test_a_collective_is_not_over_before_its_own_bytes_are_out(circle: GroupMember, sent: Sent) -> None:
    """Bytes that come from a device are late: the other ranks' may all be here first."""
    ready = []
    made = operation(1, 2)
    made.parts = [Part(-1, np.array([7, 8], np.uint8), 1)]
    circle.post(*piece(1, 1, b"ab"))
    circle.start(made, ready.append)
    circle.post(*piece(1, 2, b"cd"))
    assert not made.done and sent.of(Piece) == []
    ready[0](None)
    assert made.done and made.error is None
    assert [data for message, data in sent if isinstance(message, Piece)] == [b"\x07\x08"]


def test_bytes_that_never_come_from_their_device_end_the_call(circle: GroupMember, sent: Sent) -> None:
    ready = []
    made = circle.start(operation(1, 2), ready.append)
    ready[0](RuntimeError("an illegal memory access"))
    assert made.done and "could not be brought from the device: an illegal memory access" in str(made.error)
    ended = circle.start(operation(1, 2), ready.append)
    circle.end(GroupBroken("b was lost"))
    before = len(sent)
    ready[1](None)
    assert ended.done and len(sent) == before


def test_a_send_from_a_device_is_over_when_its_bytes_are_out(circle: GroupMember, sent: Sent) -> None:
    ready = []
    made = Operation("send", None, 60.0)
    circle.send(made, Part(1, np.array([1], np.uint8), 1), "uint8", 0, ready.append)
    assert not made.done and sent.of(Parcel) == []
    ready[0](None)
    assert made.done and len(sent.of(Parcel)) == 1


def test_a_callback_calls_the_next_collective_or_is_refused(circle: GroupMember) -> None:
    first = circle.start(operation(1, 2))
    with called_back(circle, first.sequence):
        second = circle.start(operation(1, 2))
        assert circle.start(operation(1, 2)).sequence == second.sequence + 1  # the same callback's next one
    with called_back(circle, first.sequence), pytest.raises(CollectiveError, match="in another order"):
        circle.start(operation(1, 2))
    other = GroupMember("other", 0, ["a", "b"], Sent())
    with called_back(circle, first.sequence):
        assert other.start(operation(1)).sequence == 1  # another group has an order of its own
    assert circle.start(operation(1, 2)).sequence == 4  # what was refused has no number
