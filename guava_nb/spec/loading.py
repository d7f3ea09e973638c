"""Loads large libraries without collecting garbage, or being interrupted, meanwhile. Imports nothing large itself."""

from __future__ import annotations

import contextlib
import gc
import signal
import threading
from collections.abc import Iterator

__all__ = ["loading_without_collections"]


@contextlib.contextmanager
def loading_without_collections() -> Iterator[None]:
    """Collect no garbage in the block: while modules load there is none, and looking for it doubles the time of torch._dynamo.

    An interrupt waits for the end of the block: modules that were left half loaded fail whenever the process uses them again.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        with _interrupts_after():
            yield
    finally:
        if was_on:
            gc.enable()


@contextlib.contextmanager
def _interrupts_after() -> Iterator[None]:
    """Give an interrupt to the handler that stood before when the block has ended well."""
    handler, came = signal.getsignal(signal.SIGINT), []
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield  # ignored, or not for this thread
        return
    signal.signal(signal.SIGINT, lambda number, frame: came.append(frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if came:
        handler(signal.SIGINT, came[0])
