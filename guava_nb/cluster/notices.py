"""Sentences for the person at the orchestrator: joins, losses, refused strangers, and every warning of ours.

Warnings come through `logging`, from any thread; a library must not print them into the cell that happens to run.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import TypeVar

from guava_nb.config.units import show_time
from guava_nb.protocol.shown_text import shown_text

__all__ = ["LineBreaks", "Notices", "Standstill"]

_T = TypeVar("_T")
#: Sentences kept; older ones are forgotten.
KEPT = 100
#: Characters of a sentence that are kept: names and reasons in it may come from a worker.
MOST_CHARS = 10_000
#: A line that broke so many times in so many seconds is told as a line that breaks often, once in as many.
OFTEN, OFTEN_S = 4, 120.0


#: A wait that lasted so much longer than it was to last, in seconds, while this process computed less than this part of it.
STOOD_S, IDLE_PART = 15.0, 0.2
#: Seconds of one wait for an event.
LOOK_S = 5.0
#: A clock that counts while the machine sleeps. Linux's monotonic one does not.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", getattr(time, "CLOCK_MONOTONIC", None))


class Standstill:
    """Finds out that this process stood still for long: a laptop that slept, a stopped process, a frozen container.

    Its lines broke meanwhile, and the times of a run have a gap: without a word both look like a fault of the workers.
    """

    def __init__(self) -> None:
        """It runs now."""
        self._at, self._cpu_s = _now(), time.process_time()

    def look(
        self, wanted_s: float, now: float | None = None, cpu_s: float | None = None, wall: float | None = None
    ) -> str:
        """Return what to say after a wait that was to last `wanted_s` at most and began at the last `wait`; "" for nothing.

        Args:
            wanted_s: of the wait.
            now: seconds on a clock that counts while the machine sleeps; None, as for the others: as it is.
            cpu_s: that this process has computed.
            wall: the time of day, in seconds of the epoch.
        """
        now, cpu_s = _now() if now is None else now, time.process_time() if cpu_s is None else cpu_s
        waited_s, computed_s = now - self._at, cpu_s - self._cpu_s
        if waited_s < wanted_s + STOOD_S or computed_s > IDLE_PART * waited_s:
            return ""
        until = time.time() if wall is None else wall
        begin, end = (time.strftime("%H:%M:%S", time.localtime(at)) for at in (until - waited_s, until))
        return (
            f"the orchestrator's process stood still for {show_time(waited_s)} (from {begin} to {end}), as when a laptop sleeps; "
            "workers whose connections broke meanwhile open them again, and work goes on where it stood"
        )

    def next_of(self, events: SimpleQueue[_T], tell: Callable[[str], None]) -> _T:
        """Wait for the next event; tells when this process stood still meanwhile."""
        got: list[_T] = []
        while not got:
            self.wait()
            with contextlib.suppress(Empty):
                got.append(events.get(timeout=LOOK_S))
            if told := self.look(LOOK_S):
                tell(told)
        return got[0]

    def wait(self, now: float | None = None, cpu_s: float | None = None) -> None:
        """A wait begins."""
        self._at, self._cpu_s = _now() if now is None else now, time.process_time() if cpu_s is None else cpu_s


def _now() -> float:
    return time.monotonic() if _CLOCK is None else time.clock_gettime(_CLOCK)


class LineBreaks:
    """Tells a line that breaks often from one that broke: the first is said once, not at each break. Pure.

    A proxy that ends connections after half a minute, or a phone, would fill the list of notices and say nothing in it.
    """

    def __init__(self) -> None:
        """No line broke."""
        self._at: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=1000))
        self._told_at: dict[int, float] = {}

    def broke(self, rank: int, name: str, cause: object, are_others: bool, now: float) -> str:
        """Return what to say of a connection that broke, "" for nothing; `now` in monotonic seconds."""
        then = "its work goes to others" if are_others else "no other worker is here: its work waits"
        breaks = self._at[rank]
        breaks.append(now)
        while breaks[0] < now - OFTEN_S:
            breaks.popleft()
        if len(breaks) < OFTEN:
            return f"{name}: connection broke ({cause}); {then}"
        if now - self._told_at.get(rank, float("-inf")) < OFTEN_S:
            return ""
        self._told_at[rank] = now
        return (
            f"{name}: its connection broke {len(breaks)} times in {now - breaks[0]:.0f} s, the last time: {cause}. It "
            "comes back each time and goes on within messages, so no work is lost, but it is slow. Something on the way ends "
            "connections (a proxy, a phone, a VPN): another network or another --tunnel may help"
        )

    def forget(self, rank: int) -> None:
        """A worker is long gone."""
        self._at.pop(rank, None)
        self._told_at.pop(rank, None)

    def back(self, rank: int, name: str, now: float) -> str:
        """Return what to say of a connection that is back, "" for nothing."""
        breaks = self._at[rank]
        often = len(breaks) >= OFTEN and breaks[-OFTEN] > now - OFTEN_S
        return "" if often else f"{name}: connection is back"


class Notices(logging.Handler):
    """Keeps the last sentences. As a log handler it also takes the package's warnings, once `listen` was called.

    Args:
        record: takes each of them for good.
    """

    def __init__(self, record: Callable[[str], None] = lambda sentence: None) -> None:
        """Start empty and not listening."""
        super().__init__(logging.WARNING)
        self._record = record
        self._sentences: deque[tuple[int, str, str]] = deque(maxlen=KEPT)
        self._count = 0
        self._access = threading.Lock()

    def add(self, sentence: str, topic: str = "") -> None:
        """Keep a sentence; from any thread. `topic` names what it is about, so that it can be forgotten when it is over."""
        logging.getLogger("guava_nb.session").info("%s", sentence)
        self._keep(sentence, topic)

    def replace(self, sentence: str, topic: str) -> None:
        """Keep a sentence instead of those on the same topic, which are over."""
        self.forget(topic)
        self.add(sentence, topic)

    def forget(self, topic: str) -> None:
        """What was said about a topic is over."""
        with self._access:
            kept = [entry for entry in self._sentences if entry[1] != topic]
            self._sentences.clear()
            self._sentences.extend(kept)

    def _keep(self, sentence: str, topic: str = "") -> None:
        sentence = shown_text(sentence[:MOST_CHARS])
        with self._access:
            self._count += 1
            self._sentences.append((self._count, topic, sentence))
        self._record(sentence)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a warning of ours."""
        self._keep(record.getMessage())

    def listen(self) -> None:
        """Take the package's warnings from now on."""
        logging.getLogger("guava_nb").addHandler(self)

    def stop(self) -> None:
        """Take no warnings any more."""
        logging.getLogger("guava_nb").removeHandler(self)

    def numbered(self, count: int) -> tuple[tuple[int, str], ...]:
        """Return the newest sentences, oldest first, each with its number, which grows by one with each."""
        with self._access:
            return tuple((number, sentence) for number, _, sentence in self._sentences)[-count:]
