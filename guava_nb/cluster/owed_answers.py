"""How long a job waits for a worker that is connected and does not answer: by what that worker took before. Pure.

Time makes a worker slow, never lost: a hung driver, a deadlock in a cell, or only a long step look alike from here.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

__all__ = ["OwedAnswer", "OwedAnswers"]

#: A worker may take so many times what it took before.
_TIMES = 5.0
#: Answers of one kind that are remembered of each worker.
_REMEMBERED = 9


class OwedAnswer(NamedTuple):
    """An answer that a worker owes.

    Attributes:
        rank: of the worker.
        kind: answers of one kind take about as long as each other: "step", "preparing".
        number: tells this answer from others of its kind.
        what: what it does, for a sentence: "step 12", "preparing the run".
    """

    rank: int
    kind: str
    number: int
    what: str


class OwedAnswers:
    """Measures what workers owe, and tells when one is late.

    Args:
        least_s: a worker may take so long, however quick it was before.
    """

    def __init__(self, least_s: float) -> None:
        """No worker owes anything."""
        self._least_s = least_s
        self._since: dict[OwedAnswer, float] = {}
        self._took: dict[tuple[int, str], deque[float]] = {}
        self._usual: dict[str, float] = {}  # of all workers' answers of a kind, until the next one comes
        self._told: set[OwedAnswer] = set()

    def look(self, owed: Iterable[OwedAnswer], now: float) -> tuple[list[OwedAnswer], list[OwedAnswer]]:
        """Take what is owed now, on a monotonic clock.

        Returns:
            What is late enough to be told and was not told before; and what is so late that others should do it.
        """
        owed = set(owed)
        for answer in self._since.keys() - owed:
            self._remember(answer, now - self._since.pop(answer))
            self._told.discard(answer)
        for answer in owed:
            self._since.setdefault(answer, now)
        late = sorted(answer for answer in owed if self.waited_s(answer, now) >= self.limit_s(answer) * 2 / 3)
        news = [answer for answer in late if answer not in self._told]
        self._told.update(news)
        return news, [answer for answer in late if self.waited_s(answer, now) >= self.limit_s(answer)]

    def waited_s(self, answer: OwedAnswer, now: float) -> float:
        """Return how long an answer has been owed."""
        return now - self._since.get(answer, now)

    def limit_s(self, answer: OwedAnswer) -> float:
        """Return how long this answer may take: some times what this worker took for such ones, or others where it gave none."""
        return max(self._least_s, _TIMES * (self.usual_s(answer) or self._usual_of_all(answer.kind)))

    def _usual_of_all(self, kind: str) -> float:
        if kind not in self._usual:
            took = [seconds for (_, of), times in self._took.items() if of == kind for seconds in times]
            self._usual[kind] = statistics.median(took) if took else 0.0
        return self._usual[kind]

    def usual_s(self, answer: OwedAnswer) -> float | None:
        """Return what this worker took for such answers before; None: it gave none."""
        own = self._took.get((answer.rank, answer.kind))
        return statistics.median(own) if own else None

    def _remember(self, answer: OwedAnswer, took_s: float) -> None:
        self._took.setdefault((answer.rank, answer.kind), deque(maxlen=_REMEMBERED)).append(took_s)
        self._usual.pop(answer.kind, None)
