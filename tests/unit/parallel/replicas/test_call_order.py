"""All replicas run the same units in the same order, whatever each of them wants."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from guava_nb.parallel.replicas.call_order import EXIT, STEADY_STEPS, CallOrder, Habit, Unplanned

UNITS = 3


class Replicas:
    """Threads that ask each other; a pass is a list of wanted turns."""

    def __init__(self, number: int) -> None:
        self.asked = 0
        self._given: list[int] = []
        self._smallest = 0
        self._barrier = threading.Barrier(number, self._decide, timeout=5)
        self.orders = [CallOrder(Habit(), self._ask) for _ in range(number)]

    def _decide(self) -> None:
        self._smallest = min(self._given)
        self._given.clear()

    def _ask(self, number: int) -> int:
        self.asked += 1
        self._given.append(number)
        self._barrier.wait()
        return self._smallest

    def step(self, wanted: Sequence[Sequence[int]]) -> list[list[int]]:
        """One pass of one step; returns what each replica ran."""
        ran: list[list[int]] = [[] for _ in self.orders]
        errors: list[BaseException] = []
        threads = [threading.Thread(target=self._run, args=(k, w, ran[k], errors)) for k, w in enumerate(wanted)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        if errors:
            raise errors[0]
        strayed = any(order.strayed for order in self.orders)
        for order in self.orders:
            order.settle(strayed, UNITS)
        return ran

    def _run(self, replica: int, wanted: Sequence[int], ran: list[int], errors: list[BaseException]) -> None:
        order = self.orders[replica]
        order.begin()
        try:
            for turn in [*wanted, EXIT]:
                ran += order.until(turn)
                ran.append(turn)
            order.end()
        except Exception as error:
            errors.append(error)


def is_part_of(some: Sequence[int]) -> Callable[[Sequence[int]], bool]:
    def holds(every: Sequence[int]) -> bool:
        rest = iter(every)
        return all(turn in rest for turn in some)

    return holds


turns = st.lists(st.integers(0, 2 * UNITS - 1), max_size=6)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(turns, turns), min_size=1, max_size=4))
def test_any_wishes_become_one_order(steps: list[tuple[list[int], list[int]]]) -> None:
    replicas = Replicas(2)
    for wanted in steps:
        try:
            first, second = replicas.step(wanted)
        except Unplanned:  # only after a plan was made
            assert len(steps) > STEADY_STEPS + 1
            return
        assert first == second
        assert is_part_of(wanted[0])(first)
        assert is_part_of(wanted[1])(first)


def test_a_plan_asks_nothing_and_holds_what_a_replica_skips() -> None:
    replicas = Replicas(2)
    for _ in range(STEADY_STEPS + 1):
        assert replicas.step([[0, 2, 4], [0, 2, 4]]) == [[0, 2, 4, EXIT]] * 2
    asked = replicas.asked
    assert replicas.step([[0, 2, 4], [0, 2, 4]]) == [[0, 2, 4, EXIT]] * 2
    assert replicas.step([[0, 4], [0, 2, 4]]) == [[0, 2, 4, EXIT]] * 2
    assert replicas.asked == asked
    assert replicas.step([[4, 4], [2]]) == [[2, 4, 4, EXIT]] * 2  # every turn is asked again
    assert replicas.asked > asked


def test_a_unit_that_the_plan_does_not_have_is_said_before_anything_is_sent() -> None:
    replicas = Replicas(1)
    for _ in range(STEADY_STEPS + 1):
        replicas.step([[0, 2, 4]])
    with pytest.raises(Unplanned):
        replicas.step([[0, 2, 4, 0]])


def test_no_plan_is_made_where_units_are_left_out_or_passes_differ() -> None:
    replicas = Replicas(1)
    for _ in range(4):
        replicas.step([[0, 2]])
        replicas.step([[0, 2, 4]])
    asked = replicas.asked
    replicas.step([[0, 2, 4]])
    assert replicas.asked > asked
