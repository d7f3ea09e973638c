"""How far ahead is sent: bounds that hold whatever happens, and a depth that finds its place."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from guava_nb.sync.send_credit import HORIZON_S, SendCredit

MB = 1_000_000


@settings(max_examples=200, deadline=None)
@given(
    budget=st.integers(0, 2000),
    least=st.integers(0, 4),
    most=st.integers(1, 12),
    events=st.lists(
        st.tuples(st.sampled_from(["issue", "work", "lose", "drop"]), st.integers(0, 5), st.integers(0, 900))
    ),
)
def test_the_bounds_hold_whatever_happens(
    budget: int, least: int, most: int, events: list[tuple[str, int, int]]
) -> None:
    credit = SendCredit(budget, least, most)
    open_shards: dict[tuple[int, int], tuple[int, int]] = {}
    step = 0
    for what, which, size in events:
        flights = len({s for s, _ in open_shards})
        if what == "issue":
            coming = {0: size, 1: size // 2}
            assert not credit.is_full(flights) or credit.must_work(flights, {0: 0, 1: 0}) == (0, 1)
            if credit.must_work(flights, coming):
                assert flights > 0, "with nothing in flight the next step always goes"
                continue
            before = [credit.held_bytes(rank) for rank in (0, 1)]
            for rank, nbytes in coming.items():
                open_shards[step, rank] = (rank, nbytes)
                credit.sent(step, rank, rank, nbytes)
            step += 1
            assert flights <= max(least, most)
            if flights > min(1, least):  # one ahead whatever its size; beyond that one step over the budget at most
                assert all(held <= budget for held in before)
            if flights > least:
                assert all(credit.held_bytes(rank) <= budget for rank in (0, 1))
        elif what == "work" and open_shards:
            key = sorted(open_shards)[which % len(open_shards)]
            del open_shards[key]
            credit.worked(*key)
            credit.worked(*key)  # told twice
        elif what == "lose":
            for key, (rank, nbytes) in list(open_shards.items()):
                if rank == 1:
                    open_shards[key] = (0, nbytes)
                    credit.sent(*key, 0, nbytes)
        elif what == "drop" and which == 0:
            open_shards.clear()
            credit.clear()
        for rank in (0, 1):
            mine = [nbytes for owner, nbytes in open_shards.values() if owner == rank]
            assert credit.held_bytes(rank) == sum(mine) and credit.held_shards(rank) == len(mine)


def test_fifty_megabytes_a_batch_are_two_in_flight() -> None:
    credit = SendCredit(64 << 20)
    for step in range(2):
        assert not credit.must_work(step, {0: 50 * MB})
        credit.sent(step, 0, 0, 50 * MB)
    assert credit.must_work(2, {0: 50 * MB}) == (0,)
    credit.worked(0, 0)
    assert not credit.must_work(1, {0: 50 * MB})


def test_without_bytes_the_count_alone_decides() -> None:
    credit = SendCredit(0, least_steps=1)
    credit.sent(0, 0, 0, 0)
    assert not credit.must_work(1, {0: 0})
    credit.sent(1, 0, 0, 0)
    assert credit.must_work(2, {0: 0})


def test_while_somebody_is_away_no_step_more_than_the_count_goes() -> None:
    credit = SendCredit(64 << 20)
    assert not credit.must_work(2, {0: 10}) and credit.must_work(2, {0: 10}, cautious=True)
    assert not credit.must_work(1, {0: 10}, cautious=True)


def line(rate_bytes_s: float, round_trip_s: float, batch_bytes: int, work_s: float, steps: int) -> tuple[float, int]:
    """Play a link and a worker against the machine; returns the share of the link in use and the most bytes held."""
    credit, now, free_at, worker_free = SendCredit(64 << 20), 0.0, 0.0, 0.0
    ends: list[tuple[float, int]] = []  # when the orchestrator hears of a step's end
    most = 0
    for step in range(steps):
        while credit.must_work(len(ends), {0: batch_bytes}):
            now, done = ends.pop(0)
            credit.worked(done, 0)
            credit.committed(now)
        free_at = max(free_at, now) + batch_bytes / rate_bytes_s
        worker_free = max(worker_free, free_at + round_trip_s / 2) + work_s
        ends.append((worker_free + round_trip_s / 2, step))
        credit.sent(step, 0, 0, batch_bytes)
        most = max(most, credit.held_bytes(0))
    return steps * batch_bytes / rate_bytes_s / free_at, most


def test_a_long_line_stays_full_with_little_more_than_it_takes() -> None:
    used, most = line(25e6, 0.05, 786_432, 0.005, 400)
    assert used >= 0.97
    assert most <= 1.5 * HORIZON_S * 25e6


def test_a_slow_worker_is_not_buried() -> None:
    _, most = line(1e9, 0.001, MB, 0.5, 100)
    assert most <= 9 * MB  # what was sent before the pace was known
