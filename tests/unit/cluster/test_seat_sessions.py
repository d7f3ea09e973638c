"""A session that is over leaves its bytes and its identity, and nothing else; a forgotten seat only its bytes."""

from __future__ import annotations

import gc
import weakref
from typing import Any

from guava_nb.cluster.seat_sessions import MOST_KNOWN, SeatSessions
from guava_nb.link.lane import Wire
from guava_nb.protocol.messages import Channel


class FakeSession:
    def __init__(self, number: int, out_bytes: int = 10, in_bytes: int = 4) -> None:
        self.session_id, self.identity = bytes([number]) * 16, bytes([100 + number]) * 16
        self.wire = Wire(
            dict.fromkeys(Channel, 0) | {Channel.BATCH: out_bytes},
            dict.fromkeys(Channel, 0) | {Channel.GRADIENT: in_bytes},
        )
        self.saved = self.wire


def seats_with(*sessions: Any) -> SeatSessions:
    seats = SeatSessions()
    for rank, session in enumerate(sessions):
        seats.sit(rank, session)
    return seats


def summed(seats: SeatSessions) -> tuple[int, int, int]:
    all_of = seats.counted()
    return (
        sum(sum(one.wire.out_bytes.values()) for one in all_of),
        sum(sum(one.wire.in_bytes.values()) for one in all_of),
        sum(sum(one.saved.out_bytes.values()) for one in all_of),
    )


def test_bytes_of_a_session_that_is_over_stay_and_the_session_does_not() -> None:
    session: Any = FakeSession(1)
    seats = seats_with(session)
    assert seats.of(0) is session and seats.rise(0) is session and seats.of(0) is None and seats.rise(0) is None
    assert seats.total_bytes(0) == (10, 4), "it counts while it is being closed"
    seats.note_over(session)
    seats.note_over(session)
    assert seats.total_bytes(0) == (10, 4) and summed(seats) == (10, 4, 10)
    ref = weakref.ref(session)
    del session
    gc.collect()
    assert ref() is None


def test_a_seat_is_found_by_the_session_and_the_identity_that_had_it_only() -> None:
    first, other = FakeSession(1), FakeSession(2)
    seats = seats_with(first, other)
    seats.note_over(seats.rise(0))  # type: ignore[arg-type]
    assert seats.rank_of(first.session_id) == 0
    assert seats.seat_before(first.session_id.hex(), first.identity) == 0
    assert seats.seat_before(first.session_id.hex(), other.identity) is None
    assert seats.seat_before("", first.identity) is None


def test_a_worker_that_comes_back_adds_to_the_bytes_of_its_seat() -> None:
    first: Any = FakeSession(1)
    again: Any = FakeSession(2, 1, 1)
    seats = seats_with(first)
    seats.note_over(seats.rise(0))  # type: ignore[arg-type]
    seats.sit(0, again)
    assert seats.of(0) is again and seats.total_bytes(0) == (11, 5) and summed(seats) == (11, 5, 11)


def test_a_seat_that_is_taken_a_thousand_times_is_known_by_its_newest_sessions_and_keeps_all_bytes() -> None:
    seats = SeatSessions()
    sessions: list[Any] = []
    for number in range(1000):
        session: Any = FakeSession(number % 100)
        session.session_id = number.to_bytes(16, "big")
        sessions.append(session)
        seats.sit(0, session)
        if number % 2:  # every other one is closed late, or never
            seats.note_over(session)
    seats.note_over(sessions[0])
    assert len(seats._ranks) == len(seats._seats[0].known) == MOST_KNOWN and len(seats._seats[0].counted) <= MOST_KNOWN
    assert seats.total_bytes(0) == (10_000, 4_000) and summed(seats) == (10_000, 4_000, 10_000)
    newest = sessions[-1]
    assert seats.seat_before(newest.session_id.hex(), newest.identity) == seats.rank_of(newest.session_id) == 0
    assert seats.seat_before(sessions[0].session_id.hex(), sessions[0].identity) is None
    for odd in ("", "no hex", "00", "é" * 32):
        assert seats.seat_before(odd, newest.identity) is None


def test_a_forgotten_seat_leaves_its_bytes_in_the_sum_once_whether_or_not_it_was_closed() -> None:
    closed: Any = FakeSession(1)
    closing: Any = FakeSession(2)
    seats = seats_with(closed, closing)
    for rank in (0, 1):
        seats.rise(rank)
    seats.note_over(closed)
    for rank in (0, 1, 7):
        seats.forget(rank)
    seats.note_over(closing)
    assert summed(seats) == (20, 8, 20)
    assert seats.rank_of(closed.session_id) is None and seats.total_bytes(1) == (0, 0) and seats.of(1) is None
