"""What a callback saves, keeps and stops at is the step that it was called for, however far ahead batches were sent."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from guava_nb.cluster.cluster import Cluster
from guava_nb.protocol.messages import Factory
from guava_nb.spec.run_spec import _looks_at_steps
from guava_nb.training import checkpoint
from guava_nb.training.job import TrainingJob
from guava_nb.training.plan import Callback
from tests.support.direct import DirectWorker, make_cluster
from tests.support.training import difference, job_for, loader, plain, plan_for, replica, spec


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = make_cluster()
    yield made
    made.close()


def run_spec(site: str = "workers") -> Any:
    return spec(optimizer=Factory("SGD", {"lr": 0.1, "momentum": 0.9}), optimizer_site=site, lockstep=True)


class Looking:
    """Keeps and saves the state at some steps; stops at one of them."""

    def __init__(self, folder: Path, steps: tuple[int, ...], stop_at: int = 0, by_call: bool = False) -> None:
        self.folder, self.steps, self.stop_at, self.by_call = folder, steps, stop_at, by_call
        self.job: TrainingJob | None = None
        self.kept: dict[int, torch.nn.Module] = {}

    def on_step(self, run: Any, record: dict[str, Any]) -> bool:
        step = record["step"]
        assert self.job is not None
        if step in self.steps:
            job = self.job
            job.with_state(lambda: job.save(self.folder / f"{step}.pt"))
            job.with_state(lambda: self.kept.update({step: copy.deepcopy(job.replica_set.master.model)}))
        if self.by_call and step == self.stop_at:
            assert run.stop() is False
        return step == self.stop_at and not self.by_call


def train(cluster: Cluster, workers: int, looking: Looking, site: str = "workers") -> TrainingJob:
    for k in range(workers):
        DirectWorker(cluster, f"w{k}").start()
    cluster.wait_for(workers, 10)
    # All batches fit into what may be sent ahead.
    job = looking.job = job_for(
        cluster, run_spec(site), plan_for(loader(640, 16), 2, prefetch_steps=40, callbacks=[looking])
    )
    job.start()
    assert job.run.wait(60), job.run
    job.run.result()
    assert (job.run.lost_samples, job.run.duplicated_samples) == (0, 0)
    return job


@pytest.mark.parametrize("site", ["workers", "orchestrator"])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_callback_saves_the_step_that_it_was_called_for(
    cluster: Cluster, workers: int, site: str, tmp_path: Path
) -> None:
    looking = Looking(tmp_path, (5, 6, 47))
    job = train(cluster, workers, looking, site)
    assert len(job.run.history) == 80
    for step in looking.steps:
        expected, _ = plain(run_spec(site), loader(640, 16), 2, limit=step)
        content = checkpoint.read(tmp_path / f"{step}.pt")
        made = replica(run_spec(site))
        made.load_state({"model": content["model"], "optimizer": content["optimizer"]})
        assert difference(made.model, expected) <= 1e-9
        assert difference(looking.kept[step], expected) <= 1e-9
        assert content["step"] == step - 1
        assert (content["position"]["epoch"], content["position"]["batches"]) == divmod(step, 40)
    expected, _ = plain(run_spec(site), loader(640, 16), 2)
    assert difference(job.run.model(), expected) <= 1e-9


@pytest.mark.parametrize("by_call", [False, True])
@pytest.mark.parametrize("workers", [1, 2])
def test_the_step_at_which_a_callback_stops_is_the_last_one(
    cluster: Cluster, workers: int, by_call: bool, tmp_path: Path
) -> None:
    looking = Looking(tmp_path, (7,), stop_at=7, by_call=by_call)
    job = train(cluster, workers, looking)
    assert job.run.state == "stopped"
    assert (len(job.run.history), job.replica_set.step) == (7, 6)
    expected, _ = plain(run_spec(), loader(640, 16), 2, limit=7)
    assert difference(job.run.model(), expected) <= 1e-9
    assert difference(looking.kept[7], expected) <= 1e-9


def test_only_what_looks_at_steps_makes_a_lone_worker_wait() -> None:
    class Epochs(Callback):
        def on_epoch(self, run: Any, record: dict[str, Any]) -> None:
            pass

    assert [_looks_at_steps(one) for one in (Epochs(), Callback(), object(), Looking(Path(), ()))] == [
        False, False, False, True,
    ]  # fmt: skip
