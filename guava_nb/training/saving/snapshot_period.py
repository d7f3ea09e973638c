"""How often the state comes to the orchestrator where it exists only once; pure.

A vanished worker costs the work since the last snapshot that came, so it costs a period and a transfer at most. J. W. Young, "A
first order approximation to the optimum checkpoint interval", Communications of the ACM 17 (9), 1974: with a cost of C seconds
each and one loss in M seconds, the least is lost with a period of sqrt(2 C M).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["FIRST_S", "MOST_LOST_S", "MOST_PART", "mean_life_s", "period_s", "stall_s"]

#: The first snapshot of a run, and the least between two: a shorter loss is none to a person.
FIRST_S = 10.0
#: Of work that a vanished worker may cost, where the line allows it.
MOST_LOST_S = 300.0
#: Of the time, for which steps may stand still for snapshots.
MOST_PART = 0.02
#: Before anything was lost in a run: one worker in two hours.
_LIFE_S = 7200.0
#: Of a transfer's time: what it takes of the line and of processors, while steps go on.
_TRANSFER_PART = 0.1


def period_s(stalled_s: float, transfer_s: float, life_s: float = _LIFE_S) -> float:
    """Return the seconds from one snapshot to the next.

    Args:
        stalled_s: for which steps stood still for one.
        transfer_s: from the question to the state's arrival.
        life_s: between two losses of a worker.

    Returns:
        By Young's rule, but no more than leaves a loss of 300 s with the transfer, and no less than keeps the stalls at 2 % of
        the time and lets a transfer end before the next. So on a thin line two transfers are lost at most.
    """
    young = math.sqrt(2 * (stalled_s + _TRANSFER_PART * transfer_s) * life_s)
    return max(FIRST_S, stalled_s / MOST_PART, transfer_s, min(young, MOST_LOST_S - transfer_s))


def mean_life_s(trained_s: float, num_losses: int) -> float:
    """Return the seconds between two losses, as far as a run has shown them, with one in two hours assumed before it."""
    return (_LIFE_S + trained_s) / (1 + num_losses)


def stall_s(before: Sequence[float], during: Sequence[float]) -> float | None:
    """Return for how long steps stood still for a snapshot: what its steps took more than steps take.

    Args:
        before, during: times of commits, the last of `before` being that at which it was taken; None where there are too few.
    """
    gaps = sorted(now - last for last, now in zip(before, before[1:], strict=False))
    if not gaps or not during:
        return None
    return max(0.0, during[-1] - before[-1] - len(during) * gaps[len(gaps) // 2])
