from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from guava_nb.data.loader_feed import LoadedBatch
from guava_nb.sync.batch_feeder import BatchFeeder
from tests.support.processes import eventually


def batches(count: int, log: list[int] | None = None) -> Iterator[LoadedBatch]:
    for k in range(count):
        if log is not None:
            log.append(k)
        yield LoadedBatch(k, None, (k,), 1)


def is_waiting(feeder: BatchFeeder) -> bool:
    """Whether the feeder's thread waits for room."""
    waiters: Any = getattr(feeder._changed, "_waiters")  # noqa: B009 - private to threading
    return len(waiters) > 0


def take_all(feeder: BatchFeeder, woken: threading.Semaphore) -> list[list[int]]:
    out = []
    while True:
        assert woken.acquire(timeout=10)
        group = feeder.take()
        if group is None:
            return out
        out.append([b.index for b in group])


def test_groups_with_a_smaller_tail_then_the_end() -> None:
    woken = threading.Semaphore(0)
    feeder = BatchFeeder(batches(7), 3, 2, woken.release)
    assert take_all(feeder, woken) == [[0, 1, 2], [3, 4, 5], [6]]
    feeder.close()


def test_loading_pauses_before_a_group_until_it_is_told_to_go_on() -> None:
    changed, log = threading.Semaphore(0), list[int]()
    feeder = BatchFeeder(batches(5, log), 2, 8, changed.release, pauses=lambda group: group == 1)
    while not feeder.has_paused():
        assert changed.acquire(timeout=10)
    assert feeder.available() and log == [0, 1]
    feeder.take()
    assert not feeder.available()
    feeder.go_on()
    while feeder.held()[0] < 2:
        assert changed.acquire(timeout=10)
    assert not feeder.has_paused() and log == list(range(5))
    feeder.close()


def test_a_feeder_that_has_paused_can_be_closed() -> None:
    changed = threading.Semaphore(0)
    feeder = BatchFeeder(batches(5), 1, 8, changed.release, pauses=lambda group: True)
    assert changed.acquire(timeout=10) and feeder.has_paused()
    feeder.close()
    assert not feeder._thread.is_alive()


def test_never_runs_further_ahead_than_its_depth() -> None:
    woken = threading.Semaphore(0)
    log: list[int] = []
    feeder = BatchFeeder(batches(100, log), 1, 2, woken.release)
    assert woken.acquire(timeout=10) and woken.acquire(timeout=10)
    assert len(log) <= 3  # two held, one in hand
    feeder.close()
    assert len(log) <= 3


def test_what_the_data_set_raises_is_raised_to_the_taker() -> None:
    def bad() -> Iterator[LoadedBatch]:
        yield LoadedBatch(0, None, (0,), 1)
        raise OSError("file 17 is damaged")

    woken = threading.Semaphore(0)
    feeder = BatchFeeder(bad(), 1, 2, woken.release)
    assert woken.acquire(timeout=10) and feeder.take() is not None
    assert woken.acquire(timeout=10)
    with pytest.raises(OSError, match="17"):
        feeder.take()
    feeder.close()


def test_holds_no_more_bytes_than_its_budget_and_one_batch_that_is_larger() -> None:
    def sized(nbytes: int, count: int, log: list[int]) -> Iterator[LoadedBatch]:
        for k in range(count):
            log.append(k)
            yield LoadedBatch(k, {"x": [torch.zeros(nbytes, dtype=torch.uint8)]}, (k,), 1)

    woken = threading.Semaphore(0)
    log: list[int] = []
    feeder = BatchFeeder(sized(400, 50, log), 1, 32, woken.release, budget_bytes=1000)
    assert woken.acquire(timeout=10) and woken.acquire(timeout=10)
    assert eventually(lambda: is_waiting(feeder), 10, "the feeder waits")
    assert feeder.held() == (2, 800) and len(log) == 2  # the third is not even loaded
    assert feeder.next_bytes() == 400
    feeder.take()
    assert woken.acquire(timeout=10) and len(log) == 3
    feeder.close()

    log.clear()
    feeder = BatchFeeder(sized(5000, 50, log), 1, 32, woken.release, budget_bytes=1000)
    assert woken.acquire(timeout=10)
    assert eventually(lambda: is_waiting(feeder), 10, "the feeder waits")
    assert feeder.held() == (1, 5000) and len(log) == 1
    feeder.close()
