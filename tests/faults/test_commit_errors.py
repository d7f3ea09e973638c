"""An error while a step is applied, or between steps, leaves the last step that is whole: it is fetched, saved, gone on from."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from guava_nb.cluster.cluster import Cluster
from guava_nb.errors import RemoteError
from guava_nb.evaluation.metric_specs import merges_for
from guava_nb.evaluation.validation import Validation
from guava_nb.protocol.messages import Factory, MetricSpec, RunSpec
from guava_nb.replica import optimizer as optimizer_module
from guava_nb.sync.handover import fetch_between_runs
from guava_nb.training import checkpoint
from guava_nb.training.job import TrainingJob
from tests.support.direct import DirectWorker, make_cluster
from tests.support.training import difference, job_for, loader, plain, plan_for, spec

OWN = f"{__name__}:"
FAILS_AT = 5  # the step whose commit fails, counted from 1


class Trouble(RuntimeError):
    pass


def here(where: str) -> bool:
    """Whether this thread is the worker, or one of those, where the trouble is."""
    return where == "all" or threading.current_thread().name == f"guava-direct-{where}"


class Own(torch.optim.Adam):
    """A user's own optimizer: counts its steps, and raises in one of them."""

    def __init__(self, parameters: Any, when: str, where: str) -> None:
        super().__init__(parameters, lr=0.01)
        self.when, self.where, self.steps_done = when, where, 0

    def step(self, closure: Any = None) -> None:
        self.steps_done += 1
        fails = self.steps_done == FAILS_AT and here(self.where)
        if fails and self.when == "midway":
            with torch.no_grad():
                self.param_groups[0]["params"][0].data.add_(1.0)
                self.param_groups[0]["lr"] = 7.0
        if fails and self.when != "after":
            raise Trouble(self.when)
        super().step(closure)
        if fails:
            raise Trouble("after")


def hooked(named: Any, kind: str, where: str) -> torch.optim.Optimizer:
    made, calls = torch.optim.Adam([p for _, p in named], lr=0.01), [0]

    def hook(*_: Any) -> None:
        calls[0] += 1
        if calls[0] == FAILS_AT and here(where):
            raise Trouble(kind)

    getattr(made, f"register_step_{kind}_hook")(hook)
    return made


def spoiled(optimizer: torch.optim.Optimizer, where: str) -> LRScheduler:
    """After some steps torch's own optimizer refuses what the schedule set."""

    def factor(step: int) -> float:
        if step == FAILS_AT - 1 and here(where):
            optimizer.param_groups[0]["amsgrad"] = True  # its state has no such entry: torch finds out before it steps
        return 1.0

    return LambdaLR(optimizer, factor)


def schedule(optimizer: torch.optim.Optimizer, where: str) -> LRScheduler:
    def factor(step: int) -> float:
        if step == FAILS_AT and here(where):
            raise Trouble("schedule")
        return 1.0

    return LambdaLR(optimizer, factor)


ADAM = Factory("Adam", {"lr": 0.01})
#: What raises, and how many steps count where it does so everywhere.
CAUSES: dict[str, tuple[Any, int]] = {
    "optimizer before": (lambda where: {"optimizer": Factory(OWN + "Own", {"when": "before", "where": where})}, 4),
    "optimizer midway": (lambda where: {"optimizer": Factory(OWN + "Own", {"when": "midway", "where": where})}, 4),
    "optimizer after": (lambda where: {"optimizer": Factory(OWN + "Own", {"when": "after", "where": where})}, 4),
    "pre hook": (lambda where: {"optimizer": Factory(OWN + "hooked", {"kind": "pre", "where": where})}, 4),
    "post hook": (lambda where: {"optimizer": Factory(OWN + "hooked", {"kind": "post", "where": where})}, 4),
    "torch's own": (lambda where: {"optimizer": ADAM, "scheduler": Factory(OWN + "spoiled", {"where": where})}, 4),
    "schedule": (lambda where: {"optimizer": ADAM, "scheduler": Factory(OWN + "schedule", {"where": where})}, 5),
}


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = make_cluster()
    yield made
    made.close()


def run_spec(**changes: Any) -> RunSpec:
    # Batch norm: what a step that does not count did to buffers is undone too.
    return spec(**{"model": Factory("tests.support.training:SmallNet", {"norm": True}), "optimizer": ADAM, **changes})


def failing(cluster: Cluster, workers: int, chosen: RunSpec, data: Any = None, **plan: Any) -> TrainingJob:
    for k in range(workers):
        DirectWorker(cluster, f"w{k}").start()
    cluster.wait_for(workers, 10)
    made = plan_for(loader(96) if data is None else data, 4, interrupt_grace_s=20.0)
    for name, value in plan.items():
        setattr(made, name, value)
    job = job_for(cluster, chosen, made)
    job.start()
    assert job.run.wait(60), job.run
    assert job.run.state == "failed"
    return job


