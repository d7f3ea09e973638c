"""Windows, acknowledgements and re-sending, without bytes."""

from __future__ import annotations

import weakref

import numpy as np
import pytest

from guava_nb.errors import LocalProtocolError, RemoteProtocolError
from guava_nb.protocol.framing import Arrived
from guava_nb.protocol.messages import Ack, Channel, EndRun, FlatTensor, GradientBucket, Ping
from guava_nb.protocol.resume import Inbox, Outbox

WINDOW = 1000
GRADIENT, BATCH, CONTROL = Channel.GRADIENT, Channel.BATCH, Channel.CONTROL


def put(outbox: Outbox, channel: Channel, nbytes: int = 0):
    message = GradientBucket(
        run_id="r", generation=0, step=0, shard=0, bucket=0, present=b"", tensor=FlatTensor("uint8", nbytes)
    )
    return outbox.enqueue(message, channel, [memoryview(bytes(nbytes))])


def drain(outbox: Outbox) -> list[tuple[Channel, int]]:
    sent = []
    while (message := outbox.next_sendable()) is not None:
        sent.append((message.channel, message.sequence))
    return sent


def arrived(channel: Channel, sequence: int, nbytes: int = 50) -> Arrived:
    return Arrived(EndRun("r"), channel, sequence, b"", nbytes, nbytes)


def test_order_is_by_channel_then_first_in_first_out():
    outbox = Outbox(WINDOW)
    for channel in (BATCH, GRADIENT, BATCH, CONTROL):
        put(outbox, channel)
    assert drain(outbox) == [(CONTROL, 1), (GRADIENT, 1), (BATCH, 1), (BATCH, 2)]


def test_before_keeps_to_more_urgent_channels():
    outbox = Outbox(WINDOW)
    put(outbox, BATCH)
    put(outbox, GRADIENT)
    assert outbox.next_sendable(before=GRADIENT) is None
    assert outbox.next_sendable(before=BATCH).channel is GRADIENT
    assert outbox.next_sendable(before=BATCH) is None


def test_window_is_per_channel_and_a_lone_message_may_exceed_it():
    outbox = Outbox(WINDOW)
    put(outbox, BATCH, 5 * WINDOW)
    put(outbox, BATCH)
    assert drain(outbox) == [(BATCH, 1)]
    put(outbox, GRADIENT)
    assert drain(outbox) == [(GRADIENT, 1)]
    outbox.acked(BATCH, 1)
    assert drain(outbox) == [(BATCH, 2)]


def test_counters():
    outbox = Outbox(WINDOW)
    first, second = put(outbox, BATCH, 300), put(outbox, GRADIENT, 200)
    assert outbox.backlog_bytes() == first.total_bytes + second.total_bytes
    assert outbox.backlog_bytes(BATCH) == first.total_bytes
    outbox.next_sendable()
    assert outbox.backlog_bytes() == first.total_bytes
    assert outbox.unacked_bytes == outbox._queues[GRADIENT].unacked_bytes == second.total_bytes
    outbox.acked(GRADIENT, 1)
    assert outbox.unacked_bytes == 0


def test_resume_puts_back_what_was_not_received_and_counts_what_was():
    outbox = Outbox(WINDOW)
    first = put(outbox, BATCH, 100)
    for _ in range(3):
        put(outbox, BATCH, 100)
    drain(outbox)
    put(outbox, BATCH, 100)
    outbox.resume({BATCH: 1})
    assert outbox.unacked_bytes == first.total_bytes
    assert drain(outbox) == [(BATCH, 2), (BATCH, 3), (BATCH, 4), (BATCH, 5)]


def test_resume_forgets_the_buffers_of_what_was_received():
    outbox, buffer = Outbox(WINDOW), bytearray(100)
    message = GradientBucket(
        run_id="r", generation=0, step=0, shard=0, bucket=0, present=b"", tensor=FlatTensor("uint8", 100)
    )
    outbox.enqueue(message, BATCH, [memoryview(buffer)])
    drain(outbox)
    with pytest.raises(BufferError):
        buffer.append(0)
    outbox.resume({BATCH: 1})
    buffer.append(0)


def test_a_session_that_is_over_keeps_no_payload():
    outbox, payloads = Outbox(WINDOW), [np.zeros(50, np.uint8) for _ in range(3)]
    for payload in payloads:
        message = GradientBucket(
            run_id="r", generation=0, step=0, shard=0, bucket=0, present=b"", tensor=FlatTensor("uint8", 50)
        )
        outbox.enqueue(message, GRADIENT, [payload.data])
    assert outbox.next_sendable() is not None
    kept = [weakref.ref(payload) for payload in payloads]
    del payload, payloads
    assert all(ref() is not None for ref in kept)
    outbox.let_go()
    assert all(ref() is None for ref in kept)
    assert outbox.next_sendable() is None
    assert outbox.backlog_bytes() == outbox.backlog_bytes(GRADIENT) == 0
    outbox.acked(GRADIENT, 1)  # which was on its way
    assert outbox.unacked_bytes == 0


def test_ack_of_a_message_put_back_takes_it_out_again():
    outbox = Outbox(WINDOW)
    put(outbox, BATCH)
    put(outbox, BATCH)
    drain(outbox)
    outbox.resume({})
    outbox.acked(BATCH, 1)
    assert drain(outbox) == [(BATCH, 2)]


def test_ack_that_overtook_the_peers_received_counts():
    outbox = Outbox(WINDOW)
    put(outbox, BATCH)
    put(outbox, BATCH)
    drain(outbox)
    outbox.acked(BATCH, 2)
    outbox.resume({BATCH: 1})
    assert drain(outbox) == []


