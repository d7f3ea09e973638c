"""How far batches may be sent ahead of need, as a pure machine: from bytes and times it tells which workers must work first.

Knows shards by number and size; knows no sessions, batches or clocks. Three bounds hold at once:

- bytes: what a worker was sent and has not worked on stays within `budget_bytes`. One step ahead is allowed whatever its
  size, or large batches would never overlap with the work; more than one step beyond the budget never is.
- time: about `HORIZON_S` of work at the pace of the last commits. A worker that holds that much never waits for the line, and
  more of it would only delay what comes behind it: a snapshot, and the next run after an interrupt.
- steps: `most_steps`, because a position within the epoch is known exactly for so many batches only.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping

__all__ = ["HORIZON_S", "SendCredit"]

#: Work to be held ahead, in seconds. Little's law makes the depth settle where a batch waits this long before its turn.
HORIZON_S = 1.0
#: Steps ahead while the pace is not known yet: the first step may compile for a minute.
_FIRST_STEPS = 8
#: Commits over which the pace is taken.
_PACE_COMMITS = 8


class SendCredit:
    """What every worker was sent and has not worked on yet.

    Args:
        budget_bytes: per worker; 0 sends by `least_steps` alone.
        least_steps: steps ahead of the one in work that pace and bytes do not forbid (bytes: see the module's text).
        most_steps: steps ahead that are never exceeded.
    """

    def __init__(self, budget_bytes: int, least_steps: int = 1, most_steps: int = 128) -> None:
        """Start with nothing sent."""
        self._budget, self._least, self._most = budget_bytes, least_steps, max(most_steps, least_steps)
        self._shards: dict[tuple[int, int], tuple[int, int]] = {}
        self._held: dict[int, int] = {}
        self._counts: dict[int, int] = {}
        self._commits: deque[float] = deque(maxlen=_PACE_COMMITS + 1)
        self._pace: float | None = None

    # ------------------------------------------------------------------------------------------------- what happened

    def sent(self, step: int, shard: int, rank: int, nbytes: int) -> None:
        """A shard went to a worker; sent again to another one it counts there.

        Args:
            step: of the shard.
            shard: its number.
            rank: of the worker.
            nbytes: of its batch.
        """
        self.worked(step, shard)
        self._shards[step, shard] = (rank, nbytes)
        self._held[rank] = self._held.get(rank, 0) + nbytes
        self._counts[rank] = self._counts.get(rank, 0) + 1

    def worked(self, step: int, shard: int) -> None:
        """Its worker is done with the data of a shard; told twice it counts once."""
        rank, nbytes = self._shards.pop((step, shard), (-1, 0))
        if rank >= 0:
            self._held[rank] -= nbytes
            self._counts[rank] -= 1

    def committed(self, now_s: float) -> None:
        """A step was committed, at this time of a monotonic clock."""
        self._commits.append(now_s)
        if len(self._commits) > 2:
            span_s = self._commits[-1] - self._commits[0]
            self._pace = (len(self._commits) - 1) / span_s if span_s > 0 else math.inf

    def pause(self) -> None:
        """The run does something else for a while: the time until the next commit says nothing about the pace."""
        self._commits.clear()

    def clear(self) -> None:
        """All steps in flight were given up."""
        self._shards.clear()
        self._held.clear()
        self._counts.clear()
        self._commits.clear()

    # --------------------------------------------------------------------------------------------------- what follows

    def held_bytes(self, rank: int) -> int:
        """Bytes that a worker was sent and has not worked on."""
        return self._held.get(rank, 0)

    def held_shards(self, rank: int) -> int:
        """Shards that a worker was sent and has not worked on."""
        return self._counts.get(rank, 0)

    def must_work(self, steps: int, coming: Mapping[int, int], cautious: bool = False) -> tuple[int, ...]:
        """Return the workers that must work off something before the next step is sent; none: it may go now.

        Args:
            steps: in flight.
            coming: bytes of the next step for each worker that takes part.
            cautious: a member is away and may come back: if it misses no step it needs no state, so keep to `least_steps`.
        """
        if steps <= min(1, self._least):
            return ()
        if steps <= self._least:
            return tuple(rank for rank in coming if self.held_bytes(rank) > self._budget)
        if cautious or steps > self._most_ahead():
            return tuple(coming)
        return tuple(rank for rank, nbytes in coming.items() if self.held_bytes(rank) + nbytes > self._budget)

    def is_full(self, steps: int) -> bool:
        """Whether so many steps in flight are too many for another one, whatever its bytes."""
        return steps > max(1, self._least) and steps > self._most_ahead()

    def _most_ahead(self) -> int:
        if not self._budget:
            return self._least
        wanted = _FIRST_STEPS if self._pace is None else min(self._pace * HORIZON_S, self._most)
        return max(self._least, min(self._most, math.ceil(wanted)))
