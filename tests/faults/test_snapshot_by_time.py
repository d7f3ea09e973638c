"""Snapshots by time: a lone worker that vanishes costs the work since the last one, which came while steps went on."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from guava_nb.cluster.cluster import Cluster
from guava_nb.protocol.messages import State, StepApplied
from guava_nb.training.saving import snapshots
from tests.support.direct import DirectWorker, make_cluster
from tests.support.training import difference, job_for, loader, plain, plan_for, spec

STEPS = 26  # of one epoch


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def cluster(told: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setattr(snapshots, "FIRST_S", 0.0)
    monkeypatch.setattr(snapshots, "AT_ONCE_BYTES", 0)
    made = make_cluster()
    made.notice = told.append  # type: ignore[method-assign, assignment]
    yield made
    made.close()


class Vanishes:
    """A worker's end after so many messages of a type; a spare comes in its place."""

    def __init__(self, cluster: Cluster, record: type[Any], count: int) -> None:
        self.cluster, self.record, self.left, self.states = cluster, record, count, 0

    def __call__(self, worker: DirectWorker, message: Any) -> None:
        self.states += isinstance(message, State)
        self.left -= isinstance(message, self.record)
        if self.left == 0 and not worker.dead:
            worker.die()
            DirectWorker(self.cluster, "spare").start()


def lost(told: list[str]) -> tuple[int, int]:
    """How many steps were done again, and after which the run went on."""
    found = re.search(
        r"(\d+) steps?, (?:\d+ s|less than 1 s) of work, are lost with the workers that had them and are done again: "
        r"the run goes on from the state after step (\d+)", " ".join(told),
    )  # fmt: skip
    assert found is not None, told
    return int(found[1]), int(found[2])


def trained(cluster: Cluster, hook: Vanishes) -> Any:
    DirectWorker(cluster, "w0", hook).start()
    cluster.wait_for(1, 10)
    job = job_for(cluster, spec(), plan_for(loader(batch_size=4), 1))
    job.start()
    assert job.run.wait(60) and job.run.state == "done", job.run.error
    expected, _ = plain(spec(), loader(batch_size=4), 1)
    assert difference(job.run.model(), expected) <= 1e-9
    assert (len(job.run.history), job.run.lost_samples, job.run.duplicated_samples) == (STEPS, 0, 0)
    return job


def test_within_an_epoch_the_run_goes_back_to_the_newest_that_came(
    cluster: Cluster, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "period_s", lambda *costs: 0.0)
    hook = Vanishes(cluster, StepApplied, 20)
    trained(cluster, hook)
    steps, after = lost(told)
    assert hook.states >= 2 and after >= 2 and 18 <= steps + after <= 21


def test_the_second_waits_for_its_period(cluster: Cluster, told: list[str]) -> None:
    hook = Vanishes(cluster, StepApplied, 20)
    trained(cluster, hook)  # in far less than the ten seconds between two
    assert hook.states == 1 and lost(told)[1] <= 2


def test_one_whose_worker_vanishes_while_it_is_on_its_way_is_none(
    cluster: Cluster, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "period_s", lambda *costs: 0.0)
    hook = Vanishes(cluster, State, 2)
    trained(cluster, hook)
    assert hook.states == 2 and lost(told)[1] <= STEPS - 2


def test_what_would_be_lost_now_is_in_the_status_and_none_is_where_two_workers_have_it(cluster: Cluster) -> None:
    seen: list[tuple[int | None, float | None]] = []

    class Look:
        def on_step(self, run: Any, record: dict[str, Any]) -> None:
            status = run.status()
            seen.append((status.at_risk_steps, status.at_risk_s))

    for workers in (1, 2):
        DirectWorker(cluster, f"w{workers}").start()
        cluster.wait_for(workers, 10)
        job = job_for(
            cluster, spec(), plan_for(loader(), 1, callbacks=[Look()], snapshot_every_steps=0), f"run-{workers}"
        )
        job.start()
        assert job.run.wait(60) and job.run.state == "done"
        assert job.run.status().at_risk_steps is None
    assert [steps for steps, _ in seen] == [1, 2, 3, 4, None, None, None, None]
    assert all(seconds is not None and seconds > 0 for _, seconds in seen[:4])