def test_old_ack_is_ignored():
    outbox = Outbox(WINDOW)
    put(outbox, BATCH)
    drain(outbox)
    outbox.acked(BATCH, 1)
    outbox.acked(BATCH, 1)
    outbox.acked(BATCH, 0)
    assert outbox.unacked_bytes == 0


@pytest.mark.parametrize(("channel", "sequence"), [(BATCH, 2), (BATCH, 3), (BATCH, -1), (99, 0)])
def test_claims_about_what_was_never_sent_are_refused(channel, sequence):
    outbox = Outbox(WINDOW)
    put(outbox, BATCH)
    drain(outbox)
    put(outbox, BATCH)
    with pytest.raises(RemoteProtocolError):
        outbox.acked(channel, sequence)
    with pytest.raises(RemoteProtocolError):
        outbox.resume({channel: sequence})
    assert drain(outbox) == [(BATCH, 2)]


def test_peer_that_forgot_is_refused():
    outbox = Outbox(WINDOW)
    put(outbox, BATCH)
    drain(outbox)
    outbox.resume({BATCH: 1})
    with pytest.raises(RemoteProtocolError, match="lost messages"):
        outbox.resume({})


def test_connection_records_and_bad_messages_take_no_sequence():
    outbox = Outbox(WINDOW)
    with pytest.raises(LocalProtocolError, match="belongs to a connection"):
        outbox.enqueue(Ping(1), CONTROL)
    with pytest.raises(LocalProtocolError):
        outbox.enqueue(EndRun("r"), CONTROL, [memoryview(b"x")])
    assert outbox.enqueue(EndRun("r"), CONTROL).sequence == 1


def test_inbox_drops_duplicates_and_refuses_gaps():
    inbox = Inbox(WINDOW)
    assert inbox.accept(arrived(BATCH, 1))
    assert inbox.accept(arrived(BATCH, 2))
    assert not inbox.accept(arrived(BATCH, 1))
    assert not inbox.accept(arrived(BATCH, 2))
    assert inbox.accept(arrived(GRADIENT, 1))
    with pytest.raises(RemoteProtocolError, match="messages are missing"):
        inbox.accept(arrived(BATCH, 4))
    assert inbox.received() == {BATCH: 2, GRADIENT: 1}


def test_inbox_refuses_a_peer_that_ignores_its_credit():
    inbox = Inbox(WINDOW, limit_bytes=WINDOW)
    assert inbox.accept(arrived(BATCH, 1, 5 * WINDOW))
    inbox.consumed(BATCH, 1)
    assert inbox.accept(arrived(BATCH, 2, 900))
    assert inbox.accept(arrived(GRADIENT, 1, 900))
    with pytest.raises(RemoteProtocolError, match="ignores its credit"):
        inbox.accept(arrived(BATCH, 3, 101))
    inbox.consumed(BATCH, 2)
    assert inbox.accept(arrived(BATCH, 3, 101))


def test_connection_records_pass_the_inbox():
    inbox = Inbox(WINDOW)
    assert inbox.accept(Arrived(Ping(1), Channel.HEARTBEAT, 0, b"", 40, 40))
    assert inbox.consumed(Channel.HEARTBEAT, 0) is None
    assert inbox.received() == {}


def test_acks_are_cumulative_and_wait_for_a_quarter_of_the_window():
    inbox = Inbox(WINDOW)
    for sequence in range(1, 7):
        inbox.accept(arrived(BATCH, sequence, 100))
    assert inbox.consumed(BATCH, 2) is None
    assert inbox.consumed(BATCH, 3) is None
    assert inbox.due_acks() == []
    assert inbox.consumed(BATCH, 1) == Ack(BATCH, 3)
    assert inbox.consumed(BATCH, 4) is None
    assert inbox.due_acks() == [Ack(BATCH, 4)]
    assert inbox.due_acks() == []
    assert inbox.resume() == [Ack(BATCH, 4)]


def test_many_small_messages_are_acknowledged_by_number():
    inbox = Inbox(1 << 30)
    acks = []
    for sequence in range(1, 130):
        inbox.accept(arrived(CONTROL, sequence))
        acks.append(inbox.consumed(CONTROL, sequence))
    assert [ack for ack in acks if ack] == [Ack(CONTROL, 64), Ack(CONTROL, 128)]


def test_consuming_twice_or_what_never_came_is_our_bug():
    inbox = Inbox(WINDOW)
    inbox.accept(arrived(BATCH, 1))
    inbox.consumed(BATCH, 1)
    for sequence in (1, 2):
        with pytest.raises(LocalProtocolError):
            inbox.consumed(BATCH, sequence)


def test_a_message_goes_on_behind_what_the_peer_holds_of_it():
    outbox = Outbox(10 * WINDOW)
    first, second = put(outbox, BATCH, 300), put(outbox, BATCH, 200)
    drain(outbox)
    outbox.resume({}, {int(BATCH): 120})
    assert (first.begun_bytes, second.begun_bytes) == (120, 0)
    (frame,) = first.frames()
    assert sum(part.nbytes for part in frame[1:]) == 180
    outbox.resume({}, {})  # the next connection knows of nothing
    assert first.begun_bytes == 0


@pytest.mark.parametrize(
    "begun", [{int(BATCH): -1}, {int(BATCH): 300}, {int(BATCH): 1 << 70}, {int(GRADIENT): 1}, {99: 1}]
)
def test_what_the_peer_cannot_hold_ends_the_session_and_changes_nothing(begun):
    outbox = Outbox(10 * WINDOW)
    message = put(outbox, BATCH, 300)
    drain(outbox)
    with pytest.raises(RemoteProtocolError):
        outbox.resume({}, begun)
    assert (message.begun_bytes, drain(outbox)) == (0, [])
