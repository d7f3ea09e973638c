"""100 steps are 50, a checkpoint, and 50 more, bit for bit: dropout, loader processes, precisions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from guava_nb.cluster.cluster import Cluster
from guava_nb.protocol.messages import Factory
from guava_nb.training import checkpoint
from guava_nb.training.initial_state import from_checkpoint
from guava_nb.training.job import TrainingJob
from tests.support.direct import DirectWorker, make_cluster
from tests.support.training import dataset, job_for, plan_for, spec


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    made = make_cluster()
    DirectWorker(made, "w0").start()
    made.wait_for(1, 10)
    yield made
    made.close()


@pytest.mark.parametrize("loader_workers", [0, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_resumed_run_is_the_undisturbed_one(
    cluster: Cluster, tmp_path: Path, precision: str, loader_workers: int
) -> None:
    run_spec = spec(
        model=Factory("tests.support.training:SmallNet", {"dropout": 0.3, "norm": True}), precision=precision
    )

    def job(run_id: str) -> TrainingJob:
        generator = torch.Generator().manual_seed(9)
        data = DataLoader(
            dataset(160, torch.float32), batch_size=4, shuffle=True, generator=generator, num_workers=loader_workers
        )
        plan = plan_for(data, 3, save_every_steps=50, save_folder=tmp_path)  # 40 steps an epoch: 50 is in the second
        return job_for(cluster, run_spec, plan, run_id)

    whole = job("whole")
    whole.start()
    assert whole.run.wait(60) and whole.run.state == "done", whole.run.error
    path = tmp_path / "whole-step-50.pt"
    rest = job("rest")
    from_checkpoint(rest.replica_set, rest.plan, path, checkpoint.read(path))
    rest = TrainingJob(rest.replica_set, rest.plan, cluster, rest.run.model)
    rest.start()
    assert rest.run.wait(60) and rest.run.state == "done", rest.run.error
    ends = [checkpoint.read(tmp_path / f"{name}-step-100.pt") for name in ("whole", "rest")]
    assert all(torch.equal(value, ends[1]["model"][name]) for name, value in ends[0]["model"].items())
    assert [one["loss"] for one in rest.run.history] == [one["loss"] for one in whole.run.history[50:]]
