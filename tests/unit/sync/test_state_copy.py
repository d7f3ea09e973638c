"""A copy takes the answers to its own question, from those who were asked, of the step that it is about."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from guava_nb.data.codec import pack
from guava_nb.protocol.messages import Failure, FailureKind, State
from guava_nb.sync.state_copy import StateCopy


def answer(request: int, step: int = 4, run_id: str = "run-1", ticks: int = 2) -> tuple[State, memoryview]:
    tree, buffers = pack({"value": request})
    return State(request, run_id, step, tree, ticks=ticks), memoryview(bytearray(b"".join(buffers)))


def asked(*ranks: int) -> tuple[StateCopy, list[Any]]:
    sent: list[Any] = []
    cluster: Any = SimpleNamespace(send=lambda rank, message: sent.append((rank, message.request_id)), takes=None)
    copy = StateCopy("run-1", 4, dict(enumerate(ranks, start=7)), None, 2)
    copy.ask(cluster)
    assert cluster.takes == copy.take
    return copy, sent


def test_all_parts_make_it_whole_in_the_order_of_the_ranks() -> None:
    copy, sent = asked(3, 5)
    assert sent == [(3, 7), (5, 8)] and copy.ranks == [3, 5]
    assert copy.take(5, *answer(8)) and not copy.is_whole
    assert copy.take(3, *answer(7)) and copy.is_whole
    assert [part["value"] for part in copy.parts()] == [7, 8]


@pytest.mark.parametrize(
    ("rank", "message"),
    [(5, answer(7)), (3, answer(9)), (3, answer(7, run_id="run-2"))],
    ids=["another worker", "another question", "another run"],
)
def test_an_answer_to_something_else_is_not_taken(rank: int, message: tuple[State, memoryview]) -> None:
    copy, _ = asked(3)
    assert not copy.take(rank, *message) and not copy.is_whole and not copy.is_over(lambda rank: False)


def test_an_answer_counts_once() -> None:
    copy, _ = asked(3)
    assert copy.take(3, *answer(7)) and not copy.take(3, *answer(7))


@pytest.mark.parametrize("gone_on", [{"step": 5}, {"ticks": 3}], ids=["a step", "a tick of the schedule"])
def test_a_worker_that_has_gone_on_ends_it(gone_on: dict[str, int]) -> None:
    copy, _ = asked(3)
    assert copy.take(3, *answer(7, **gone_on)) and copy.is_over(lambda rank: False) and not copy.is_whole


def test_a_worker_that_cannot_copy_ends_it() -> None:
    copy, _ = asked(3)
    failure = Failure(
        run_id="run-1", kind=FailureKind.MEMORY, type_name="MemoryError", text="", traceback="", request_id=7
    )
    assert copy.take(3, failure, memoryview(b"")) and copy.is_over(lambda rank: False) and not copy.is_whole


def test_it_is_over_when_one_that_has_not_answered_is_lost() -> None:
    copy, _ = asked(3, 5)
    copy.take(5, *answer(8))
    assert not copy.is_over(lambda rank: rank == 5) and copy.is_over(lambda rank: rank == 3)
