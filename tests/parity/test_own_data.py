"""Data that lies at the workers: the same batches as a plain loader's, read there by id."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from guava_nb.cluster.cluster import Cluster
from guava_nb.data.worker_data import WorkerData
from guava_nb.errors import ConfigError, PreparationError, RemoteError
from guava_nb.protocol.messages import GradientBucket, Message, ParallelSpec
from guava_nb.training.plan import TrainingPlan
from guava_nb.training.run import Run
from guava_nb.training.worker_data_facts import ask_data, data_spec, feeds, refuse_group, refuse_place
from tests.support.direct import DirectWorker, make_cluster
from tests.support.training import dataset, difference, job_for, losses_of, plain, spec


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = make_cluster()
    yield made
    made.close()


def digits(rows: int = 101) -> Dataset[Any]:
    return dataset(rows)


class Cursed(Dataset[Any]):
    def __init__(self, at: int) -> None:
        self.at = at

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        if index == self.at:
            raise ValueError("this file is torn")
        return torch.zeros(10, dtype=torch.float64), index % 4


class Drawn(Dataset[Any]):
    """Every look draws from the process's streams, as augmentation does."""

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> Any:
        noise = np.random.rand() + float(torch.rand(()))
        return torch.full((10,), index + noise, dtype=torch.float64), index % 4


class Other(Dataset[Any]):
    """Not the same at any two workers."""

    made = 0

    def __init__(self, length: bool) -> None:
        Other.made += 1
        self.number, self.length = Other.made, length

    def __len__(self) -> int:
        return 10 + (self.number if self.length else 0)

    def __getitem__(self, index: int) -> Any:
        return torch.full((10,), float(self.number)), 0


def one_of_two(samples: list[Any]) -> Any:
    return torch.stack([x for x, _ in samples[::2]]), torch.tensor([y for _, y in samples[::2]])


HERE = __name__


def train(cluster: Cluster, workers: list[DirectWorker], data: WorkerData, epochs: int = 2, val: Any = None) -> Run:
    for worker in workers:
        worker.start()
    cluster.wait_for(len(workers), 10)
    own = [data_spec(loader, None) for loader in (data, val) if isinstance(loader, WorkerData)]
    specs = ask_data(cluster, (), own, lambda: None)
    feed, val_feed = feeds((data, val), specs)
    job = job_for(cluster, spec(data=specs), TrainingPlan(feed, val_feed, epochs))
    job.start()
    assert job.run.wait(60), job.run
    return job.run.result()


@pytest.mark.parametrize("count", [1, 3])
def test_a_run_equals_plain_pytorch_with_a_plain_loader(cluster: Cluster, count: int) -> None:
    data = WorkerData(f"{HERE}:digits", 32, shuffle=True, seed=9)
    held_out = WorkerData(f"{HERE}:digits", 10, args={"rows": 77})
    run = train(cluster, [DirectWorker(cluster, f"w{k}") for k in range(count)], data, val=held_out)
    generator = torch.Generator().manual_seed(9)
    model, losses = plain(spec(), DataLoader(dataset(), 32, shuffle=True, generator=generator))
    assert losses_of(run) == pytest.approx(losses, abs=1e-12)
    assert difference(run.model(), model) <= 1e-9
    assert (run.lost_samples, run.duplicated_samples) == (0, 0)
    assert [v["samples"] for v in run.validations] == [77, 77]
    assert (run.check or {}).get("outcome") == (None if count == 1 else "same")
    x, y = dataset(77).tensors
    loss = torch.nn.functional.cross_entropy(model.eval()(x), y)
    assert run.validations[-1]["loss"] == pytest.approx(float(loss.detach()))


