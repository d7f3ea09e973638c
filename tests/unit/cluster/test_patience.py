from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from guava_nb.cluster.patience import Debt, Patience


def step(rank: int, number: int) -> Debt:
    return Debt(rank, "step", number, f"step {number}")


def took(patience: Patience, rank: int, seconds: float, now: float, number: int = 0) -> float:
    patience.look([step(rank, number)], now)
    patience.look([], now + seconds)
    return now + seconds


def test_what_is_owed_for_long_is_told_once_and_then_late() -> None:
    patience = Patience(30.0)
    debt = step(1, 7)
    assert patience.look([debt], 100.0) == ([], [])
    assert patience.look([debt], 119.9) == ([], [])
    assert patience.look([debt], 120.0) == ([debt], []) and patience.waited_s(debt, 120.0) == 20.0
    assert patience.look([debt], 129.0) == ([], [])
    assert patience.look([debt], 130.0) == ([], [debt])


def test_the_limit_follows_from_what_that_worker_took_before() -> None:
    patience = Patience(30.0)
    now = took(patience, 1, 20.0, 0.0)
    took(patience, 2, 1.0, now)
    assert patience.limit_s(step(1, 9)) == 100.0 and patience.usual_s(step(1, 9)) == 20.0
    assert patience.limit_s(step(2, 9)) == 30.0
    assert (
        patience.limit_s(Debt(1, "preparing", 1, "")) == 30.0 and patience.usual_s(Debt(1, "preparing", 1, "")) is None
    )


def test_a_worker_without_a_past_is_measured_by_that_of_others() -> None:
    patience = Patience(30.0)
    took(patience, 1, 12.0, 0.0)
    assert patience.limit_s(step(2, 0)) == 60.0


def test_one_long_step_such_as_the_first_does_not_stretch_the_limit() -> None:
    patience, now = Patience(10.0), 0.0
    for number, seconds in enumerate([120.0, 1.0, 1.0, 1.0]):
        now = took(patience, 1, seconds, now, number)
    assert patience.limit_s(step(1, 9)) == 10.0


@given(st.lists(st.tuples(st.integers(0, 2), st.floats(0, 50)), max_size=30), st.floats(0.1, 60))
def test_nothing_is_late_before_the_shortest_time(events: list[tuple[int, float]], least_s: float) -> None:
    patience, now, since = Patience(least_s), 0.0, 0.0
    number = 0
    for change, seconds in events:
        now += seconds
        if change == 0:
            number, since = number + 1, now
        news, late = patience.look([step(0, number)], now)
        assert not late or now - since >= least_s
        assert not news or now - since >= least_s * 2 / 3
        if change == 1:
            patience.look([], now)
            since = now
