"""Rounds that are begun while the sum of the one before travels: losses, joins, stops and validations at exact places."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from guava_nb.cluster.cluster import Cluster
from guava_nb.data.loader_feed import LoaderFeed
from guava_nb.errors import NotFinite
from guava_nb.protocol.messages import Factory, GradientBucket, Message, RoundSpec, ShardReport, StepApplied
from guava_nb.training import step_window
from guava_nb.training.plan import TrainingPlan
from guava_nb.training.run import Run
from tests.faults.test_star_faults import finish, start
from tests.parity.test_forecast import Session
from tests.support.direct import DirectWorker, make_cluster
from tests.support.training import by_hand, dataset, difference, job_for, loader, losses_of, plan_for, spec

EVERY, PER_EPOCH = 3, 3  # seven batches: rounds of 3, 3 and 1 steps
SGD = Factory("SGD", {"lr": 0.1})
STEP_LR = Factory("StepLR", {"step_size": 3, "gamma": 0.5})
DELAYED = spec(
    rounds=RoundSpec("nesterov", 0.7, 0.9, sync_delay=2), optimizer=SGD, scheduler=STEP_LR, hash_every_steps=1
)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = make_cluster()
    yield made
    made.close()


class Overlap:
    """Two workers of which the second reports a round only when the first has begun the next one early.

    Attributes:
        begun: rounds that were begun early by the first.
        then: called by the second, when so many were.
    """

    def __init__(
        self, cluster: Cluster, then: Callable[[DirectWorker, int], None] = lambda worker, begun: None
    ) -> None:
        self.begun, self.then = 0, then
        self.workers = start(cluster, [None, self._hold])

    def _hold(self, worker: DirectWorker, message: Message) -> None:
        # The last round of an epoch has none after it that was sent.
        if isinstance(message, ShardReport) and message.step % PER_EPOCH != PER_EPOCH - 1 and not worker.dead:
            assert self.workers[0].early_rounds.acquire(timeout=30), f"round {message.step} had no early steps after it"
            self.begun += 1
            self.then(worker, self.begun)


def assert_by_hand(run: Run, epochs: int = 2, run_spec: Any = DELAYED) -> None:
    model, losses = by_hand(run_spec, loader(101, 16), 2, EVERY, epochs)
    assert losses_of(run) == pytest.approx(losses, abs=1e-12)
    assert difference(run.model(), model) <= 1e-9
    assert (run.lost_samples, run.duplicated_samples) == (0, 0)


@pytest.mark.parametrize("run_spec", [DELAYED, spec(rounds=RoundSpec("average", 1.0, 0.0, sync_delay=1, mixing=0.2))])
def test_rounds_that_are_begun_early_equal_loops_by_hand(cluster: Cluster, run_spec: Any) -> None:
    overlap = Overlap(cluster)
    job = job_for(cluster, run_spec, plan_for(loader(101, 16), 2, sync_every=EVERY))
    job.start()
    assert_by_hand(finish(job.run), 2, run_spec)
    assert overlap.begun == 4


def test_validations_and_checkpoints_between_rounds_change_no_number(cluster: Cluster, tmp_path: Path) -> None:
    start(cluster, [None, None])
    validation = LoaderFeed(loader(40, 16))
    plan = TrainingPlan(
        LoaderFeed(loader(101, 16)), validation, 2, sync_every=EVERY, val_interval=2, save_every_steps=5
    )
    plan.save_folder = tmp_path
    job = job_for(cluster, DELAYED, plan)
    job.start()
    run = finish(job.run)
    assert_by_hand(run)
    assert len(run.validations) >= 4 and list(tmp_path.glob("*.pt"))


@pytest.mark.parametrize("wire", ["fp32", "int8", "sparse"])
def test_a_worker_lost_while_the_other_is_ahead_costs_no_sample(cluster: Cluster, wire: str) -> None:
    told: list[str] = []
    cluster.notice = told.append  # type: ignore[method-assign, assignment]
    Overlap(
        cluster, lambda worker, begun: worker.die() if begun == 3 else None
    )  # before its report of the fourth round
    outer = RoundSpec("sparse", 1.0, 0.0, density=0.25) if wire == "sparse" else RoundSpec("nesterov", 0.7, 0.9)
    run_spec = spec(
        rounds=RoundSpec(outer.outer, outer.outer_lr, outer.outer_momentum, density=0.25, sync_delay=2),
        wire="fp32" if wire == "sparse" else wire, bucket_bytes=1 << 20, hash_every_steps=1,
    )  # fmt: skip
    job = job_for(cluster, run_spec, plan_for(loader(101, 16), 3, sync_every=EVERY))
    job.start()
    run = finish(job.run)
    assert len(run.history) == 9 and sum(record["samples"] for record in run.history) == 303
    assert (run.lost_samples, run.duplicated_samples) == (0, 0)
    lost = [text for text in told if "is lost, and what only it had" in text]
    assert len(lost) == 1 and "how far its own weights were from the common ones" in lost[0]


def test_what_is_lost_with_a_worker_that_is_away_when_the_run_ends_is_told(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process may have been killed a moment ago; the run ends before that is known."""
    monkeypatch.setattr(step_window, "BACK_S", 0.0)
    told: list[str] = []
    cluster.notice = told.append  # type: ignore[method-assign, assignment]
    overlap = Overlap(cluster, lambda worker, begun: worker.go_away() if begun == 3 else None)
    job = job_for(cluster, DELAYED, plan_for(loader(101, 16), 3, sync_every=EVERY))
    job.start()
    run = finish(job.run)
    assert sum(record["samples"] for record in run.history) == 303 and overlap.begun == 3
    lost = [text for text in told if "was away when the run ended, and what only it had" in text]
    assert len(lost) == 1 and "how far its own weights were from the common ones" in lost[0]


