"""Sessions that are no workers: ranks of a program that uses only the hub's relay (`guava run`, `guava://`).

They never say hello, so nothing seats them or waits for them. A program cannot go on without one of its ranks, and a rank
that was killed looks like one whose connection broke: so these get less time to come back than a worker does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from guava_nb.errors import LinkTimeout
from guava_nb.link.session_events import Event, SessionClosed, SessionHandle, SessionResumed, SessionSuspect
from guava_nb.protocol.messages import Message, OpenGroup, StoreAsk

__all__ = ["PATIENCE_S", "Programs"]

PATIENCE_S = 8.0


class Programs:
    """Who takes part in a program, for notices, and who is away.

    Args:
        notice: told in one sentence who came and went.
        patience_s: how long a broken connection may stay away.
    """

    def __init__(self, notice: Callable[[str], None], patience_s: float = PATIENCE_S) -> None:
        self._notice, self._patience_s = notice, patience_s
        self._lock = threading.Lock()
        self._names: dict[bytes, str] = {}  # session to what a notice calls it; "" before it is in a group
        self._timers: dict[bytes, threading.Timer] = {}

    def on_message(self, session: SessionHandle, message: Message) -> None:
        """See a message of a session without a seat, in the thread that brings it."""
        if isinstance(message, OpenGroup):
            name = f"rank {message.rank} of {message.size} ({message.member})"
            with self._lock:
                known = self._names.get(session.session_id)
                self._names[session.session_id] = known or name  # its first group is that of all ranks
            if not known:
                self._notice(f"a program joined as {name}")
        elif isinstance(message, StoreAsk):
            with self._lock:
                self._names.setdefault(session.session_id, "")

    def on_change(self, event: Event) -> None:
        """See that a session without a seat broke, came back, or ended."""
        if not isinstance(event, SessionSuspect | SessionResumed | SessionClosed):
            return
        session = event.session
        with self._lock:
            known, name = session.session_id in self._names, self._names.get(session.session_id, "")
            timer = self._timers.pop(session.session_id, None)
            if isinstance(event, SessionClosed):
                self._names.pop(session.session_id, None)
            elif isinstance(event, SessionSuspect) and known:
                self._timers[session.session_id] = self._start_timer(session)
        if timer is not None:
            timer.cancel()
        if name and isinstance(event, SessionClosed):
            self._notice(f"a program's {name} {'left' if event.by_peer else 'was lost'}: {event.cause}")

    def _start_timer(self, session: SessionHandle) -> threading.Timer:
        cause = LinkTimeout(f"its connection broke and did not come back within {self._patience_s:g} s")
        farewell = f"this rank was away for more than {self._patience_s:g} s, and its program has ended without it"
        timer = threading.Timer(self._patience_s, session.end, (cause, False, farewell))
        timer.name, timer.daemon = "guava-away", True
        timer.start()
        return timer

    def close(self) -> None:
        """Forget who is away."""
        with self._lock:
            timers, self._timers = list(self._timers.values()), {}
        for timer in timers:
            timer.cancel()
