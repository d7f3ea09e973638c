"""How long a job waits for a worker that is connected and does not answer: by what that worker took before. Pure.

Time makes a worker slow, never lost: a hung driver, a deadlock in a cell, or only a long step look alike from here.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

__all__ = ["Debt", "Patience"]

#: A worker may take so many times what it took before.
_TIMES = 5.0
#: Answers of one kind that are remembered of each worker.
_REMEMBERED = 9


class Debt(NamedTuple):
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


class Patience:
    """Measures what workers owe, and tells when one is late.

    Args:
        least_s: a worker may take so long, however quick it was before.
    """

    def __init__(self, least_s: float) -> None:
        """No worker owes anything."""
        self._least_s = least_s
        self._since: dict[Debt, float] = {}
        self._took: dict[tuple[int, str], deque[float]] = {}
        self._told: set[Debt] = set()

    def look(self, owed: Iterable[Debt], now: float) -> tuple[list[Debt], list[Debt]]:
        """Take what is owed now, on a monotonic clock.

        Returns:
            What is late enough to be told and was not told before; and what is so late that others should do it.
        """
        owed = set(owed)
        for debt in self._since.keys() - owed:
            self._remember(debt, now - self._since.pop(debt))
            self._told.discard(debt)
        for debt in owed:
            self._since.setdefault(debt, now)
        late = sorted(debt for debt in owed if self.waited_s(debt, now) >= self.limit_s(debt) * 2 / 3)
        news = [debt for debt in late if debt not in self._told]
        self._told.update(news)
        return news, [debt for debt in late if self.waited_s(debt, now) >= self.limit_s(debt)]

    def waited_s(self, debt: Debt, now: float) -> float:
        """Return how long an answer has been owed."""
        return now - self._since.get(debt, now)

    def limit_s(self, debt: Debt) -> float:
        """Return how long this answer may take: some times what this worker took for such ones, or others where it gave none."""
        own = self._took.get((debt.rank, debt.kind))
        took = own or [s for (_, kind), times in self._took.items() if kind == debt.kind for s in times]
        return max(self._least_s, _TIMES * statistics.median(took)) if took else self._least_s

    def usual_s(self, debt: Debt) -> float | None:
        """Return what this worker took for such answers before; None: it gave none."""
        own = self._took.get((debt.rank, debt.kind))
        return statistics.median(own) if own else None

    def _remember(self, debt: Debt, took_s: float) -> None:
        self._took.setdefault((debt.rank, debt.kind), deque(maxlen=_REMEMBERED)).append(took_s)
