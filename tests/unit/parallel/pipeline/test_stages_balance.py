"""Cuts of a row of units into stages."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from guava_nb.errors import ConfigError
from guava_nb.parallel.pipeline.stages import balanced_cuts

quick = settings(max_examples=80, deadline=None)


# ------------------------------------------------------------------------------------------------------------- balance


@quick
@given(st.lists(st.integers(0, 20), min_size=1, max_size=9), st.integers(1, 5))
def test_balance_is_the_best_there_is(costs: list[int], stages: int) -> None:
    if len(costs) < stages:
        with pytest.raises(ConfigError, match=f"{stages} stages need at least {stages}"):
            balanced_cuts(costs, stages)
        return

    def worst(cuts: tuple[int, ...]) -> int:
        bounds = [0, *cuts, len(costs)]
        return max(sum(costs[a:b]) for a, b in zip(bounds[:-1], bounds[1:], strict=True))

    cuts = balanced_cuts(costs, stages)
    assert len(cuts) == stages - 1
    assert [0, *cuts] == sorted({0, *cuts})
    assert worst(tuple(cuts)) == min(worst(found) for found in combinations(range(1, len(costs)), stages - 1))
