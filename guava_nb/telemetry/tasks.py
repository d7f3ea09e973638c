"""Time and energy by the name of a task: the code's author says what it is about, here it is added up.

A task's time is exact: by the clock, on CUDA by the device's own events, which are read later and wait for nothing. Its energy
is that of the boards between its two ends, shared out by time between two readings. So a task within another counts for
both, and one that other work went on beside has that work's energy in it too: it is a view of the same time, not a part.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from guava_nb.errors import ConfigError
from guava_nb.protocol.messages import TaskEnergy

__all__ = ["MOST_NAMES", "Task", "TaskBook", "between", "energy_task", "listen", "uncounted", "unlisten"]

log = logging.getLogger(__name__)

#: Tasks of other names than these many are added up under one.
MOST_NAMES = 100
FURTHER = "(further tasks)"
_LONGEST = 80  # characters of a name
_MOST_WAITING = 20_000  # tasks that wait for their joules; a sensor that hangs must not fill memory

#: Books of the meters that measure in this process. Exchanged as a whole, so reading needs no lock.
_listening: tuple[TaskBook, ...] = ()
_exchange = threading.Lock()
_unheard: set[int] = set()  # threads whose tasks do not count at the moment


def energy_task(name: str) -> Task:
    """Name what the code of a `with` block is about, wherever it runs.

        with energy_task("attention"):
            weights = scores(q, k)

    On a worker its seconds and joules come back in `run.energy_record()` and `%guava_energy`; in a program with an open
    `EnergyMeter` they stand in the window. Where nothing is measured it does nothing. A task within another counts for
    both, one within itself once; what several threads do at once adds up. In a generator or coroutine it counts from its begin
    to its end, on whatever thread that is; what other code names alike meanwhile counts too. Code that torch compiles is one
    piece to its compiler: put the `with` around the call, since inside it does nothing.

    Args:
        name: up to 80 characters, the rest is cut off; names beyond the hundredth of a run are added up as "(further tasks)".

    Raises:
        ConfigError: the name is no text, or empty.
    """
    return Task(name, None)


class Task:
    """What `energy_task` and `EnergyMeter.task` return. It may be used again, within itself and by several threads."""

    __slots__ = ("_books", "_marks", "_name")

    def __init__(self, name: str, books: tuple[TaskBook, ...] | None) -> None:
        if not isinstance(name, str) or not name.strip():
            raise ConfigError(f"{name!r} is no name for a task: give a short text, as in energy_task('attention')")
        self._name, self._books = _plain(name), books
        # Of each `with` that is going on: its thread, and where each book stood.
        self._marks: list[tuple[int, list[tuple[TaskBook, _Point]]]] = []

    def __enter__(self) -> None:
        if _is_compiling():
            return
        books = () if threading.get_ident() in _unheard else _listening if self._books is None else self._books
        self._marks.append((threading.get_ident(), _begin(self._name, books, sys._getframe(1)) if books else []))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for book, start in self._take():
            book.end(self._name, start)

    def _take(self) -> list[tuple[TaskBook, _Point]]:
        """The marks of the newest `with` of this thread; of the newest at all for one that began on another."""
        with _exchange:
            mine = [k for k, (thread, _) in enumerate(self._marks) if thread == threading.get_ident()]
            if not self._marks:  # it began while torch compiled
                return []
            return self._marks.pop(mine[-1] if mine else -1)[1]


@contextmanager
def uncounted() -> Iterator[None]:
    """Count no task of this thread inside: its code runs beside what it is for."""
    _unheard.add(threading.get_ident())
    try:
        yield
    finally:
        _unheard.discard(threading.get_ident())


def _plain(name: str) -> str:
    """Return a name that can be sent and shown: short, without control characters and halves of characters."""
    short = name if len(name) <= _LONGEST else name[: _LONGEST - 1] + "…"
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in short)


def _is_running(frames: list[Any], frame: Any) -> bool:
    """Whether one of the frames is this one, or called it."""
    while frame is not None:
        if any(one is frame for one in tuple(frames)):
            return True
        frame = frame.f_back
    return False


def _is_compiling() -> bool:
    """Whether torch traces this very code to compile it; False without torch."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.compiler.is_compiling()


def _begin(name: str, books: tuple[TaskBook, ...], frame: Any) -> list[tuple[TaskBook, _Point]]:
    begun = []
    for book in books:
        start = book.begin(name, frame)
        if start is not None:
            begun.append((book, start))
    return begun


def listen(book: TaskBook) -> None:
    """Have a book told of every `energy_task` from now on."""
    global _listening
    with _exchange:
        if book not in _listening:
            _listening = (*_listening, book)


def unlisten(book: TaskBook) -> None:
    """Tell a book nothing more."""
    global _listening
    with _exchange:
        _listening = tuple(other for other in _listening if other is not book)


class _Point:
    """One end of a task: when the host was there, the device's event if there is one, and the sums of energy at that time."""

    __slots__ = ("at_s", "event", "inside", "sums")

    def __init__(self, at_s: float, event: Any) -> None:
        self.at_s, self.event = at_s, event
        self.inside: tuple[dict[str, list[Any]], Any] | None = None  # of a beginning: its thread's marks, and its own
        self.sums: tuple[float, float] | None = None


@dataclass(slots=True)
class _Sum:
    times: int = 0
    seconds: float = 0.0
    joules: float = 0.0
    covered_s: float = 0.0


