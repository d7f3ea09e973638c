"""Loads large libraries without collecting garbage, or being interrupted, meanwhile. Imports nothing large itself."""

from __future__ import annotations

import contextlib
import gc
import signal
import sys
import threading
from collections.abc import Iterable, Iterator

__all__ = ["half_loaded", "half_loaded_text", "loading_without_collections"]

#: torch and what it loads that cannot be loaded twice: their compiled parts are there already, and refuse.
_LIBRARIES = ("torch", "numpy", "sympy", "mpmath")


@contextlib.contextmanager
def loading_without_collections() -> Iterator[None]:
    """Collect no garbage in the block: while modules load there is none, and looking for it takes a third of the time.

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


def half_loaded(modules: Iterable[str] | None = None) -> str:
    """Return the library that an interrupt left half loaded; "" for none.

    Python takes a package whose loading failed out of its table, and leaves the modules inside it.

    Args:
        modules: names of what is loaded; None takes this process's.
    """
    loaded = set(sys.modules if modules is None else modules)
    orphans = {name for name in loaded if "." in name and name.rpartition(".")[0] not in loaded}
    return next((root for root in _LIBRARIES if any(name.startswith(f"{root}.") for name in orphans)), "")


def half_loaded_text() -> str:
    """Return a sentence on a library that is half loaded in this process, for the person at its kernel; "" for none."""
    library = half_loaded()
    return library and (
        f"{library} is only half loaded in this kernel, because an interrupt or an error cut its import, and it cannot be loaded "
        "a second time: restart the kernel, then run the cells from the top."
    )
