"""What is new of workers' lines and of notices, made from calls that only know the last ones; and how much of it a cell shows."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["LineTail", "Notices", "ShownLines", "WorkerLines"]

#: Notices of a run that are shown beside it; all of them stay in the orchestrator's log.
SHOWN_NOTICES = 5
#: Lines of workers and their characters that one cell shows as they come: a notebook is stored with them. Then the last ones.
MOST_LINES, MOST_CHARS, LAST_LINES = 1000, 200_000, 10


class LineTail:
    """Turns "the last n lines" into "the lines that are new"."""

    def __init__(self, read: Callable[[], Sequence[str]], seen: Sequence[str] = ()) -> None:
        self._read = read
        self._seen = list(seen)

    def new(self) -> list[str]:
        """Lines since the last call; lines that came faster than they are kept are lost to this view only."""
        now = list(self._read())
        for overlap in range(min(len(self._seen), len(now)), -1, -1):
            if self._seen[len(self._seen) - overlap :] == now[:overlap]:
                break
        self._seen = now
        return now[overlap:]


class ShownLines:
    """How much of what workers print one cell shows: the first lines as they come, at its end the last ones.

    Args:
        where: who asks finds the lines that are left out there.
    """

    def __init__(self, where: str = "%guava_log shows the newest") -> None:
        """Nothing was shown yet."""
        self._where, self._lines, self._chars = where, MOST_LINES, MOST_CHARS
        self._left_out, self._last = 0, deque[str](maxlen=LAST_LINES)

    def of(self, lines: Sequence[str]) -> list[str]:
        """Return those of these lines that are to be shown now; once with a sentence on those that will not be."""
        shown: list[str] = []
        for line in lines:
            self._lines, self._chars = self._lines - 1, self._chars - len(line)
            if self._lines < 0 or self._chars < 0:
                self._lines = -1  # a short one must not follow a long one that was left out
                self._last.append(line)
                self._left_out += 1
                if self._left_out == 1:
                    shown.append(f"[this cell shows no more lines as they come; {self._where}]")
            else:
                shown.append(line)
        return shown

    def rest(self) -> list[str]:
        """Return the last lines where some were left out, and how many were; to be called once, at the end."""
        lacking = self._left_out - len(self._last)
        return ([f"[{lacking} lines left out here; {self._where}]"] if lacking > 0 else []) + list(self._last)


class Notices:
    """What happened in a session since this was made: workers that came, broke, or were lost."""

    def __init__(self, orchestrator: Any) -> None:
        """Take what happened so far as seen."""
        self._orchestrator = orchestrator
        self._seen = max(orchestrator.status().note_numbers, default=0)

    def latest(self) -> tuple[str, ...]:
        """The last few sentences, without those that are over."""
        status = self._orchestrator.status()
        numbered = zip(status.note_numbers, status.notes, strict=True)
        return tuple(sentence for number, sentence in numbered if number > self._seen)[-SHOWN_NOTICES:]


class WorkerLines:
    """New lines of every worker of an orchestrator, with the worker's name in front.

    Workers are followed one by one: lines of all of them together have no lasting order to find one's place in.
    """

    def __init__(self, orchestrator: Any) -> None:
        """Take what was printed so far as seen."""
        self._orchestrator = orchestrator
        self._tails: dict[str, LineTail] = {}
        self.new()

    def new(self) -> list[str]:
        """Lines since the last call; of a worker that came since then, all it printed."""
        return [f"{name} | {line}" for name in self._names() for line in self._tail(name).new()]

    def _names(self) -> list[str]:
        return [worker.name for worker in self._orchestrator.status().workers]

    def _tail(self, name: str) -> LineTail:
        if name not in self._tails:
            self._tails[name] = LineTail(lambda: self._orchestrator.log(worker=name))
        return self._tails[name]
