"""100 steps are 50, a checkpoint, and 50 more, bit for bit: dropout, loader processes, precisions, augmentation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from guava_nb.cluster.cluster import Cluster
from guava_nb.data.loader_feed import LoaderFeed
from guava_nb.protocol.messages import Factory
from guava_nb.training import checkpoint
from guava_nb.training.initial_state import from_checkpoint
from guava_nb.training.job import TrainingJob
from tests.support.direct import DirectWorker, make_cluster
from tests.support.training import dataset, job_for, plain, plan_for, spec


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


class Augmented(Dataset[Any]):
    """Draws from a stream that it shares with the data set to validate on."""

    def __init__(self, stream: np.random.Generator, rows: int) -> None:
        self.rows, self.stream = dataset(rows), stream

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        x, y = self.rows[index]
        return x + self.stream.random(), y


class ByEpoch(Sampler[int]):
    """Another order in each epoch, as DistributedSampler draws it."""

    epoch = 0

    def __len__(self) -> int:
        return 7

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(7, generator=torch.Generator().manual_seed(self.epoch)).tolist())

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


@pytest.mark.parametrize("own", ["", "generator", "set_epoch"])
@pytest.mark.parametrize("ends", [False, True], ids=["by steps", "by epochs"])
def test_what_a_validation_draws_comes_in_its_turn_and_is_in_a_checkpoint(
    cluster: Cluster, tmp_path: Path, ends: bool, own: str
) -> None:
    def loaders() -> tuple[DataLoader[Any], DataLoader[Any]]:
        stream = np.random.default_rng(1)
        words: dict[str, Any] = {"sampler": ByEpoch()} if own == "set_epoch" else {}
        if own == "generator":
            words = {"shuffle": True, "generator": torch.Generator().manual_seed(3)}
        val = Augmented(np.random.default_rng(2) if own else stream, 7)
        return DataLoader(Augmented(stream, 40), batch_size=4), DataLoader(val, batch_size=4, **words)

    interval, run_spec = (None if ends else 4), spec()

    def in_turn() -> Iterator[Any]:
        train, val = loaders()
        for epoch in range(2):
            for number, batch in enumerate(train, 1 + 10 * epoch):
                yield batch
                if (number % 10 if ends else number % 4) == 0:
                    list(val)

    def run(run_id: str, saved: Path | None = None) -> TrainingJob:
        train, val = loaders()
        job = job_for(
            cluster,
            run_spec,
            plan_for(train, 2, val_interval=interval, save_every_steps=5, save_folder=tmp_path),
            run_id,
        )
        job.plan.val_feed = LoaderFeed(val)
        if saved is not None:
            from_checkpoint(job.replica_set, job.plan, saved, checkpoint.read(saved))
        job = TrainingJob(job.replica_set, job.plan, cluster, job.run.model)
        job.start()
        assert job.run.wait(60) and job.run.state == "done", job.run.error
        return job

    wanted = plain(run_spec, list(in_turn()), 1)[1]
    whole = run("drawing")
    assert [one["loss"] for one in whole.run.history] == pytest.approx(wanted, abs=1e-9)
    for step in (5, 10, 15):
        rest = run(f"rest-{step}", tmp_path / f"drawing-step-{step}.pt")
        assert [one["loss"] for one in rest.run.history] == [one["loss"] for one in whole.run.history[step:]]
        assert rest.run.validations == whole.run.validations[-len(rest.run.validations) :]
