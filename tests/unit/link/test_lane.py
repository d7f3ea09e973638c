"""What a lane holds back: acknowledgements of short messages longer than those of long ones, and one wake for many."""

from __future__ import annotations

import pytest

from guava_nb.link import lane as lanes
from guava_nb.link.hearing import Hearing
from guava_nb.link.lane import BULK, TIMED_BYTES, Lane
from guava_nb.protocol.framing import Arrived
from guava_nb.protocol.messages import Ack, Channel, Leave


class Writer:
    """Counts how often it is woken."""

    def __init__(self) -> None:
        self.wakes, self.sent = 0, list[Ack]()

    def claim(self, record: Ack) -> list[bytes]:
        self.sent.append(record)
        return []

    def wake(self) -> None:
        self.wakes += 1

    def send_claimed(self, batch: list[bytes]) -> None:
        raise AssertionError("nothing was claimed")


def test_many_short_messages_wake_the_writer_once_and_a_long_one_hurries_them(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(lanes.time, "monotonic", lambda: now)
    lane: Lane[Writer] = Lane(BULK, 1 << 30, "off", None, Hearing(2.0))  # type: ignore[type-var]
    lane.connection = writer = Writer()

    def consume(sequence: int, nbytes: int) -> None:
        arrived = Arrived(Leave(""), Channel.BATCH, sequence, b"", nbytes, nbytes)
        assert lane.inbox.accept(arrived)
        lane.consumed(arrived, 0.02)

    for sequence in range(1, 11):
        consume(sequence, 200)
        now += 0.01
    assert (writer.wakes, lane.acks_due_at) == (1, 100.25)
    consume(11, TIMED_BYTES)
    assert writer.wakes == 2 and lane.acks_due_at == pytest.approx(100.12)
    consume(12, 200)
    assert writer.wakes == 2 and lane.acks_due_at == pytest.approx(100.12) and not writer.sent
    for sequence in range(13, 65):
        consume(sequence, 200)
    assert writer.sent == [Ack(int(Channel.BATCH), 64)]