def test_a_lost_worker_s_samples_are_read_by_another(cluster: Cluster) -> None:
    sent = [0]

    def dies(worker: DirectWorker, message: Message) -> None:
        sent[0] += worker.name == "w1" and isinstance(message, GradientBucket)
        if sent[0] == 9:
            worker.die()

    run = train(cluster, [DirectWorker(cluster, f"w{k}", dies) for k in range(3)], WorkerData(f"{HERE}:digits", 32))
    model, losses = plain(spec(), DataLoader(dataset(), 32))
    assert losses_of(run) == pytest.approx(losses, abs=1e-12)
    assert (run.lost_samples, run.duplicated_samples) == (0, 0)


def test_random_numbers_of_the_data_set_repeat_from_the_seed_and_differ_between_epochs() -> None:
    losses = []
    for _ in range(2):
        made = make_cluster()
        losses.append(losses_of(train(made, [DirectWorker(made, "w0")], WorkerData(f"{HERE}:Drawn", 10), 2)))
        made.close()
    assert losses[0] == losses[1]
    assert len(set(losses[0])) == 6


def test_an_error_of_the_data_set_names_sample_and_worker_and_workers_stay(cluster: Cluster) -> None:
    workers = [DirectWorker(cluster, f"w{k}") for k in range(2)]
    data = WorkerData(Cursed, 8, args={"at": 17})
    with pytest.raises(
        RemoteError, match=r"sample 17 of .*:Cursed could not be loaded: ValueError: this file is torn"
    ) as caught:
        train(cluster, workers, data)
    assert (
        re.search("^worker w[01] raised SampleFailed", str(caught.value))
        and "in __getitem__" in caught.value.remote_traceback
    )
    assert all(worker.thread.is_alive() for worker in workers)


def test_a_collate_function_that_drops_samples_is_refused(cluster: Cluster) -> None:
    data = WorkerData(f"{HERE}:digits", 8, collate=one_of_two, check=False)
    with pytest.raises(RemoteError, match="neither drop nor add samples"):
        train(cluster, [DirectWorker(cluster, "w0")], data)


@pytest.mark.parametrize(
    ("length", "sentence"),
    [(True, r"samples at w0 and \d+ at w1: put the same"), (False, "other samples at w0 than at w1")],
)
def test_workers_with_other_data_are_named_before_anything_starts(
    cluster: Cluster, length: bool, sentence: str
) -> None:
    with pytest.raises(PreparationError, match=sentence):
        train(
            cluster, [DirectWorker(cluster, f"w{k}") for k in range(2)], WorkerData(Other, 4, args={"length": length})
        )


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (WorkerData("no.such.module:thing", 4), "cannot be imported.*'no' is not installed on"),
        (WorkerData(f"{HERE}:nothing", 4), "w0 cannot make the data set: .*nothing"),
        (WorkerData("builtins:object", 4), r"no len\(\)"),
        (WorkerData("builtins:list", 4), "has no samples here"),
        (WorkerData(f"{HERE}:Cursed", 4, args={"at": 0}), "sample 0 of .*torn"),
        (WorkerData(f"{HERE}:Cursed", 4, args={"where": 0}), "does not take 'where'"),
    ],
)
def test_what_cannot_be_built_is_told_before_anything_starts(cluster: Cluster, data: WorkerData, sentence: str) -> None:
    with pytest.raises(PreparationError, match=f"(?s){sentence}"):
        train(cluster, [DirectWorker(cluster, "w0")], data)


def test_what_does_not_go_together_is_refused_with_a_sentence() -> None:
    with pytest.raises(ConfigError, match="give WorkerData"):
        refuse_place("worker", [1, 2])
    with pytest.raises(ConfigError, match="one of: orchestrator, worker"):
        refuse_place("moon", [1, 2])
    with pytest.raises(ConfigError, match="mode pipeline.*path='relay'"):
        refuse_group(spec(parallel=ParallelSpec(mode="pipeline", pp=2)))
    with pytest.raises(ConfigError, match="exists only here"):
        WorkerData(dataset(4), 4)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="batch_size"):
        WorkerData(f"{HERE}:digits", 0)
