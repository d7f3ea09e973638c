"""Schedules tick and follow as in a plain loop, over one worker and several, wherever the optimizer is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from guava_nb.cluster.cluster import Cluster
from guava_nb.evaluation.metric_specs import merges_for
from guava_nb.evaluation.validation import Validation
from guava_nb.protocol.messages import Factory, MetricSpec
from guava_nb.training.run import Run
from tests.support.direct import DirectWorker, make_cluster
from tests.support.training import dataset, difference, job_for, loader, plain, plan_for, replica, spec

SGD = Factory("SGD", {"lr": 0.5, "momentum": 0.9})
EPOCHS = 6


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = make_cluster()
    yield made
    made.close()


def worst_row(outputs: Tensor, targets: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(outputs, targets, reduction="none").mean()


def train(cluster: Cluster, workers: int, run_spec: Any, epochs: int = EPOCHS, **plan: Any) -> Run:
    for k in range(workers):
        DirectWorker(cluster, f"w{k}").start()
    cluster.wait_for(workers, 10)
    made = plan_for(loader(), epochs)
    for name, value in plan.items():
        setattr(made, name, value)
    job = job_for(cluster, run_spec, made)
    job.start()
    assert job.run.wait(60), job.run
    return job.run.result()


def measured(model: torch.nn.Module, metric: str) -> float:
    x, y = dataset().tensors
    model.eval()
    with torch.no_grad():
        outputs = model(x)
    model.train()
    if metric == "accuracy":
        return float((outputs.argmax(1) == y).double().mean())
    return float(torch.nn.functional.cross_entropy(outputs, y))


def plainly(run_spec: Any, metric: str, every: int | None) -> tuple[torch.nn.Module, list[float]]:
    """The loop that a user writes: train, validate, `scheduler.step(figure)`; returns the rates after each of these."""
    model = replica(run_spec).model.train()
    optimizer = torch.optim.SGD(model.parameters(), **run_spec.optimizer.args)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, **run_spec.scheduler.args)
    rates, step, data = [], 0, loader()
    for _ in range(EPOCHS):
        for x, y in data:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            step += 1
            if every is not None and step % every == 0:
                scheduler.step(measured(model, metric))
                rates.append(optimizer.param_groups[0]["lr"])
        if every is None:
            scheduler.step(measured(model, metric))
            rates.append(optimizer.param_groups[0]["lr"])
    return model, rates


@pytest.mark.parametrize("site", ["workers", "orchestrator"])
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    ("metric", "mode", "interval", "every"),
    [
        ("accuracy", "max", "validation", None),
        ("accuracy", "max", "validation", 3),
        ("accuracy", "max", "epoch", None),
        ("loss", "min", "validation", None),
        (None, "min", "epoch", None),
        ("worst", "min", "validation", 2),
    ],
)
def test_a_plateau_follows_what_it_names(
    cluster: Cluster, metric: str | None, mode: str, interval: str, every: int | None, workers: int, site: str
) -> None:
    metrics = (MetricSpec("worst", Factory(f"{__name__}:worst_row")),)
    run_spec = spec(
        optimizer=SGD, scheduler=Factory("ReduceLROnPlateau", {"mode": mode, "patience": 0, "factor": 0.7}),
        scheduler_interval=interval, optimizer_site=site, metrics=metrics,
    )  # fmt: skip
    run = train(
        cluster, workers, run_spec, val_feed=plan_for(loader()).feed, val_interval=every, scheduler_metric=metric,
        validation=lambda: Validation(metrics, merges_for(metrics, None)),
    )  # fmt: skip
    model, rates = plainly(run_spec, metric or "loss", every)
    assert len({*rates}) > 1, "the case shows nothing where the rate never falls"
    assert difference(run.model(), model) <= 1e-9
    assert len(run.validations) == len(rates)


@pytest.mark.parametrize(("every", "ticks"), [(None, 1), (5, 1), (4, 1), (2, 2)])
def test_only_validations_that_are_due_are_ticks_of_a_schedule_where_a_run_ends_in_mid_epoch(
    cluster: Cluster, every: int | None, ticks: int
) -> None:
    run_spec = spec(optimizer=SGD, scheduler=Factory("StepLR", {"step_size": 1}), scheduler_interval="validation")
    DirectWorker(cluster, "w0").start()
    cluster.wait_for(1, 10)
    plan = plan_for(loader(), max_steps=len(loader()) + 1, val_interval=every)
    plan.val_feed = plan_for(loader()).feed
    job = job_for(cluster, run_spec, plan)
    job.start()
    assert job.run.wait(60), job.run
    job.run.result()
    assert job.replica_set.master.scheduler.last_epoch == ticks
    assert job.run.validations[-1]["step"] == (5 if every in (None, 5) else 4)


@pytest.mark.parametrize("site", ["workers", "orchestrator"])
@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("OneCycleLR", {"max_lr": 0.3, "total_steps": 4 * EPOCHS}),
        ("CosineAnnealingWarmRestarts", {"T_0": 5, "T_mult": 2}),
        ("CosineAnnealingLR", {"T_max": 7}),
        ("CyclicLR", {"base_lr": 0.01, "max_lr": 0.3, "step_size_up": 5}),
        ("MultiStepLR", {"milestones": [3, 9, 20]}),
        ("PolynomialLR", {"total_iters": 10, "power": 2.0}),
        ("ConstantLR", {"factor": 0.3, "total_iters": 5}),
    ],
)
def test_torchs_schedules_tick_once_a_step(cluster: Cluster, name: str, args: dict[str, Any], site: str) -> None:
    run_spec = spec(optimizer=SGD, scheduler=Factory(name, args), optimizer_site=site)
    run = train(cluster, 2, run_spec)
    assert difference(run.model(), plain(run_spec, loader(), EPOCHS)[0]) <= 1e-9
