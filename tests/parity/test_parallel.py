"""Spread models against plain PyTorch loops over whole batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from guava_nb.parallel.state import assemble, assemble_optimizer
from guava_nb.protocol.messages import ParallelSpec
from tests.support.parity_group import GroupPool, backends, group_pool
from tests.support.spread import Scenario, plain, spread

SPECS = {
    "data": ParallelSpec(dp=2),
    "data of 3": ParallelSpec(dp=3),
    "zero 1": ParallelSpec(mode="zero", dp=2, zero_stage=1),
    "zero 2": ParallelSpec(mode="zero", dp=2, zero_stage=2),
    "zero 3": ParallelSpec(mode="zero", dp=2, zero_stage=3),
    "zero 3 of 3": ParallelSpec(mode="zero", dp=3, zero_stage=3),
    "tensor": ParallelSpec(mode="tensor", tp=2),
    "hybrid": ParallelSpec(mode="hybrid", dp=2, tp=2),
    "hybrid zero 1": ParallelSpec(mode="hybrid", dp=2, tp=2, zero_stage=1),
    "pipeline": ParallelSpec(mode="pipeline", pp=2, micro_batches=3),
    "pipeline of replicas": ParallelSpec(mode="hybrid", dp=2, pp=2, micro_batches=2, schedule="gpipe"),
    "pipeline of zero 1": ParallelSpec(mode="hybrid", dp=2, pp=2, micro_batches=2, zero_stage=1),
    "pipeline of tensors": ParallelSpec(mode="hybrid", tp=2, pp=2, micro_batches=2),
    "hybrid zero 3": ParallelSpec(mode="hybrid", dp=2, tp=2, zero_stage=3),
}


@pytest.fixture(scope="module")
def pool() -> Iterator[GroupPool]:
    with group_pool(4) as made:
        yield made


def run(pool: GroupPool, backend: str, case: Scenario) -> list[dict[str, Any]]:
    return pool.run(case.spec.dp * case.spec.pp * case.spec.tp, backend, spread, case)


def furthest(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert list(a) == list(b)
    return max(float((a[k] - b[k]).abs().max()) for k in a)


def compare(case: Scenario, ranks: list[dict[str, Any]], tolerance: float) -> None:
    model, optimizer, losses, norms = plain(case)
    for rank in ranks:
        assert max(abs(a - b) for a, b in zip(rank["losses"], losses, strict=True)) <= tolerance
        assert max(abs(a - b) for a, b in zip(rank["norms"], norms, strict=True)) <= tolerance * 10
    if not case.double:
        return
    state = assemble(rank["pieces"] for rank in ranks)
    assert furthest(state, dict(model.state_dict())) <= tolerance
    mine, theirs = assemble_optimizer([rank["optimizer"] for rank in ranks]), optimizer.state_dict()
    assert sorted(mine["state"]) == sorted(theirs["state"])
    for number, values in theirs["state"].items():
        assert furthest(mine["state"][number], values) <= tolerance
    assert [g["params"] for g in mine["param_groups"]] == [g["params"] for g in theirs["param_groups"]]
    optimizer.load_state_dict(mine)


@pytest.mark.parametrize("backend", backends())
@pytest.mark.parametrize("name", SPECS)
def test_equal_to_plain_pytorch(pool: GroupPool, backend: str, name: str) -> None:
    case = Scenario(spec=SPECS[name], accumulate=2, groups=True)
    limit = plain(replace(case, steps=1))[3][0] / 2
    case = replace(case, max_norm=limit)
    compare(case, run(pool, backend, case), 1e-9)
