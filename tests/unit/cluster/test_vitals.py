"""What a person hears of a worker that says nothing."""

from __future__ import annotations

import math

import pytest

from guava_nb.cluster.vitals import VitalsBook
from guava_nb.protocol.messages import Vitals

KINDS = {
    "stopped": (Vitals(7, 12.0, 12.0, True, 0.0), "is stopped"),
    "deadlocked": (Vitals(7, 12.0, 12.0, False, 0.0), "stands still in one call that holds Python's lock"),
    "busy": (Vitals(7, 12.0, 12.0, False, 1.0), "computes in one call that holds Python's lock"),
    "long step": (Vitals(7, 0.0, 40.0, False, 3.5), "computes on 3.5 cores"),
    "lock of the program": (Vitals(7, 0.0, 40.0, False, 0.0), "stands still ("),
    "not measured": (Vitals(7, 12.0, 12.0, False), "does not run"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_stopped_deadlocked_and_busy_are_told_apart(kind: str) -> None:
    vitals, words = KINDS[kind]
    book = VitalsBook()
    news = book.take(3, vitals, 100.0)
    assert words in book.text(3, 100.0) and book.text(3, 131.0) == "" and book.text(2, 100.0) == ""
    assert [words for _, words in KINDS.values() if words in book.text(3, 100.0)] == [words]
    assert (words in news) == bool(vitals.quiet_s)  # a long step is told by the job that waits, not here


def test_a_silence_is_told_once_and_so_is_its_end() -> None:
    book = VitalsBook()
    assert book.take(0, Vitals(7, 5.0, 5.0, True), 100.0) == ""
    assert book.take(0, Vitals(7, 10.0, 10.0, True), 105.0).startswith(
        "has said nothing for 10 s: its process is stopped"
    )
    assert book.take(0, Vitals(7, 15.0, 15.0, True), 110.0) == ""
    assert "stands still" in book.take(0, Vitals(7, 20.0, 20.0, False, 0.0), 115.0)
    assert book.take(0, Vitals(7, 0.0, 1.0, False), 158.0) == "runs again, after 63 s"
    assert book.take(0, Vitals(7, 0.0, 1.0, False), 159.0) == ""


def test_a_short_silence_is_not_told_and_nonsense_is_not_kept() -> None:
    book = VitalsBook()
    assert book.take(0, Vitals(7, 5.0, 5.0, False, 0.0), 100.0) == ""
    assert book.take(0, Vitals(7, 0.0, 0.0, False), 101.0) == ""
    for bad in (math.nan, math.inf, -1.0):
        assert book.take(1, Vitals(7, bad, 0.0, False), 100.0) == "" == book.text(1, 100.0)
    book.forget(0)
    assert book.text(0, 101.0) == ""
