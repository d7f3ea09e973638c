"""Seats of connections that have proved nothing yet."""

from __future__ import annotations

import threading

import pytest

from guava_nb.link.unauthenticated import Unauthenticated
from guava_nb.transport.memory import memory_pair

pytestmark = pytest.mark.timeout(30)


def test_the_longest_seated_guest_leaves_first() -> None:
    guests = Unauthenticated(2, honest_s=0)
    seats = [guests.sit(1), guests.sit(1)]
    pairs = [memory_pair() for _ in seats]
    for seat, pair in zip(seats, pairs, strict=True):
        guests.name(seat, pair[0])
    assert guests.sit(0.01) is None  # asked to leave, but not gone yet
    assert pairs[0][1].recv_into(memoryview(bytearray(1))) == 0
    pairs[1][0].send_all([b"still here"])
    waiting = threading.Timer(0.01, guests.leave, [seats[0]])
    waiting.start()
    assert guests.sit(10) is not None
    waiting.join()
    assert len(guests) == 2
    guests.leave(seats[0])  # twice is harmless
    assert len(guests) == 2


def test_a_guest_that_has_only_come_is_not_sent_away_for_those_behind_it() -> None:
    guests = Unauthenticated(1, honest_s=30)
    mine, theirs = memory_pair()
    guests.name(guests.sit(1) or 0, mine)
    assert guests.sit(0.01) is None
    theirs.send_all([b"proof"])
    assert mine.recv_into(memoryview(bytearray(5))) == 5
