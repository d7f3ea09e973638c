"""Cutting a row of units into stages of about equal cost. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

from guava_nb.errors import ConfigError

__all__ = ["balanced_cuts"]


def balanced_cuts(costs: Sequence[float], stages: int) -> list[int]:
    """Return at which units the second and later stages begin, so that the costliest stage costs least.

    Every stage gets one unit at least. Of equally good cuts the one with the earliest beginnings is taken, so that all
    ranks agree.

    Args:
        costs: of each unit, in order, not negative.
        stages: into how many runs the units are cut.

    Raises:
        ConfigError: there are fewer units than stages.
    """
    units = len(costs)
    if units < stages:
        raise ConfigError(
            f"the model has {units} part{'s' if units != 1 else ''} to cut between, {stages} stages need at least "
            f"{stages}; use fewer stages, or name finer split points"
        )
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    # best[k] is the lowest cost of the first k units in the stages so far, cuts[k] the beginnings that reach it.
    best: dict[int, tuple[float, list[int]]] = {k: (sums[k], []) for k in range(1, units + 1)}
    for stage in range(1, stages):
        best = {
            end: min(
                (max(best[start][0], sums[end] - sums[start]), [*best[start][1], start])
                for start in best
                if start < end
            )
            for end in range(stage + 1, units + 1)
        }
    return best[units][1]
