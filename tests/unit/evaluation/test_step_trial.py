"""Steps that workers play before a run: on real workers without a network."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from guava_nb.cluster.cluster import Cluster
from guava_nb.data.loader_feed import LoadedBatch
from guava_nb.data.split import RowSplitter
from guava_nb.evaluation.step_trial import play_steps
from guava_nb.protocol.messages import Factory, RunSpec
from guava_nb.sync.whole_replica_set import WholeReplicaSet
from tests.support.direct import DirectWorker, make_cluster
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


def play(cluster: Cluster, run_spec: RunSpec, rows: int, workers: int = 2) -> dict[int, float]:
    started = [DirectWorker(cluster, f"w{k}").start() for k in range(workers)]
    cluster.wait_for(workers, 10)
    x, y = loader(rows, rows).dataset[:]
    batch = LoadedBatch(0, (x, y), tuple(range(rows)), rows)
    found = play_steps(cluster, WholeReplicaSet("trial-1", run_spec, (), replica(run_spec)), batch, RowSplitter())
    assert [worker.error for worker in started] == [None] * workers
    return found


@pytest.mark.parametrize("rows", [15, 1])
def test_each_worker_plays_its_part_and_a_run_begins_as_if_nothing_was(cluster: Cluster, rows: int) -> None:
    found = play(cluster, spec(), rows)
    assert set(found) == {0, 1} and all(0 < seconds < 10 for seconds in found.values())
    assert [member.samples for member in cluster.members()] == [0, 0]
    job = job_for(cluster, spec(), plan_for(loader(64)))
    job.start()
    assert job.run.wait(60) and len(job.run.result().history) == 4


def test_a_worker_whose_step_fails_is_left_out(cluster: Cluster) -> None:
    found = play(cluster, spec(model=Factory(f"{__name__}:FailsOnFew")), 15)
    assert set(found) == {0}
