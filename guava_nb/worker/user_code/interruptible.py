"""A call that another thread can interrupt, also where it sleeps. Knows signals and threads, and nothing of what is called."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["Interruptible"]

_Result = TypeVar("_Result")


class Interruptible:
    """Runs one call at a time; `interrupt` raises KeyboardInterrupt in it and nowhere else.

    On the main thread a signal does it, which ends a sleep and a wait too. On another thread Python raises between two of its
    instructions, so a call into C ends first.
    """

    def __init__(self) -> None:
        """Nothing runs."""
        self._access = threading.Lock()
        self._thread = 0  # that runs a call; 0: none

    def run(self, call: Callable[[], _Result]) -> _Result:
        """Make the call; returns or raises what it does."""
        is_main = threading.current_thread() is threading.main_thread()
        before = signal.signal(signal.SIGINT, self._on_signal) if is_main else None
        try:
            self._thread = threading.get_ident()
            return call()
        finally:
            self._end()
            if is_main:
                signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)

    def interrupt(self) -> None:
        """Interrupt the call, if one runs; from any thread."""
        with self._access:
            if not self._thread:
                return
            if self._thread != threading.main_thread().ident:
                _raise_in(self._thread, KeyboardInterrupt)
            elif os.name == "nt":
                signal.raise_signal(signal.SIGINT)
            else:
                signal.pthread_kill(self._thread, signal.SIGINT)

    def _end(self) -> None:
        """From here on nothing is raised; what was meant for the call and comes now is dropped."""
        while self._thread:
            try:
                with self._access:
                    thread, self._thread = self._thread, 0
                    if thread != threading.main_thread().ident:
                        _raise_in(thread, None)
            except KeyboardInterrupt:
                continue

    def _on_signal(self, number: int, frame: Any) -> None:
        if self._thread:
            raise KeyboardInterrupt


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    """Have a thread raise this as soon as it runs Python code again; None: take back what it did not raise yet."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread), None if error is None else ctypes.py_object(error)
    )