class TaskBook:
    """Sums per name. Tasks begin and end on any thread, without a lock and without waiting; who reads sensors tells of them.

    Args:
        clock: monotonic seconds.
        mark: records an event on the device at this moment; None where there is no such device (now).
        time_of: when the device was at an event, given that and the time on the host when it was recorded; None: not yet.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        mark: Callable[[], Any] = lambda: None,
        time_of: Callable[[Any, float], float | None] = lambda event, at_s: at_s,
    ) -> None:
        self._clock, self._mark, self._time_of = clock, mark, time_of
        self.missed = 0  # tasks that too many were waiting before, since `forget`
        self._inside = threading.local()
        self._new: deque[_Point] = deque()
        self._ended: deque[tuple[str, _Point, _Point]] = deque()
        self._lock = threading.Lock()  # of all that follows
        self._points: list[_Point] = []
        self._parts: list[tuple[float, float, float]] = []
        self._before = (0.0, 0.0)  # sums of the parts that are not asked for any more
        self._until_s = float("-inf")
        self._sums: dict[str, _Sum] = {}

    def begin(self, name: str, frame: Any = None) -> _Point | None:
        """A task begins on this thread; None where it is not counted: it goes on already, or too many wait.

        Args:
            frame: of the code that names it. While that code, or what it calls, runs, the task goes on; while it is a
                generator or coroutine that is suspended, other code is not within its task.
        """
        frame = frame or sys._getframe(1)
        going = self._inside.__dict__.setdefault("names", {})
        if name in going and _is_running(going[name], frame):
            return None
        if len(self._new) > _MOST_WAITING or len(self._ended) > _MOST_WAITING:
            self.missed += 1
            return None
        point = self._point()
        if point is not None:
            point.inside = going, frame
            going.setdefault(name, []).append(frame)
        return point

    def end(self, name: str, start: _Point) -> None:
        """The task that began with this point ended."""
        if start.inside is not None:
            (going, frame), start.inside = start.inside, None
            frames = going.get(name, [])
            frames.remove(frame)
            if not frames and going is self._inside.__dict__.get("names"):  # another thread may be adding to its own
                del going[name]
        stop = self._point()
        if stop is not None:
            self._ended.append((name, start, stop))

    def _point(self) -> _Point | None:
        try:
            point = _Point(self._clock(), self._mark())
        except Exception:  # a device that fails tells its own story where it is used
            log.debug("a task's end was not marked", exc_info=True)
            return None
        self._new.append(point)
        return point

    def measured(self, parts: Iterable[tuple[float, float, float]], until_s: float) -> None:
        """Take (from, to, joules); up to a time nothing more will come. Never waits for a device."""
        with self._lock:
            self._parts.extend(parts)
            self._until_s = max(self._until_s, until_s)
            # Those that end from here on wait for the next call; their points come after those that are looked at now.
            ended = [self._ended.popleft() for _ in range(len(self._ended))]
            self._points += [self._new.popleft() for _ in range(len(self._new))]
            self._points = [point for point in self._points if not self._settle(point)]
            self._fold()
            for name, start, stop in ended:
                if start.sums is None or stop.sums is None:
                    self._ended.append((name, start, stop))
                else:
                    self._add(name, start, stop)

    def totals(self) -> dict[str, _Sum]:
        """Return copies of the sums so far, by name, of tasks that ended."""
        with self._lock:
            return {name: _Sum(s.times, s.seconds, s.joules, s.covered_s) for name, s in self._sums.items()}

    def forget(self) -> None:
        """Begin the sums anew, and with them the count of names."""
        with self._lock:
            self._sums.clear()
            self.missed = 0

    def _settle(self, point: _Point) -> bool:
        """Find the sums at a point, if everything up to its time is known."""
        if point.event is not None:
            try:
                at_s = self._time_of(point.event, point.at_s)
            except Exception:  # the device is broken, or the event was lost in a graph
                at_s = point.at_s
            if at_s is None:
                return False
            point.at_s, point.event = at_s, None
        if point.at_s > self._until_s:
            return False
        joules, covered_s = self._before
        for start_s, end_s, part in self._parts:
            inside = min(end_s, point.at_s) - start_s
            if inside > 0:
                joules += part * inside / (end_s - start_s)
                covered_s += inside
        point.sums = (joules, covered_s)
        return True

    def _fold(self) -> None:
        """Forget parts that lie before every point that is still open."""
        oldest = min((point.at_s for point in self._points), default=self._until_s)
        joules, covered_s = self._before
        kept = []
        for start_s, end_s, part in self._parts:
            if end_s <= min(oldest, self._until_s):
                joules, covered_s = joules + part, covered_s + end_s - start_s
            else:
                kept.append((start_s, end_s, part))
        self._before, self._parts = (joules, covered_s), kept

    def _add(self, name: str, start: _Point, stop: _Point) -> None:
        assert start.sums is not None and stop.sums is not None
        if name not in self._sums and len(self._sums) >= MOST_NAMES:
            name = FURTHER
        found = self._sums.setdefault(name, _Sum())
        found.times += 1
        found.seconds += max(0.0, stop.at_s - start.at_s)
        found.joules += max(0.0, stop.sums[0] - start.sums[0])
        found.covered_s += max(0.0, stop.sums[1] - start.sums[1])


def between(then: dict[str, _Sum], now: dict[str, _Sum]) -> tuple[TaskEnergy, ...]:
    """Return what was added from one moment to another; joules None where nothing was measured meanwhile."""
    found = []
    for name, total in now.items():
        before = then.get(name, _Sum())
        if total.times > before.times:
            measured = total.covered_s > before.covered_s
            joules = total.joules - before.joules if measured else None
            found.append(TaskEnergy(name, total.seconds - before.seconds, joules, total.times - before.times))
    return tuple(found)
