from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from guava_nb.cluster.owed_answers import OwedAnswer, OwedAnswers


def step(rank: int, number: int) -> OwedAnswer:
    return OwedAnswer(rank, "step", number, f"step {number}")


def took(waits: OwedAnswers, rank: int, seconds: float, now: float, number: int = 0) -> float:
    waits.look([step(rank, number)], now)
    waits.look([], now + seconds)
    return now + seconds


def test_what_is_owed_for_long_is_told_once_and_then_late() -> None:
    waits = OwedAnswers(30.0)
    answer = step(1, 7)
    assert waits.look([answer], 100.0) == ([], [])
    assert waits.look([answer], 119.9) == ([], [])
    assert waits.look([answer], 120.0) == ([answer], []) and waits.waited_s(answer, 120.0) == 20.0
    assert waits.look([answer], 129.0) == ([], [])
    assert waits.look([answer], 130.0) == ([], [answer])


def test_the_limit_follows_from_what_that_worker_took_before() -> None:
    waits = OwedAnswers(30.0)
    now = took(waits, 1, 20.0, 0.0)
    took(waits, 2, 1.0, now)
    assert waits.limit_s(step(1, 9)) == 100.0 and waits.usual_s(step(1, 9)) == 20.0
    assert waits.limit_s(step(2, 9)) == 30.0
    assert (
        waits.limit_s(OwedAnswer(1, "preparing", 1, "")) == 30.0
        and waits.usual_s(OwedAnswer(1, "preparing", 1, "")) is None
    )


def test_a_worker_without_a_past_is_measured_by_that_of_others() -> None:
    waits = OwedAnswers(30.0)
    took(waits, 1, 12.0, 0.0)
    assert waits.limit_s(step(2, 0)) == 60.0


def test_one_long_step_such_as_the_first_does_not_stretch_the_limit() -> None:
    waits, now = OwedAnswers(10.0), 0.0
    for number, seconds in enumerate([120.0, 1.0, 1.0, 1.0]):
        now = took(waits, 1, seconds, now, number)
    assert waits.limit_s(step(1, 9)) == 10.0


@given(st.lists(st.tuples(st.integers(0, 2), st.floats(0, 50)), max_size=30), st.floats(0.1, 60))
def test_nothing_is_late_before_the_shortest_time(events: list[tuple[int, float]], least_s: float) -> None:
    waits, now, since = OwedAnswers(least_s), 0.0, 0.0
    number = 0
    for change, seconds in events:
        now += seconds
        if change == 0:
            number, since = number + 1, now
        news, late = waits.look([step(0, number)], now)
        assert not late or now - since >= least_s
        assert not news or now - since >= least_s * 2 / 3
        if change == 1:
            waits.look([], now)
            since = now
