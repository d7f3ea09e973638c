"""What is new of workers' lines and of notices, made from calls that only know the last ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["LineTail", "Notices", "WorkerLines"]

#: Notices of a run that are shown beside it; all of them stay in the orchestrator's log.
SHOWN_NOTICES = 5


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
