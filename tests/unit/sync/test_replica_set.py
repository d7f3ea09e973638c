"""A replica set believes an answer only if it asked that worker, and waits for the answer now."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from guava_nb.cluster.payload_bounds import PayloadBounds
from guava_nb.cluster.roster import Roster
from guava_nb.data.codec import pack
from guava_nb.errors import RemoteProtocolError, TrainingError
from guava_nb.protocol.messages import (
    Failure,
    FailureKind,
    ParallelSpec,
    Prepared,
    State,
    StateLoaded,
    StepApplied,
    Tree,
)
from guava_nb.sync.group_replica_set import GroupReplicaSet, outcome_without
from guava_nb.sync.replica_set import GroupLost, ReplicaSet
from tests.support.explorer.orchestrator import replica_set_for, spec_for

NOTHING = memoryview(b"")


@pytest.fixture
def replicas() -> ReplicaSet:
    return replica_set_for(spec_for("star", "workers", 2), 4, 1, None)


@pytest.fixture
def job() -> Iterator[Any]:
    sent: list[Any] = []
    cluster = SimpleNamespace(roster=Roster(), send_all=lambda ranks, message, buffers=(): sent.append(message))
    yield SimpleNamespace(cluster=cluster, ready={0, 1}, suspects=set(), leaving=set(), sent=sent)


def test_an_answer_to_an_earlier_order_to_build_is_none_to_this_one(replicas: ReplicaSet) -> None:
    replicas._building[0] = 5
    replicas._on_prepared(0, Prepared(run_id="run", ok=True, generation=4), NOTHING)
    replicas._on_prepared(1, Prepared(run_id="run", ok=True, generation=5), NOTHING)
    assert replicas.prepared() == set()
    replicas._on_prepared(0, Prepared(run_id="run", ok=True, generation=5), NOTHING)
    assert replicas.prepared() == {0}


@pytest.mark.parametrize(("generation", "counts"), [(4, False), (5, True), (6, False)])
def test_a_report_counts_against_the_group_that_it_is_about(job: Any, generation: int, counts: bool) -> None:
    replicas = replica_set_for(spec_for("group", "workers", 2), 4, 1, None)
    assert isinstance(replicas, GroupReplicaSet)
    replicas.team, replicas.generation, job.cluster.name = (0, 1), 5, "w{}".format
    replicas.note_break(job, 0, Failure(
        run_id="run", kind=FailureKind.GROUP, type_name="E", text="a member is gone", traceback="", generation=generation
    ))  # fmt: skip
    assert bool(replicas._broken) is counts


def test_what_others_report_of_a_group_that_lost_a_member_is_no_break_of_its_own(job: Any) -> None:
    """Three losses in a row were taken for three groups that broke while all workers stayed, which ends the run."""
    replicas = replica_set_for(spec_for("group", "workers", 2), 4, 1, None)
    assert isinstance(replicas, GroupReplicaSet)
    job.cluster.name, job.cluster.roster = "w{}".format, SimpleNamespace(members=[SimpleNamespace(detail="gone")] * 2)
    job.cluster.silence_s, job.cluster.seats = 15.0, SimpleNamespace(silent_s=lambda rank: 0.0)
    replicas._relay = SimpleNamespace(forget=lambda name: None)  # type: ignore[assignment]
    for generation in range(5):
        replicas.team, replicas.generation, replicas._retired, job.ready = (0, 1), generation, False, {0}
        with pytest.raises(GroupLost, match="w1 was lost"):
            replicas.check(job)
        replicas.note_break(job, 0, Failure(
            run_id="run", kind=FailureKind.GROUP, type_name="E", text="woken", traceback="", generation=generation
        ))  # fmt: skip
        replicas.disband()


def test_a_silent_member_of_a_group_is_given_up_where_others_can_take_its_place(job: Any) -> None:
    replicas = replica_set_for(spec_for("group", "workers", 2), 4, 1, None)
    assert isinstance(replicas, GroupReplicaSet)
    spared: list[int] = []
    job.cluster.name, job.spare = "w{}".format, lambda rank, sentence, since_s: spared.append(rank)
    job.cluster.silence_s, job.cluster.seats = 15.0, SimpleNamespace(silent_s=lambda rank: 20.0 * (rank == 1))
    replicas.team, replicas.least, job.ready = (0, 1), 2, {0, 1}
    replicas.check(job)
    assert spared == [], "no other is here: it is waited for"
    job.ready = {0, 1, 2}
    with pytest.raises(GroupLost, match="w1 has said nothing for 15 s"):
        replicas.check(job)
    assert spared == [1]


def test_a_mesh_takes_in_whole_replicas_up_to_its_size(job: Any) -> None:
    replicas = replica_set_for(spec_for("group", "workers", 2), 4, 1, None)
    assert isinstance(replicas, GroupReplicaSet)
    replicas._shape, replicas._span, replicas.elastic = ParallelSpec(mode="hybrid", dp=3, tp=2), 2, False
    replicas.team, replicas.least = (0, 1), 2
    assert replicas.pick({0, 1, 5}) == {0, 1} and replicas.pick(range(9)) == set(range(6))
    assert replicas.newcomers(set(), {0, 1, 4}) == [] and replicas.newcomers(set(), {0, 1, 4, 5, 6}) == [4, 5]
    assert replicas.newcomers(set(), set(range(9))) == [2, 3, 4, 5]
    replicas.team = tuple(range(6))
    assert replicas.newcomers(set(), set(range(9))) == [], "the mesh is whole"
    assert replicas._holders_with(3) == (2, 3), "each replica holds the whole state"


def test_who_waits_for_a_member_of_a_group_is_told_what_its_end_would_come_to(job: Any) -> None:
    replicas = replica_set_for(spec_for("group", "workers", 2), 4, 1, None)
    assert isinstance(replicas, GroupReplicaSet)
    replicas._shape, replicas._span, replicas.elastic = ParallelSpec(mode="hybrid", dp=2, tp=2), 2, False
    replicas.team, replicas.least, job.ready = (0, 1, 2, 3), 2, {0, 1, 2, 3}
    assert outcome_without(replicas, job, 1) == "the others then go on with 1 of 2 replicas"
    job.ready = {0, 1, 2, 3, 4}
    assert outcome_without(replicas, job, 1) == "the others then go on with another worker in its place"
    assert outcome_without(replicas, job, 4) == "", "it is no member"
    replicas.least, job.ready = 4, {0, 1, 2, 3}  # with ZeRO
    assert outcome_without(replicas, job, 1) == "the run then waits for a worker to join, and goes on by itself"


def test_what_a_worker_built_before_fails_for_itself(replicas: ReplicaSet) -> None:
    replicas._building[0] = 5
    job: Any = SimpleNamespace(
        cluster=SimpleNamespace(bounds=PayloadBounds(), caches=None, notice=None), on=lambda *rest: None
    )
    with mock.patch("guava_nb.sync.replica_set.RowWriter"):
        replicas.attach(job)
    assert [job.was_asked(0, generation) for generation in (4, 5, 6)] == [False, True, False]
    assert not job.was_asked(1, 5)


def test_a_state_that_is_loaded_when_nothing_waits_for_it_puts_no_worker_in_step(
    replicas: ReplicaSet, job: Any
) -> None:
    with replicas._sending_state(job, [0, 1], 7, {"value": 0, "step": -1}, -1):
        replicas._on_loaded(0, StateLoaded("run", -1, "", "cpu", 7), NOTHING)
        replicas._on_loaded(1, StateLoaded("run", -1, "", "cpu", 6), NOTHING)
    replicas._on_loaded(1, StateLoaded("run", -1, "", "cpu", 7), NOTHING)
    assert replicas.at == {0: -1}


def test_after_going_back_no_worker_holds_the_state(replicas: ReplicaSet) -> None:
    replicas.step, replicas.at = 5, {0: 5, 1: 3}
    replicas.go_back(3)
    assert replicas.step == 3 and replicas.at == {}


@pytest.mark.parametrize("step", [1, 3, 10**9])
def test_a_commit_that_a_worker_cannot_have_made_is_no_news(replicas: ReplicaSet, step: int) -> None:
    replicas.step, replicas.at = 2, {0: 2}
    replicas.note_commit(0, StepApplied(run_id="run", generation=0, step=step))
    replicas.note_commit(1, StepApplied(run_id="run", generation=0, step=2))
    assert replicas.at == {0: 2}


def test_only_the_worker_that_was_sent_a_step_alone_may_be_ahead_and_only_so_far(replicas: ReplicaSet) -> None:
    replicas.step, replicas.at = 2, {0: 2, 1: 2}
    replicas.sent((0,), 4, is_applied_first=True)
    for rank, step in ((0, 4), (1, 3)):
        replicas.note_commit(rank, StepApplied(run_id="run", generation=0, step=step))
    assert replicas.at == {0: 4, 1: 2}


def test_a_step_is_undone_by_the_worker_that_was_asked_to_and_once(replicas: ReplicaSet, job: Any) -> None:
    replicas.step, replicas.at = 2, {0: 2, 1: 1, 2: 2}
    replicas.sent((0, 1, 2), 2, is_applied_first=False)
    replicas.abort(job, [0, 1], "step 3 could not be applied everywhere", last=1)
    undone = StepApplied(run_id="run", generation=job.cluster.roster.generation, step=1)
    assert (job.sent[-1].last_committed, job.sent[-1].generation) == (1, undone.generation)
    assert not replicas.has_settled(0) and not replicas.has_settled(1)
    for rank in (0, 1, 2):
        replicas.note_commit(rank, undone)
    assert replicas.at == {0: 1, 1: 1, 2: 2} and replicas.has_settled(0) and replicas.has_settled(1)
    replicas.note_commit(0, StepApplied(run_id="run", generation=undone.generation, step=2))
    replicas.note_commit(0, undone)  # doubled
    assert replicas.at[0] == 2


def test_a_worker_that_cannot_undo_its_step_has_answered_all_the_same(replicas: ReplicaSet, job: Any) -> None:
    replicas.step, replicas.at = 2, {0: 2}
    replicas.abort(job, [0], "step 3 could not be applied everywhere", last=1)
    replicas.note_commit(0, StepApplied(run_id="run", generation=job.cluster.roster.generation, step=2))
    assert replicas.at == {0: 2} and replicas.has_settled(0)


def test_a_worker_with_the_step_that_was_taken_back_holds_nothing_of_the_run(replicas: ReplicaSet) -> None:
    replicas.step, replicas.at = 2, {0: 2, 1: 1}
    replicas.take_back(1)
    assert replicas.step == 1 and replicas.at == {1: 1}


def test_reports_that_came_while_no_job_listened_are_asked_for_again(replicas: ReplicaSet, job: Any) -> None:
    handlers: dict[Any, Any] = {}
    job.trains, job.on, job.cluster.caches, job.cluster.notice = False, handlers.__setitem__, {}, print
    job.cluster.bounds = PayloadBounds()
    replicas.attach(job)
    replicas.step, replicas.at = 2, {0: 1}
    replicas.sent((0,), 2, is_applied_first=False)

    def pump(until: Any, timeout_s: float | None) -> bool:
        handlers[StepApplied](0, StepApplied(run_id="run", generation=job.sent[-1].generation, step=2), NOTHING)
        assert until()
        raise StopIteration  # the state itself comes next

    job.pump = pump
    job.cluster.send = lambda *message: None
    with pytest.raises(StopIteration):
        replicas.fetch(job, timeout_s=1.0)
    assert job.sent[-1].last_committed == 2 and replicas.at == {0: 2}


def test_a_state_is_taken_only_of_the_worker_that_was_asked(replicas: ReplicaSet) -> None:
    tree, buffers = pack({"value": 1, "step": -1})
    payload = memoryview(bytearray(b"".join(buffers)))
    replicas._awaited = {1: 0}
    replicas._on_state(1, State(1, "run", -1, tree), payload)
    replicas._on_state(0, State(1, "run", 10**9, tree), payload)
    assert replicas._states == {}
    replicas._on_state(0, State(1, "run", -1, tree), payload)
    assert list(replicas._states) == [1]


def test_a_worker_that_is_lost_while_parts_are_prepared_is_a_reason_to_wait_and_none_to_fail(job: Any) -> None:
    parts = replica_set_for(spec_for("parts", "workers", 2), 4, 1, None)
    with pytest.raises(GroupLost, match="while it prepared the run"):
        parts.load(job, [0], {}, -1)


def test_a_step_that_a_worker_was_not_sent_is_none_that_it_applied(replicas: ReplicaSet) -> None:
    replicas.step, replicas.at = 5, {0: 3, 1: 5}
    replicas.sent((1,), 5, is_applied_first=False)
    replicas.note_commit(0, StepApplied(run_id="run", generation=0, step=5))
    assert replicas.at == {0: 3, 1: 5}
    replicas.sent((0,), 5, is_applied_first=False)
    replicas.note_commit(0, StepApplied(run_id="run", generation=0, step=5))
    assert replicas.at == {0: 5, 1: 5}


def test_a_state_of_another_step_than_was_sent_is_not_loaded(replicas: ReplicaSet, job: Any) -> None:
    with replicas._sending_state(job, [0], 7, {"value": 0, "step": 4}, 4):
        replicas._on_loaded(0, StateLoaded("run", 10**9, "", "cpu", 7), NOTHING)
        assert replicas.at == {}
        replicas._on_loaded(0, StateLoaded("run", 4, "", "cpu", 7), NOTHING)
    assert replicas.at == {0: 4}


@pytest.mark.parametrize("tree", [Tree(b""), Tree(b"\xc1"), pack([1, 2])[0]], ids=["nothing", "damaged", "a list"])
def test_what_is_no_state_is_a_violation_of_its_sender(replicas: ReplicaSet, tree: Tree) -> None:
    replicas.step, replicas.at, replicas._awaited = 2, {0: 2}, {5: 0}
    with pytest.raises(RemoteProtocolError):
        replicas._on_state(0, State(5, "run", 2, tree), NOTHING)
    replicas._on_state(1, State(5, "run", 2, tree), NOTHING)  # it was not asked
    assert replicas._states == {}


def test_a_state_of_another_model_is_told_with_the_name_of_its_sender(replicas: ReplicaSet, job: Any) -> None:
    replicas.step, replicas.at, job.cluster.name = 2, {0: 2}, "w{}".format
    answers = mock.patch.object(replicas, "_answers", lambda *asked: [(2, {"no": "value"})])
    with answers, pytest.raises(TrainingError, match=r"state of step 3 from w0 cannot be taken \(KeyError: 'value'\)"):
        replicas._fetch_from(job, 0, None)


def test_a_worker_that_leaves_behind_the_last_step_is_not_waited_for(replicas: ReplicaSet, job: Any) -> None:
    replicas.step, replicas.at = 2, {0: 1, 1: 1}
    assert replicas._may_have(job)
    job.leaving = {0}
    assert replicas._may_have(job)
    job.leaving = {0, 1}
    assert not replicas._may_have(job)
    replicas.at[1] = 2
    assert replicas._may_have(job)


def test_steps_that_a_lone_worker_did_beyond_the_last_report_are_counted_before_the_run_stands_at_them(
    replicas: ReplicaSet, job: Any
) -> None:
    replicas.step, replicas.at, counted = 2, {0: 4}, []
    replicas.count_ahead = lambda step: counted.append((replicas.step, step))
    replicas.adopt_highest(job)
    replicas.adopt_highest(job)
    assert replicas.step == 4 and counted == [(2, 4)]


@pytest.mark.parametrize(("has", "sent"), [(0, [1, 2]), (1, [2]), (2, []), (3, None), (-1, None)])
def test_a_worker_that_comes_back_is_told_the_ticks_that_it_missed(
    replicas: ReplicaSet, job: Any, has: int, sent: list[int] | None
) -> None:
    """One that says it had more than there were holds nothing that is known here."""
    replicas.step, replicas.ticks, replicas._keep = 4, [0.5, 0.25], ("run", 4)
    replicas._sent[0] = 4
    replicas._building[0] = 7
    replicas._on_prepared(0, Prepared(run_id="run", ok=True, generation=7, holds=True, step=4, ticks=has), NOTHING)
    assert replicas.holds(0) is (sent is not None)
    if sent is not None:
        replicas._send_ticks(job.cluster, [0], has)
        assert [(message.number, message.metric) for message in job.sent] == [(n, [0.5, 0.25][n - 1]) for n in sent]


def test_a_run_does_not_go_on_without_the_only_worker_that_holds_its_state(replicas: ReplicaSet, job: Any) -> None:
    """A newcomer that has built the run waits for that state: to say that it does the work would be false."""
    replicas._prepared[1] = Prepared(run_id="run", ok=True, generation=1)
    assert replicas._spares(job, 0)  # neither holds a state: the run begins with the one that is ready
    replicas.at[0] = 5
    assert not replicas._spares(job, 0) and replicas._spares(job, 1)
    replicas.at[1] = 5
    assert replicas._spares(job, 0)


@pytest.mark.parametrize(("holder_is_back", "other_holds"), [(False, False), (True, False), (False, True)])
def test_a_state_is_waited_for_while_its_worker_is_away_and_no_other_has_it(
    replicas: ReplicaSet, job: Any, holder_is_back: bool, other_holds: bool
) -> None:
    """Asked anew, it would send the state anew, from the beginning."""
    replicas.step, replicas.at = 5, {0: 5, **({1: 5} if other_holds else {})}
    job.ready, job.suspects = ({0, 1}, set()) if holder_is_back else ({1}, {0})
    assert replicas._is_waited_for(job, 0) is not other_holds
    job.ready, job.suspects = {1}, set()
    assert not replicas._is_waited_for(job, 0)


@pytest.mark.parametrize(
    ("answer", "is_left"), [({"groups": [{"lr": 0.1}]}, True), ({"groups": []}, True), ({}, False)]
)
def test_an_answer_without_a_schedule_is_none_that_the_state_is_left_with(
    replicas: ReplicaSet, job: Any, answer: dict[str, Any], is_left: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas, "givers", lambda job: [0])
    monkeypatch.setattr(replicas, "_answers", lambda *args, **options: [(replicas.step, answer)])
    assert replicas.leave(job) is is_left
    assert replicas.schedule == (answer if answer.get("groups") else None)
