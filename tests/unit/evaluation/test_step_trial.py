"""Steps that workers play before a run: on real workers without a network."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from guava_nb.cluster.cluster import Cluster
from guava_nb.data.loader_feed import LoadedBatch
from guava_nb.data.split import RowSplitter
from guava_nb.evaluation.step_trial import play_steps
from guava_nb.protocol.messages import Factory, RunSpec, StepApplied
from guava_nb.sync.whole_replica_set import WholeReplicaSet
from tests.support.direct import DirectWorker, make_cluster, once_after
from tests.support.training import SmallNet, job_for, loader, plan_for, replica, spec


class FailsOnFew(SmallNet):
    """Raises where a share has 7 rows, as that of the second worker of two that share 15 has."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) == 7:
            raise ValueError("seven rows are too few")
        return super().forward(x)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = make_cluster()
    yield made
    made.close()


def play(cluster: Cluster, run_spec: RunSpec, rows: int, *hooks: Any) -> dict[int, float]:
    """Two workers play; `hooks` see what they send."""
    started = [DirectWorker(cluster, f"w{k}", *hooks[k : k + 1]).start() for k in range(2)]
    cluster.wait_for(2, 10)
    x, y = loader(rows, rows).dataset[:]
    batch = LoadedBatch(0, (x, y), tuple(range(rows)), rows)
    found = play_steps(cluster, WholeReplicaSet("trial-1", run_spec, (), replica(run_spec)), batch, RowSplitter())
    assert [worker.error for worker in started] == [None, None]
    return found


@pytest.mark.parametrize("rows", [15, 1])
def test_each_worker_plays_its_part_and_a_run_begins_as_if_nothing_was(cluster: Cluster, rows: int) -> None:
    found = play(cluster, spec(), rows)
    assert set(found) == {0, 1} and all(0 < seconds < 10 for seconds in found.values())
    assert [member.samples for member in cluster.members()] == [0, 0]
    job = job_for(cluster, spec(), plan_for(loader(64)))
    job.start()
    assert job.run.wait(60) and len(job.run.result().history) == 4


def test_a_worker_whose_connections_break_meanwhile_comes_back_with_its_seconds(cluster: Cluster) -> None:
    def cut(worker: DirectWorker) -> None:
        worker.go_away()
        threading.Timer(0.3, worker.come_back).start()

    hook = once_after(1, StepApplied, cut)
    assert set(play(cluster, spec(), 15, lambda worker, message: None, hook)) == {0, 1} and hook.fired


def test_a_worker_whose_step_fails_is_left_out(cluster: Cluster) -> None:
    found = play(cluster, spec(model=Factory(f"{__name__}:FailsOnFew")), 15)
    assert set(found) == {0}