def is_whole_after(job: TrainingJob, steps: int, tmp_path: Path, workers: int) -> None:
    """History, position, model, optimizer and a further run agree on this many steps."""
    run, replica_set = job.run, job.replica_set
    assert (len(run.history), replica_set.step + 1, job.where().batches + 3 * job.where().epoch) == (steps,) * 3
    assert (run.lost_samples, run.duplicated_samples) == (0, 0)
    reference = spec(model=replica_set.spec.model, optimizer=ADAM)
    expected, _ = plain(reference, loader(96), 4, limit=steps)
    if workers == 1:  # batch statistics of parts are not those of the whole
        assert difference(run.model(), expected) <= 1e-9
    else:
        assert int(run.model().norm.num_batches_tracked) == steps
    state = fetch_between_runs(replica_set, job.cluster, 20)
    assert {float(values["step"]) for values in state["optimizer"]["state"].values()} == {steps}
    assert state["optimizer"]["param_groups"][0]["lr"] == 0.01
    path = tmp_path / "after.pt"
    checkpoint.write(path, state, replica_set.step, job.where(), replica_set.spec)
    again = job_for(job.cluster, reference, plan_for(loader(96), 1), "run-2")
    again.replica_set.master.load_state({"model": checkpoint.read(path)["model"]})
    again.accounting.keep(again.replica_set.master.state())
    again.start()
    assert again.run.wait(60) and again.run.result().state == "done"


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("cause", CAUSES)
def test_an_error_on_all_workers_while_a_step_is_applied(
    cluster: Cluster, cause: str, workers: int, tmp_path: Path
) -> None:
    changes, steps = CAUSES[cause]
    job = failing(cluster, workers, run_spec(**changes("all")))
    assert isinstance(job.run.error, RemoteError)
    is_whole_after(job, steps, tmp_path, workers)


@pytest.mark.parametrize("cause", CAUSES)
def test_an_error_on_one_worker_leaves_the_step_of_the_others(cluster: Cluster, cause: str, tmp_path: Path) -> None:
    job = failing(cluster, 2, run_spec(**CAUSES[cause][0]("w1")))
    assert isinstance(job.run.error, RemoteError) and "w1" in str(job.run.error)
    is_whole_after(job, FAILS_AT, tmp_path, 2)


@pytest.mark.parametrize("cause", CAUSES)
def test_an_error_at_the_orchestrators_own_optimizer(cluster: Cluster, cause: str, tmp_path: Path) -> None:
    changes, steps = CAUSES[cause]
    job = failing(cluster, 2, run_spec(**changes("all"), optimizer_site="orchestrator"))
    assert job.run.error is not None and not isinstance(job.run.error, RemoteError)
    is_whole_after(job, steps, tmp_path, 2)


@pytest.mark.parametrize("site", ["workers", "orchestrator"])
def test_where_no_whole_state_is_left_the_last_snapshot_counts(
    cluster: Cluster, site: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user's own optimizer that is too large to be copied before each step, and tears the weights."""
    monkeypatch.setattr(optimizer_module, "_MOST_KEPT_BYTES", 0)
    changes, _ = CAUSES["optimizer midway"]
    chosen = run_spec(**changes("all"), optimizer_site=site)
    told: list[str] = []
    cluster.notice = told.append
    job = failing(cluster, 2, chosen, snapshot_every_steps=2)
    is_whole_after(job, 4, tmp_path, 2)
    assert any("left no whole state of step" in text and "that of step 4, the last snapshot" in text for text in told)


class Callbacks:
    """Raises in one of its hooks, after so many calls."""

    def __init__(self, hook: str, calls: int) -> None:
        self.left = calls
        setattr(self, hook, self.called)

    def called(self, run: Any, record: dict[str, Any]) -> None:
        self.left -= 1
        if self.left == 0:
            raise Trouble("callback")


class Spoiled:
    """Batches as of `loader(96)`, until one cannot be loaded."""

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(loader(96)):
            if number == 2:
                raise Trouble("loader")
            yield batch

    def __len__(self) -> int:
        return 3


def bad_metric(outputs: torch.Tensor, targets: torch.Tensor) -> float:
    raise Trouble("metric")


def ticks(optimizer: torch.optim.Optimizer, last: int) -> LRScheduler:
    def factor(step: int) -> float:
        if step == last:
            raise Trouble("tick")
        return 1.0

    return LambdaLR(optimizer, factor)


METRIC = MetricSpec("bad", Factory(OWN + "bad_metric"))
BETWEEN: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "on_step": ({"lockstep": True}, {"callbacks": [Callbacks("on_step", 4)]}, 4),
    "on_epoch": ({}, {"callbacks": [Callbacks("on_epoch", 2)]}, 6),
    "on_validation": ({"metrics": ()}, {"callbacks": [Callbacks("on_validation", 1)], "val": True}, 3),
    "metric": ({"metrics": (METRIC,)}, {"val": True, "val_interval": 2}, 2),
    "loader": ({}, {"data": Spoiled()}, 2),
    "tick of an epoch": (
        {"scheduler": Factory(OWN + "ticks", {"last": 2}), "scheduler_interval": "epoch"}, {}, 6,
    ),
    "tick at the orchestrator": (
        {
            "scheduler": Factory(OWN + "ticks", {"last": 2}), "scheduler_interval": "epoch",
            "optimizer_site": "orchestrator",
        }, {}, 6,
    ),
}  # fmt: skip


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("cause", BETWEEN)
def test_an_error_between_steps(cluster: Cluster, cause: str, workers: int, tmp_path: Path) -> None:
    changes, plan, steps = copy.deepcopy(BETWEEN[cause])
    if plan.pop("val", False):
        merges = merges_for(changes["metrics"], None)
        plan["validation"] = lambda: Validation(changes["metrics"], merges)
        plan["val_feed"] = plan_for(loader(32)).feed
    job = failing(cluster, workers, run_spec(**changes), **plan)
    assert str(job.run.error)
    is_whole_after(job, steps, tmp_path, workers)
