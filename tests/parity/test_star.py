"""Data mode through the hub equals plain PyTorch on whole batches: everything above the link, without a network."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from guava_nb.cluster.cluster import Cluster
from guava_nb.protocol.messages import Factory, RunSpec
from guava_nb.training.job import TrainingJob
from guava_nb.training.run import Run
from tests.support.direct import DirectWorker, make_cluster
from tests.support.training import difference, job_for, loader, losses_of, plain, plan_for, replica, spec


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = make_cluster()
    yield made
    made.close()


def train(
    cluster: Cluster, workers: int, run_spec: RunSpec, data: Any, epochs: int = 2, **changes: Any
) -> tuple[TrainingJob, Run]:
    started = [DirectWorker(cluster, f"w{k}").start() for k in range(workers)]
    cluster.wait_for(workers, 10)
    job = job_for(cluster, run_spec, plan_for(data, epochs, **changes))
    job.start()
    assert job.run.wait(60), job.run
    job.run.result()
    assert [w.error for w in started] == [None] * workers
    assert (job.run.lost_samples, job.run.duplicated_samples) == (0, 0)
    return job, job.run


@pytest.mark.parametrize("site", ["workers", "orchestrator"])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_float64_weights_and_losses_equal_plain_pytorch(cluster: Cluster, workers: int, site: str) -> None:
    run_spec = spec(optimizer_site=site)
    _, run = train(cluster, workers, run_spec, loader())
    model, losses = plain(run_spec, loader())
    assert losses_of(run) == pytest.approx(losses, abs=1e-12)
    assert difference(run.model(), model) <= 1e-9


@pytest.mark.parametrize(
    ("workers", "rows", "batch", "shares"),
    [
        (3, 101, 65, None),
        (3, 101, 65, (5, 1, 2)),
        (4, 21, 8, None),
        (3, 7, 2, None),
        (2, 9, 1, None),
        (2, 64, 24, (3, 1)),
    ],
)
def test_odd_batches_and_unequal_shares(
    cluster: Cluster, workers: int, rows: int, batch: int, shares: tuple[float, ...] | None
) -> None:
    _, run = train(cluster, workers, spec(), loader(rows, batch), shares=shares)
    model, losses = plain(spec(), loader(rows, batch))
    assert losses_of(run) == pytest.approx(losses, abs=1e-12)
    assert difference(run.model(), model) <= 1e-9
    assert sum(r["samples"] for r in run.history) == 2 * rows


@pytest.mark.parametrize(
    "changes",
    [
        {"max_grad_norm": 0.3},
        {
            "optimizer": Factory("SGD", {"lr": 0.1, "momentum": 0.9}),
            "scheduler": Factory("StepLR", {"step_size": 3, "gamma": 0.5}),
        },
        {"optimizer": Factory("Adam", {"lr": 0.01}), "max_grad_norm": 0.1, "optimizer_site": "orchestrator"},
    ],
)
def test_clipping_optimizers_and_schedules(cluster: Cluster, changes: dict[str, Any]) -> None:
    run_spec = spec(**changes)
    _, run = train(cluster, 2, run_spec, loader())
    model, losses = plain(run_spec, loader())
    assert losses_of(run) == pytest.approx(losses, abs=1e-12)
    assert difference(run.model(), model) <= 1e-9


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("ignore", [-100, 2])
def test_a_lone_worker_whose_steps_are_applied_ahead(cluster: Cluster, accumulate: int, ignore: int) -> None:
    run_spec = spec(
        model=Factory("tests.support.training:SmallNet", {"norm": accumulate == 1}),
        optimizer=Factory("AdamW", {"lr": 0.01, "fused": True}),
        criterion=Factory("CrossEntropyLoss", {"ignore_index": ignore}),
        scheduler=Factory("StepLR", {"step_size": 2, "gamma": 0.5}),
        max_grad_norm=0.3,
    )
    _, run = train(cluster, 1, run_spec, loader(101, 16), accumulation_steps=accumulate)
    model, losses = plain(run_spec, loader(101, 16), accumulate=accumulate)
    assert losses_of(run) == pytest.approx(losses, abs=1e-12)
    assert difference(run.model(), model) <= 1e-9
    assert [record["learning_rate"] for record in run.history[:3]] == [0.01, 0.01, 0.005]


@pytest.mark.parametrize("workers", [1, 2])
def test_accumulation_with_a_tail_that_does_not_divide(cluster: Cluster, workers: int) -> None:
    _, run = train(cluster, workers, spec(), loader(101, 16), accumulation_steps=3)
    model, losses = plain(spec(), loader(101, 16), accumulate=3)
    assert losses_of(run) == pytest.approx(losses, abs=1e-12)
    assert difference(run.model(), model) <= 1e-9


def test_fp32_losses_agree(cluster: Cluster) -> None:
    import torch

    run_spec = spec(precision="fp32")
    _, run = train(cluster, 3, run_spec, loader(dtype=torch.float32))
    _, losses = plain(run_spec, loader(dtype=torch.float32))
    assert losses_of(run) == pytest.approx(losses, abs=1e-5)


@pytest.mark.parametrize("site", ["workers", "orchestrator"])
def test_the_learning_rate_schedule_does_not_depend_on_the_number_of_workers(cluster: Cluster, site: str) -> None:
    run_spec = spec(scheduler=Factory("StepLR", {"step_size": 2, "gamma": 0.5}), optimizer_site=site)
    _, run = train(cluster, 3, run_spec, loader())
    rates = [record["learning_rate"] for record in run.history]
    assert rates == [0.01 * 0.5 ** (k // 2) for k in range(8)]  # with which each step was taken


def test_dropout_repeats_exactly_for_the_same_shares(cluster: Cluster) -> None:
    run_spec = spec(model=Factory("tests.support.training:SmallNet", {"dropout": 0.5}))
    _, first = train(cluster, 2, run_spec, loader())
    other = make_cluster()
    try:
        _, second = train(other, 2, run_spec, loader())
    finally:
        other.close()
    assert losses_of(first) == losses_of(second)
    assert difference(first.model(), second.model()) == 0.0


def test_batch_statistics_are_the_same_on_every_worker(cluster: Cluster) -> None:
    run_spec = spec(model=Factory("tests.support.training:SmallNet", {"norm": True}))
    # 102 = 3 x 32 + 6: no share has a single row, which batch norm cannot normalise.
    job, run = train(cluster, 3, run_spec, loader(102))
    model = run.model()
    assert int(model.norm.num_batches_tracked) == len(run.history)
    assert job.run.generations == 1  # the hashes compared every 3 steps, buffers included, agreed


@pytest.mark.parametrize("site", ["workers", "orchestrator"])
@pytest.mark.parametrize("workers", [1, 2])
def test_the_gradient_norm_of_each_step_is_that_of_plain_pytorch(cluster: Cluster, workers: int, site: str) -> None:
    run_spec = spec(
        optimizer=Factory("SGD", {"lr": 0.1}),
        criterion=Factory("CrossEntropyLoss", {"ignore_index": 1}),  # so that the count is not the number of rows
        optimizer_site=site,
    )
    _, run = train(cluster, workers, run_spec, loader(), epochs=1)
    states = [replica(run_spec).model, *(plain(run_spec, loader(), 1, limit=k + 1)[0] for k in range(4))]
    flat = [torch.nn.utils.parameters_to_vector(model.parameters()) for model in states]
    norms = [float((after - before).norm().detach()) / 0.1 for before, after in zip(flat, flat[1:], strict=False)]
    assert [record["gradient_norm"] for record in run.history] == pytest.approx(norms, rel=1e-9)
