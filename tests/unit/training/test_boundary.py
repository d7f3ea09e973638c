from __future__ import annotations

import threading

import pytest

from guava_nb.errors import ClusterError
from guava_nb.training.boundary import BoundaryCalls


def test_calls_are_done_in_order_and_errors_go_to_their_askers() -> None:
    calls: BoundaryCalls = BoundaryCalls()
    done: list[int] = []
    first = calls.ask(lambda: done.append(1))
    second = calls.ask(lambda: divmod(1, 0) and None)
    third = calls.ask(lambda: done.append(3))
    assert calls
    calls.answer()
    assert done == [1, 3] and not calls
    assert first.result(0) is None and third.result(0) is None
    with pytest.raises(ZeroDivisionError):
        second.result(0)


def test_a_call_waits_for_the_boundary_that_it_is_for() -> None:
    calls, step, done = BoundaryCalls(), [3], []  # type: ignore[var-annotated]
    later = calls.ask_after(lambda: step[0] >= 5, lambda: done.append("later"))
    now = calls.ask(lambda: done.append("now"))
    for step[0] in (3, 4):
        calls.answer()
        assert done == ["now"] and now.done() and not later.done() and calls
    step[0] = 5
    calls.answer()
    assert done == ["now", "later"] and later.result(0) is None and not calls
    never = calls.ask_after(lambda: False, lambda: None)
    calls.answer()
    calls.refuse(ClusterError("the run has ended"))
    with pytest.raises(ClusterError, match="ended"):
        never.result(0)


def test_what_is_not_done_any_more_is_refused() -> None:
    calls = BoundaryCalls()
    future = calls.ask(lambda: None)
    calls.refuse(ClusterError("the run has ended"))
    with pytest.raises(ClusterError, match="ended"):
        future.result(0)


def test_every_call_is_taken_once_by_one_of_many_threads() -> None:
    calls: BoundaryCalls = BoundaryCalls()
    done: list[int] = []
    futures = [calls.ask(lambda k=k: done.append(k)) for k in range(2000)]  # type: ignore[misc]
    threads = [threading.Thread(target=calls.answer) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert sorted(done) == list(range(2000)) and all(f.done() for f in futures)
