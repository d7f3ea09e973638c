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