def test_the_survivor_does_the_lost_shard_from_where_its_own_round_began(cluster: Cluster) -> None:
    """With plain SGD a shard is the same at any worker whose round began alike, as the first one does everywhere."""
    Overlap(cluster, lambda worker, begun: worker.die())
    job = job_for(cluster, DELAYED, plan_for(loader(101, 16), 1, sync_every=EVERY))
    job.start()
    run = finish(job.run)
    model, losses = by_hand(DELAYED, loader(101, 16), 2, EVERY, 1)
    assert run.history[0]["loss"] == pytest.approx(losses[0], abs=1e-12)
    assert sum(record["samples"] for record in run.history) == 101
    assert (run.lost_samples, run.duplicated_samples) == (0, 0)


@pytest.mark.parametrize("kind", [GradientBucket, ShardReport, StepApplied])
def test_a_cut_connection_resumed_changes_nothing(cluster: Cluster, kind: type[Message]) -> None:
    seen = [0]

    def cut(worker: DirectWorker, message: Message) -> None:
        if isinstance(message, kind) and message.step == 1 and not seen[0]:
            seen[0] = 1
            worker.go_away()
            threading.Timer(0.1, worker.come_back).start()

    start(cluster, [None, cut])
    job = job_for(cluster, DELAYED, plan_for(loader(101, 16), 1, sync_every=EVERY))
    job.start()
    run = finish(job.run)
    assert seen[0] and len(run.history) == 3
    assert (run.lost_samples, run.duplicated_samples) == (0, 0)
    assert sum(record["samples"] for record in run.history) == 101


def test_two_runs_that_go_on_from_a_checkpoint_come_to_the_same(tmp_path: Path) -> None:
    """The checkpoint has the common weights, with which all workers begin then; no sample is lost or done twice."""
    cluster, told = make_cluster(), list[str]()
    cluster.notice = told.append  # type: ignore[method-assign, assignment]
    session = Session(cluster, 2)
    session.train(DELAYED, plan_for(loader(101, 16), 2, sync_every=EVERY, save_every_steps=3), tmp_path)
    saved = min(tmp_path.glob("*.pt"), key=lambda path: int(path.stem.rpartition("-")[2]))
    runs = [
        session.train(DELAYED, plan_for(loader(101, 16), 2, sync_every=EVERY), tmp_path, begin=saved) for _ in range(2)
    ]
    models = [run.model() for run in runs]
    cluster.close()
    assert difference(*models) == 0
    assert [(run.lost_samples, run.duplicated_samples) for run in runs] == [(0, 0)] * 2
    assert runs[0].history[-1]["step"] == 3 + 14  # those of the checkpoint, and two epochs
    assert "takes 2 steps of the next one with its own weights" in told[0]


def test_nan_in_early_steps_is_told_in_the_rounds_turn_and_the_one_before_counts(cluster: Cluster) -> None:
    data = dataset(96)
    data.tensors[0][50] = float("nan")
    from torch.utils.data import DataLoader, Subset

    overlap = Overlap(cluster)
    overlap.workers[0].early_rounds.release(9)  # the second waits for none: the fault is in the batches
    job = job_for(cluster, DELAYED, plan_for(DataLoader(data, batch_size=8), 1, sync_every=4))
    job.start()
    assert job.run.wait(30)
    with pytest.raises(NotFinite, match="at round 2"):
        job.run.result()
    assert [record["step"] for record in job.run.history] == [4]
    model, _ = by_hand(DELAYED, DataLoader(Subset(data, range(32)), batch_size=8), 2, 4, 1)
    assert difference(job.run.model(), model) <= 1e-9


def test_an_interrupt_stops_at_a_round_and_the_next_run_goes_on_from_the_same_weights(cluster: Cluster) -> None:
    start(cluster, [None, None])
    holder: list[Any] = []

    class Interrupt:
        def on_step(self, run: Run, record: dict[str, Any]) -> None:
            if record["round"] == 2:
                holder[0].interrupt()

    job = job_for(cluster, DELAYED, plan_for(loader(101, 16), sync_every=EVERY, callbacks=[Interrupt()]))
    holder.append(job)
    job.start()
    assert job.run.wait(30) and job.run.state == "stopped"
    assert (job.run.lost_samples, job.run.duplicated_samples) == (0, 0)
    stopped_at = len(job.run.history)
    model, losses = by_hand(DELAYED, loader(101, 16), 2, EVERY)
    assert stopped_at >= 2 and losses_of(job.run) == pytest.approx(losses[:stopped_at], abs=1e-12)
    again = job_for(cluster, DELAYED, plan_for(loader(101, 16), sync_every=EVERY), "run-2")
    again.start()
    assert_by_hand(finish(again.run))
