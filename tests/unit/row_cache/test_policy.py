"""Who holds what, what makes room, and who gets which row."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guava_nb.row_cache.policy import HELD, KEEP, CachePolicy, cost_function, deal, digest_of


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


class Worker:
    """Does what it is told, and remembers nothing else."""

    def __init__(self) -> None:
        self.rows: dict[bytes, int] = {}

    def obey(self, held: CachePolicy, numbers: list[int], size: int) -> list[int]:
        keys = [key(n) for n in numbers]
        order = held.order(keys, [size] * len(keys))
        sent = {keys[place] for place in order.to_send()}
        for name, state in zip(keys, order.states, strict=True):
            assert state != HELD or name in self.rows or name in sent  # nothing is assumed that is gone
        for name in order.drop:
            del self.rows[name]
        self.rows.update({name: size for name, state in zip(keys, order.states, strict=True) if state == KEEP})
        return [numbers[place] for place in order.to_send()]


@given(
    st.lists(st.one_of(st.none(), st.lists(st.integers(0, 30), max_size=12), st.sets(st.integers(0, 30)))),
    st.integers(0, 12),
)
def test_the_worker_holds_what_stands_here_and_never_more_than_its_budget(
    history: list[list[int] | set[int] | None], room: int
) -> None:
    cost = cost_function("memory")(100)
    held, worker = CachePolicy(room * cost), Worker()
    for event in history:
        if event is None:
            held.next_pass()
        elif isinstance(event, set):  # damaged, say
            lost = [key(n) for n in event if key(n) in worker.rows]
            for name in lost:
                del worker.rows[name]
            held.forget(lost)
        else:
            worker.obey(held, event, 100)
        assert held.keys() == set(worker.rows)
        assert held.used_bytes == len(worker.rows) * cost <= room * cost
        assert held.digest() == digest_of(worker.rows)


def test_a_data_set_that_fits_is_sent_once_in_whatever_order() -> None:
    held, worker = CachePolicy(100 * cost_function("memory")(10)), Worker()
    assert worker.obey(held, list(range(100)), 10) == list(range(100))
    for order in (range(100), range(99, -1, -1)):
        held.next_pass()
        assert worker.obey(held, list(order), 10) == []


def test_of_a_data_set_that_does_not_fit_a_part_stays() -> None:
    held, worker = CachePolicy(40 * cost_function("memory")(10)), Worker()
    for _ in range(4):
        held.next_pass()
        sent = [n for start in range(0, 100, 10) for n in worker.obey(held, list(range(start, start + 10)), 10)]
    assert len(sent) == 60  # the least recently used first would have dropped each before it was used again


def test_rows_that_nobody_uses_any_more_make_room() -> None:
    held, worker = CachePolicy(10 * cost_function("memory")(10)), Worker()
    for epoch in range(4):
        held.next_pass()
        worker.obey(held, [100 * epoch + n for n in range(10)], 10)  # samples that change
    # In the second pass those of the first might still have come; in the third they make room, and so on.
    assert set(worker.rows) == {key(200 + n) for n in range(10)}


def test_a_row_larger_than_the_budget_is_sent_and_not_kept() -> None:
    held, worker = CachePolicy(1000), Worker()
    assert worker.obey(held, [1, 1, 2], 5000) == [1, 2]
    assert not worker.rows and held.used_bytes == 0


def test_a_number_of_rows_is_a_limit_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("guava_nb.row_cache.policy.MAX_ROWS", 3)
    held, worker = CachePolicy(1 << 40), Worker()
    worker.obey(held, list(range(5)), 1)
    assert len(held) == len(worker.rows) == 3


@given(st.data(), st.integers(1, 5))
def test_every_row_is_dealt_once_and_shares_keep_their_sizes(data: st.DataObject, workers: int) -> None:
    holders = data.draw(st.lists(st.lists(st.integers(0, workers - 1), unique=True), max_size=40))
    edges = sorted(data.draw(st.lists(st.integers(0, len(holders)), min_size=workers - 1, max_size=workers - 1)))
    counts = [b - a for a, b in zip([0, *edges], [*edges, len(holders)], strict=True)]
    dealt = deal(holders, counts)
    assert [len(rows) for rows in dealt] == counts
    assert sorted(row for rows in dealt for row in rows) == list(range(len(holders)))
    assert all(rows == sorted(rows) for rows in dealt)
    if all(len(places) <= 1 for places in holders):  # then as many as can be go to who holds them
        best = sum(min(count, sum(places == [k] for places in holders)) for k, count in enumerate(counts))
        assert sum(k in holders[row] for k, rows in enumerate(dealt) for row in rows) == best


def test_without_holders_shares_are_contiguous() -> None:
    assert deal([[]] * 7, [3, 0, 4]) == [[0, 1, 2], [], [3, 4, 5, 6]]


def test_what_a_worker_lists_counts_from_then_on() -> None:
    held = CachePolicy(10_000)
    held.order([key(1)], [10])
    held.replace({key(2): 10, key(3): 20})
    assert held.keys() == {key(2), key(3)} and held.digest() == digest_of([key(3), key(2)])
    assert held.order([key(2), key(1)], [10, 10]).states == bytes([HELD, KEEP])
