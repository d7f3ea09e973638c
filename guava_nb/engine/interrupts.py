"""Interrupts that call instead of raising.

An exception could come between any two instructions: while a bar is drawn, before a run that has begun is watched, in the
middle of a step.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["interrupts_call"]


@contextmanager
def interrupts_call(on_interrupt: Callable[[], None]) -> Iterator[None]:
    """Have SIGINT call `on_interrupt` while the block runs; on a thread that gets no signals nothing changes."""
    previous = None
    if threading.current_thread() is threading.main_thread():
        previous = signal.signal(signal.SIGINT, lambda number, frame: on_interrupt())
    try:
        yield
    finally:
        # A handler that was not set from Python comes back as None and cannot be set again from here.
        if previous is not None:
            signal.signal(signal.SIGINT, previous)
