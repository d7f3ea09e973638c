"""What a message weighs before the run: as much as the record that is sent, whichever fields it has."""

from __future__ import annotations

import pytest

from guava_nb.data.loader_feed import LoaderFeed
from guava_nb.forecast.run_facts import RunFacts, peeked
from guava_nb.protocol.framing import message_bytes
from guava_nb.protocol.messages import Message, ShardReport, StepApplied
from guava_nb.training.initial_state import build_replicas
from guava_nb.training.plan import TrainingPlan
from tests.support.training import loader, spec


class LongerReport(ShardReport, frozen=True, kw_only=True):
    """A report to which the protocol has added a field."""

    waited_s: float


class StrangeReport(Message, frozen=True):
    """A record with a field of a type that nothing is known of."""

    run_id: str
    frames: tuple[complex, ...]


@pytest.fixture
def run() -> RunFacts:
    plan = TrainingPlan(LoaderFeed(loader()), None, 1)
    replica_set = build_replicas("run-1", spec(), (), None, None)
    return RunFacts(replica_set, plan, spec(), 2, str, peeked(plan.feed, 1))


def test_a_record_weighs_what_the_one_that_is_sent_weighs(run: RunFacts) -> None:
    sent = ShardReport(
        run_id="run-1", generation=1, step=1007, shard=1, loss_sum=12.25, count=16.0, finite=True, rows=16, forward_s=0.5,
        backward_s=1.0, wait_s=0.25,
    )  # fmt: skip
    assert run.back(ShardReport).in_bytes == pytest.approx(message_bytes(sent, 0), abs=4)
    assert run.back(StepApplied, ready=run.typical(ShardReport)).in_bytes > run.back(ShardReport).in_bytes


def test_a_field_that_the_protocol_adds_is_weighed_and_one_of_a_strange_type_is_refused(run: RunFacts) -> None:
    assert run.typical(LongerReport, nonfinite="first.weight").nonfinite == "first.weight"
    assert run.typical(LongerReport).waited_s > 0
    with pytest.raises(KeyError, match="complex"):
        run.typical(StrangeReport)
