"""A loop that waits in a group that was given up is found; one that computes, or comes out, is left alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from guava_nb.backend.stuck_watch import REASON, StuckWatch


class Looks:
    """Stands for the event that the loop is out: it is after so many looks."""

    def __init__(self, count: int) -> None:
        self.left = count

    def wait(self, limit_s: float) -> bool:
        self.left -= 1
        return self.left < 0


@contextmanager
def loop_in(file: str, watch: StuckWatch) -> Iterator[None]:
    """A loop on another thread that waits, below Python, in a function of this file."""
    names: dict[str, Any] = {}
    exec(compile("def wait(lock, began):\n    began()\n    lock.acquire()\n", file, "exec"), names)
    lock, began = threading.Lock(), threading.Event()
    lock.acquire()

    def loop() -> None:
        watch.works_here()
        names["wait"](lock, began.set)

    thread = threading.Thread(target=loop)
    thread.start()
    assert began.wait(30)
    try:
        yield
    finally:
        lock.release()
        thread.join(30)


def found(file: str, is_woken: bool = True, looks: int = 50) -> list[str]:
    reasons: list[str] = []
    watch = StuckWatch(lambda: is_woken, reasons.append)
    with loop_in(file, watch):
        watch._watch(Looks(looks))  # type: ignore[arg-type]
    return reasons


def test_a_loop_that_stays_in_a_group_is_given_up_once() -> None:
    assert found(torch.distributed.__file__, looks=1 << 40) == [REASON]


def test_who_computes_or_waits_in_a_group_that_stands_is_left_alone() -> None:
    assert found(torch.nn.__file__) == []
    assert found(torch.distributed.__file__, is_woken=False) == []
    assert found(torch.distributed.__file__, looks=1) == []


def test_a_loop_that_comes_out_ends_the_watch() -> None:
    watch = StuckWatch(lambda: True, lambda reason: None, limit_s=60.0)
    watch.works_here()
    before = set(threading.enumerate())
    is_out = watch.begin()
    (thread,) = set(threading.enumerate()) - before
    is_out()
    thread.join(30)
    assert not thread.is_alive()
