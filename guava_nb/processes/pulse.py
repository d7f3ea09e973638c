"""Sees that a worker's process is there while it cannot say so itself: it is stopped, or one call holds Python's lock.

A worker tells its figures about once a second, from a thread that needs the interpreter's lock. The process that started it
hears when they stay away, looks at it from outside (stopped, computing, standing still), and tells the orchestrator in visits
of their own, for which the worker need not run. So nothing more is started and nothing more is sent while all is well.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from functools import partial

import psutil

from guava_nb.errors import GuavaError
from guava_nb.link.dialler import visit
from guava_nb.link.options import LinkOptions
from guava_nb.protocol.joincode import JoinCode
from guava_nb.protocol.messages import Vitals

__all__ = ["Pulse", "PulseWatch"]

_LOOK_S = 1.0
#: A worker whose state and step do not change for so long is looked at too: a long step and a deadlock look alike from within.
_STUCK_S = 10.0
#: A silence is spoken for so many times, 20 x `silence_s` in all: a group waits for a member that stands still, and no wait is
#: without an end. A worker that is given up after that joins again by itself when it goes on.
_MOST_TOLD = 60
_STATES_OF_WORK = frozenset({"preparing", "working", "validating"})


class Pulse:
    """When to tell what of one worker. Pure: told the time, and what was heard and seen.

    Args:
        every_s: it is told after so many seconds of silence, and again after each, at most `_MOST_TOLD` times.
    """

    def __init__(self, every_s: float, now: float) -> None:
        self._every_s = every_s
        self._heard_at = self._changed_at = self._looked_at = now
        self._told_at = float("-inf")
        self._doing: tuple[str, int] = ("", -1)
        self._cpu_s: float | None = None
        self._is_missed = False  # the last that was told is that it is silent

    def heard(self, now: float) -> None:
        """The worker said something: its Python code runs."""
        self._heard_at = now

    def look(
        self, now: float, doing: tuple[str, int], pid: int, seen: Callable[[], tuple[bool, float] | None]
    ) -> Vitals | None:
        """Say what is to be told now.

        Args:
            now: seconds, on a monotonic clock; called about once a second.
            doing: the state and the step that the worker told last.
            pid: of its process.
            seen: looks at it from outside: whether it is stopped, and the processor seconds that it ever took; None: cannot.
        """
        since_s, self._looked_at = now - self._looked_at, now
        if since_s > 5 * _LOOK_S:  # this process stood still too, and what the worker said meanwhile was not read yet
            self._heard_at = max(self._heard_at, now)
        if doing != self._doing:
            self._doing, self._changed_at = doing, now
        quiet_s = now - self._heard_at
        is_quiet = quiet_s >= self._every_s
        stuck_s = now - self._changed_at
        if quiet_s < 2 * _LOOK_S and self._is_missed:
            self._is_missed, self._told_at = False, now
            return Vitals(pid, 0.0, stuck_s, False)
        is_stuck = doing[0] in _STATES_OF_WORK and stuck_s >= _STUCK_S
        if not is_stuck and quiet_s < 2 * _LOOK_S:
            self._cpu_s = None
            return None
        is_stopped, cpu_s = seen() or (False, None)
        before, self._cpu_s = self._cpu_s, cpu_s
        busy = None if before is None or cpu_s is None or since_s <= 0 else max(0.0, cpu_s - before) / since_s
        is_due = now - self._told_at >= (self._every_s if is_quiet else _STUCK_S)
        may_tell = quiet_s <= _MOST_TOLD * self._every_s if is_quiet else is_stuck and before is not None
        if not (is_due and may_tell):
            return None
        self._told_at, self._is_missed = now, is_quiet
        keeps_s = max(0.0, _MOST_TOLD * self._every_s - quiet_s) if is_quiet else 0.0
        return Vitals(pid, quiet_s if is_quiet else 0.0, stuck_s, is_stopped, busy, keeps_s)


def _seen(pid: int) -> tuple[bool, float] | None:
    """Return whether a process is stopped, and its processor seconds; None where that cannot be had."""
    with contextlib.suppress(psutil.Error, OSError):
        process = psutil.Process(pid)
        times = process.cpu_times()
        stopped = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
        return process.status() in stopped, times.user + times.system
    return None


class PulseWatch:
    """Watches one worker's process from a thread, for as long as `ended` is not set.

    Args:
        options: of its link; it is told of `silence_s / 3` after it fell silent, and as often again.
        identity: of the worker's session.
        facts: gives its code, state, step and process id; None while there is nothing to watch.
        ended: set when the process has ended.
    """

    def __init__(
        self,
        options: LinkOptions,
        identity: bytes,
        facts: Callable[[], tuple[JoinCode, str, int, int] | None],
        ended: threading.Event,
    ) -> None:
        self._options, self._identity, self._facts, self._ended = options, identity, facts, ended
        self._pulse = Pulse(options.silence_s / 3, time.monotonic())
        threading.Thread(target=self._watch, name="guava-vitals", daemon=True).start()

    def heard(self) -> None:
        """The worker said something."""
        self._pulse.heard(time.monotonic())

    def _watch(self) -> None:
        while not self._ended.wait(_LOOK_S):
            facts = self._facts()
            if facts is None:
                continue
            code, state, step, pid = facts
            vitals = self._pulse.look(time.monotonic(), (state, step), pid, partial(_seen, pid))
            if vitals is not None:
                with contextlib.suppress(GuavaError):  # the orchestrator is away: it is told again soon
                    visit(code, self._identity, vitals, self._options)
