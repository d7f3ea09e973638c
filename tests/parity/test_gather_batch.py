"""Losses that couple samples, gathered over the replicas, equal plain PyTorch on whole batches."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from guava_nb.protocol.messages import ParallelSpec
from tests.support.coupled import LOSSES, Case, plain, shared
from tests.support.parity_group import GroupPool, backends, group_pool
from tests.support.spread import whole_state


@pytest.fixture(scope="module")
def pool() -> Iterator[GroupPool]:
    with group_pool(3) as made:
        yield made


def furthest(pool: GroupPool, backend: str, case: Case) -> float:
    ranks = pool.run(case.replicas, backend, shared, case)
    state, losses = plain(case)
    for rank in ranks:
        assert rank["losses"] == pytest.approx(losses, abs=1e-12)
        assert rank["validated"] == pytest.approx(losses, abs=1e-12)  # before the step, of the same batch
    ours = whole_state(ParallelSpec(dp=case.replicas, zero_stage=case.zero_stage), ranks)
    assert ours.keys() == state.keys()
    return max(float((ours[name] - state[name]).abs().max()) for name in state)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("zero_stage", [0, 1, 3])
def test_equal_to_plain_pytorch(pool: GroupPool, loss: str, replicas: int, zero_stage: int) -> None:
    """Of 8, 7 and 2 samples: shares are unlike, and one of three replicas has none of the last."""
    assert furthest(pool, "guava", Case(loss, replicas, zero_stage)) <= 1e-9


@pytest.mark.parametrize("backend", set(backends()) - {"guava"})
def test_the_same_over_gloo(pool: GroupPool, backend: str) -> None:
    assert furthest(pool, backend, Case("info_nce", 3)) <= 1e-9
