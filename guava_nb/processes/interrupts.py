"""Interrupts that call, wait or are remembered instead of coming between any two instructions.

A KeyboardInterrupt could be raised while a bar is drawn, before a run that has begun is watched, in the middle of a
clean-up; or inside a callback of a library that swallows it.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["Interrupts", "interrupts_call", "interrupts_counted", "interrupts_remembered", "interrupts_wait"]


#: A second press so soon after the first means the same: it must not hit what comes after the block that the first one ended.
SAME_PRESS_S = 0.5


class Interrupts:
    """How many came in a block."""

    def __init__(self) -> None:
        """None so far."""
        self.count = 0

    def check(self) -> None:
        """Raise KeyboardInterrupt if one came, although some code swallowed it."""
        if self.count:
            raise KeyboardInterrupt


@contextmanager
def interrupts_call(on_interrupt: Callable[[], None], *also: int) -> Iterator[None]:
    """Have SIGINT, and these signals, call `on_interrupt` while the block runs; on a thread that gets none nothing changes.

    A block that ends less than `SAME_PRESS_S` after such a signal goes on until then, for those that follow at once.
    """
    previous, last_at = {}, float("-inf")

    def handle(number: int, frame: object) -> None:
        nonlocal last_at
        last_at = time.monotonic()
        on_interrupt()

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, *also):
            previous[number] = signal.signal(number, handle)
    try:
        yield
        while (left_s := last_at + SAME_PRESS_S - time.monotonic()) > 0:
            time.sleep(left_s)
    finally:
        for number, handler in previous.items():
            # A handler that was not set from Python comes back as None and cannot be set again from here.
            if handler is not None:
                signal.signal(number, handler)


@contextmanager
def interrupts_counted(*also: int) -> Iterator[Interrupts]:
    """Count SIGINT, and these signals, while the block runs, and raise nothing."""
    interrupts = Interrupts()

    def note() -> None:
        interrupts.count += 1

    with interrupts_call(note, *also):
        yield interrupts


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """Hold SIGINT back until the block has ended, for a clean-up that must not stay half done and ends by itself."""
    with interrupts_counted() as interrupts:
        yield
    interrupts.check()


@contextmanager
def interrupts_remembered() -> Iterator[Interrupts]:
    """Raise as usual, and remember: user code and libraries may swallow a KeyboardInterrupt."""
    interrupts = Interrupts()

    def remember() -> None:
        interrupts.count += 1
        raise KeyboardInterrupt

    with interrupts_call(remember):
        yield interrupts
