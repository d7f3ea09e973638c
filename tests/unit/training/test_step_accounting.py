from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from guava_nb.data.loader_feed import LoadedBatch
from guava_nb.errors import TrainingError
from guava_nb.protocol.messages import Factory, ParallelSpec, StepApplied
from guava_nb.training.plan import Position
from guava_nb.training.step_accounting import SampleLedger, StepAccounting


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


@pytest.mark.parametrize(
    ("count", "shards", "is_told"),
    [
        (8.0, 2, False),
        (5.0, 2, False),
        (1.25, 2, True),
        (2.0, 2, True),
        (0.5, 1, True),
        (3.5, 1, True),
        (0.0, 2, False),
        (1 / 3 + 1 / 3 + 1 / 3, 3, False),  # what (loss, None) comes to
        (0.1 + 0.2 + 0.7, 3, False),
    ],
)
def test_a_count_that_may_be_an_accuracy_is_told_once(count: float, shards: int, is_told: bool) -> None:
    notices: list[str] = []
    made, _ = accounting(None, notices)
    made._told_count = False
    made._replica_set.spec.criterion = None if shards > 1 else Factory("own_loss")  # type: ignore[misc]
    flight: Any = SimpleNamespace(machine=SimpleNamespace(step=0, rows=8, tasks=[None] * shards))
    for _ in range(2):
        made._tell_odd_count(flight, 3.0, count)
    assert [("read as (sum of losses, count)" in text) for text in notices] == [True] * is_told
    made._told_count, made._replica_set.spec.criterion = False, Factory("CrossEntropyLoss")  # type: ignore[misc]
    made._tell_odd_count(flight, 3.0, 1.25)  # with weights of classes that is right
    assert len(notices) == is_told


def test_batches_of_a_step_that_count_unlike_are_told_once() -> None:
    notices: list[str] = []
    made, _ = accounting(None, notices)
    made._told_accumulated, made._ledger = False, SampleLedger()
    made.position = Position()
    made._plan = SimpleNamespace(accumulation_steps=2, note_place=None, feed=None)  # type: ignore[assignment]
    alike, short = ([LoadedBatch(k, None, (), rows) for k, rows in enumerate(sizes)] for sizes in ((4, 4), (4, 2)))
    made.draw(0, alike, 0)
    assert not notices
    for group in (short, alike[:1]):
        made.draw(0, group, 1)
    (text,) = notices
    assert text.startswith(
        "accumulation_steps=2: a step has batches of 4 and 2 samples and is as one batch of all of them"
    )
