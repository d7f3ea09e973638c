from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from guava_nb.errors import TrainingError
from guava_nb.protocol.messages import ParallelSpec, StepApplied
from guava_nb.training.step_accounting import StepAccounting


def accounting(parallel: ParallelSpec | None, notices: list[str]) -> tuple[StepAccounting, set[int]]:
    """One whose worker 1 reports other parameters than worker 0."""
    behind: set[int] = set()
    made: Any = object.__new__(StepAccounting)
    made._replica_set = SimpleNamespace(
        spec=SimpleNamespace(parallel=parallel), note_commit=lambda rank, message: "parameters differ" if rank else None
    )
    cluster = SimpleNamespace(name=lambda rank: f"w{rank}", notice=notices.append)
    made._membership = SimpleNamespace(cluster=cluster, behind=behind)
    made.first_step, made._run = 0, SimpleNamespace(history=[])
    return made, behind


def applied() -> StepApplied:
    return StepApplied(run_id="run-1", generation=0, step=3)


def test_a_worker_whose_parameters_differ_gets_the_state_again_where_others_can_go_on_without_it() -> None:
    notices: list[str] = []
    made, behind = accounting(None, notices)
    made.on_applied(0, applied())
    made.on_applied(1, applied())
    assert behind == {1} and notices == ["w1: parameters differ; it gets the state again"]


def test_a_group_whose_members_differ_ends_since_it_cannot_take_a_step_without_one() -> None:
    made, behind = accounting(ParallelSpec(), [])
    made.on_applied(0, applied())
    with pytest.raises(TrainingError, match=r"w1: parameters differ\. .* all steps from there on go wrong"):
        made.on_applied(1, applied())
    assert not behind
