"""A line that breaks for a moment costs a round nothing: no other worker does its part, and its worker misses no round."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import DataLoader, Dataset

from guava_nb.cluster.cluster import Cluster
from guava_nb.protocol.messages import BatchShard, LoadState, Message, RoundSpec, ShardReport, StepApplied
from guava_nb.training import step_window
from guava_nb.training.run import Run
from tests.support.direct import DirectWorker, make_cluster
from tests.support.training import dataset, difference, job_for, losses_of, plan_for, spec

WITH_STATE = spec(rounds=RoundSpec("average", 1.0, 0.0, sync_delay=1))  # AdamW
ROUNDS = 6


class Gated(Dataset[Any]):
    """Rows, those from round 3 on when the gate is open."""

    def __init__(self, gate: threading.Event) -> None:
        self.rows, self.gate = dataset(48 * ROUNDS), gate

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        assert index < 3 * 48 or self.gate.wait(20)
        return self.rows[index]


class Watched:
    """A session of two workers; `at` says with which message of round 2 the line of the second one breaks."""

    def __init__(self, at: type[Message] | None = None, returns: bool = True) -> None:
        self.cluster: Cluster = make_cluster()
        self.told: list[str] = []
        self.cluster.notice = self.told.append  # type: ignore[method-assign, assignment]
        self.came: dict[str, list[Message]] = {"w0": [], "w1": []}
        self.is_back, self.at, self.returns = threading.Event(), at, returns
        # The first worker is not through with a round before the line is back, or never waits.
        self.holds_from = {ShardReport: 2, StepApplied: 3}.get(at, ROUNDS) if returns else ROUNDS  # type: ignore[call-overload]
        self.gate = threading.Event()
        if at is not StepApplied:
            self.gate.set()
        for name in self.came:
            self._start(name)
        self.cluster.wait_for(2, 10)

    def _start(self, name: str) -> None:
        worker = DirectWorker(self.cluster, name, self._said)
        take = worker.take

        def taken(message: Message, payload: memoryview) -> None:
            self.came[name].append(message)
            take(message, payload)

        worker.take = taken  # type: ignore[method-assign]
        worker.start()

    def _said(self, worker: DirectWorker, message: Any) -> None:
        if self.at is None or getattr(message, "step", -1) < 2 or self.is_back.is_set():
            return
        if worker.name == "w1" and isinstance(message, self.at) and not worker.away:
            worker.go_away()
            threading.Timer(0.1, self.gate.set).start()
            if self.returns:
                threading.Timer(0.4, lambda: (worker.come_back(), self.is_back.set())).start()
        elif worker.name == "w0" and isinstance(message, ShardReport) and message.step >= self.holds_from:
            assert self.is_back.wait(20)

    def train(self) -> Run:
        job = job_for(self.cluster, WITH_STATE, plan_for(DataLoader(Gated(self.gate), 16), 1, sync_every=3))
        job.start()
        assert job.run.wait(60) and job.run.state == "done", job.run.error
        assert (len(job.run.history), job.run.lost_samples, job.run.duplicated_samples) == (ROUNDS, 0, 0)
        return job.run

    def shards_of_round(self, name: str) -> list[int]:
        return [one.shard for one in self.came[name] if isinstance(one, BatchShard) and one.step == 2]


@pytest.fixture(scope="module")
def undisturbed() -> Iterator[Run]:
    watched = Watched()
    yield watched.train()
    watched.cluster.close()


def assert_as(run: Run, undisturbed: Run) -> None:
    assert difference(run.model(), undisturbed.model()) == 0.0
    assert list(losses_of(run)) == list(losses_of(undisturbed))


def test_no_other_worker_does_the_part_of_one_that_is_back_before_it_is_through(undisturbed: Run) -> None:
    watched = Watched(ShardReport)
    assert_as(watched.train(), undisturbed)
    assert watched.shards_of_round("w0") == [0]
    watched.cluster.close()


def test_the_next_round_waits_for_a_worker_whose_line_broke_and_nothing_of_its_own_is_lost(undisturbed: Run) -> None:
    watched = Watched(StepApplied)
    assert_as(watched.train(), undisturbed)
    loaded = sum(isinstance(one, LoadState) for one in watched.came["w1"])
    assert loaded == 1 and not any("what only it had" in text for text in watched.told)
    watched.cluster.close()


def test_one_that_does_not_come_back_is_given_up_when_the_others_are_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_window, "BACK_S", 0.0)
    watched = Watched(ShardReport, returns=False)
    watched.train()
    assert watched.shards_of_round("w0") == [0, 1]
    watched.cluster.close()
