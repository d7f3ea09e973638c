"""Finds out that a thread stays blocked in a process group that was given up.

gloo forgets what it was to send where a connection breaks between its reading of the peer's word and its answer, and then waits
for its time limit of half an hour.
Nothing in the process frees that thread, so another process must take its place. A loop that computes is left alone, however
long it takes: what counts is that it stands inside a group's operation.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import torch

__all__ = ["StuckWatch", "is_in_group"]

#: Seconds from the end of the connections, and between two looks; a loop that comes out does so at once.
LIMIT_S = 10.0
REASON = "it stayed blocked in a process group that had been given up, and only its end frees it"

_GROUPS = (Path(torch.distributed.__file__).parent, Path(__file__).parents[1] / "parallel" / "replicas")


class StuckWatch:
    """Watches the thread that calls `works_here`.

    Args:
        is_woken: whether the connections of the present group were ended.
        give_up: called once, on a thread of its own, where that thread does not come out.
    """

    def __init__(self, is_woken: Callable[[], bool], give_up: Callable[[str], None], limit_s: float = LIMIT_S) -> None:
        """Watch nothing yet."""
        self._is_woken, self._give_up, self._limit_s = is_woken, give_up, limit_s
        self._thread = 0

    def works_here(self) -> None:
        """The loop runs on the calling thread."""
        self._thread = threading.get_ident()

    def begin(self) -> Callable[[], None]:
        """Watch from now on that the loop comes out of the group; returns what is to be called when it has."""
        is_out = threading.Event()
        threading.Thread(target=self._watch, args=(is_out,), name="guava-stuck-watch", daemon=True).start()
        return is_out.set

    def _watch(self, is_out: threading.Event) -> None:
        before: tuple[int, int] | None = None
        while not is_out.wait(self._limit_s):
            frame = sys._current_frames().get(self._thread)
            now = (id(frame), frame.f_lasti) if frame is not None and self._is_woken() and is_in_group(frame) else None
            if now is not None and now == before:
                self._give_up(REASON)
                return
            before = now


def is_in_group(frame: FrameType) -> bool:
    """Whether a thread whose innermost frame this is waits in an operation of a group."""
    return any(folder in Path(frame.f_code.co_filename).parents for folder in _GROUPS)
