"""What a run takes is what was forecast, and never more than its budget; worker loops on threads, real messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from guava_nb.cluster.cluster import Cluster
from guava_nb.config import DistributedConfig
from guava_nb.data.loader_feed import LoaderFeed
from guava_nb.errors import ConfigError
from guava_nb.evaluation.validation import Validation
from guava_nb.forecast.forecast import Forecast
from guava_nb.forecast.planned_run import Composed, PlannedRun, budget_of, forecast_of
from guava_nb.protocol.messages import CacheSpec, Factory, GradientBucket, Message, RoundSpec, RunSpec, StepApplied
from guava_nb.sync.whole_replica_set import WholeReplicaSet
from guava_nb.training import checkpoint
from guava_nb.training.byte_budget import Budget, Limit
from guava_nb.training.job import TrainingJob
from guava_nb.training.plan import Position, TrainingPlan
from guava_nb.training.run import Run
from tests.support.direct import DirectWorker, make_cluster, once_after
from tests.support.training import difference, loader, plain, replica, spec


class WideNet(torch.nn.Module):
    """Large enough for its gradients to outweigh the orders about them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = torch.nn.Linear(10, 200), torch.nn.BatchNorm1d(200)
        self.last = torch.nn.Linear(200, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.norm(self.first(x))))


WIDE = Factory(f"{__name__}:WideNet")


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = make_cluster()
    yield made
    made.close()


class Session:
    """A cluster with workers on threads, and runs on it."""

    def __init__(
        self, cluster: Cluster, workers: int, hook: Callable[..., None] = lambda worker, message: None
    ) -> None:
        self.cluster, self.count = cluster, workers
        for number in range(workers):
            DirectWorker(cluster, f"w{number}", hook if number == 0 else lambda worker, message: None).start()
        cluster.wait_for(workers, 10)
        self.number = 0
        self.saved: dict[str, Any] = {}

    def planned(self, run_spec: RunSpec, plan: TrainingPlan) -> PlannedRun:
        replica_set = WholeReplicaSet(f"run-{self.number + 1}", run_spec, (), replica(run_spec))
        return PlannedRun(
            replica_set, plan, Composed(run_spec, None, [], Validation), self.count, False, 0, self.cluster.caches
        )

    def train(self, run_spec: RunSpec, plan: TrainingPlan, folder: Path, begin: Any = None) -> Run:
        self.number += 1
        replica_set = WholeReplicaSet(f"run-{self.number}", run_spec, (), replica(run_spec))
        if begin is not None:
            content = checkpoint.read(begin)
            replica_set.master.load_state({key: content[key] for key in ("model", "buffers", "optimizer")})
            replica_set.step = replica_set.master_step = content["step"]
        plan.save_folder = folder
        job = TrainingJob(replica_set, plan, self.cluster, lambda: replica_set.master.model)
        job.start()
        assert job.run.wait(60), job.run
        for path in folder.glob(f"run-{self.number}-step-*.pt"):
            self.saved["path"] = path
        return job.run.result()


def plan_for(data: Any, val: Any = None, epochs: int = 3, **changes: Any) -> TrainingPlan:
    return TrainingPlan(LoaderFeed(data), None if val is None else LoaderFeed(val), epochs, **changes)


def forecast(session: Session, run_spec: RunSpec, plan: TrainingPlan) -> Forecast:
    return forecast_of(session.planned(run_spec, plan), DistributedConfig(), (None, None))


def assert_close(made: Forecast, run: Run) -> None:
    """Within 5 % in all and in each kind that weighs something; control alone may be less (nobody acknowledges here)."""
    told, wire = made.to_dict()["run"], run.wire
    counted = wire.out_bytes + wire.in_bytes
    assert told["out_bytes"] + told["in_bytes"] == pytest.approx(counted, rel=0.05)
    for name in ("sample_bytes", "gradient_bytes", "parameter_bytes"):
        assert told[name] == pytest.approx(getattr(wire, name), rel=0.05, abs=0.005 * counted), name


@pytest.mark.parametrize("site", ["workers", "orchestrator"])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_run_takes_what_was_forecast(cluster: Cluster, tmp_path: Path, workers: int, site: str) -> None:
    session, run_spec = Session(cluster, workers), spec(model=WIDE, optimizer_site=site)
    made = forecast(session, run_spec, plan_for(loader(rows=203), loader(rows=60)))
    run = session.train(run_spec, plan_for(loader(rows=203), loader(rows=60)), tmp_path)
    assert made.steps == len(run.history) == 21
    assert_close(made, run)


@pytest.mark.parametrize(
    ("wire", "site"), [("bf16", "workers"), ("int8", "workers"), ("int4", "workers"), ("int8", "orchestrator")]
)
def test_a_run_with_short_gradients_takes_what_was_forecast(
    cluster: Cluster, tmp_path: Path, wire: str, site: str
) -> None:
    session, run_spec = Session(cluster, 2), spec(model=WIDE, wire=wire, optimizer_site=site)
    made = forecast(session, run_spec, plan_for(loader(rows=203)))
    assert_close(made, session.train(run_spec, plan_for(loader(rows=203)), tmp_path))


@pytest.mark.parametrize("shuffled", [True, False])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_run_with_a_cache_takes_what_was_forecast(
    cluster: Cluster, tmp_path: Path, workers: int, shuffled: bool
) -> None:
    wide = TensorDataset(torch.randn(320, 10, 40, dtype=torch.float64)[:, :, :1].squeeze(2), torch.arange(320) % 4)
    big = TensorDataset(*wide.tensors, torch.randn(320, 500, dtype=torch.float64))
    session = Session(cluster, workers)
    cached = spec(model=WIDE, cache=CacheSpec("memory", 8 << 20), criterion=None, step=Factory(f"{__name__}:first_two"))

    def data() -> DataLoader[Any]:
        return DataLoader(big, batch_size=32, shuffle=shuffled, generator=torch.Generator().manual_seed(1))

    made = forecast(session, cached, plan_for(data(), epochs=4))
    run = session.train(cached, plan_for(data(), epochs=4), tmp_path)
    assert_close(made, run)
    again = made.epochs[1].of("sample")
    assert again == 0 if workers == 1 or not shuffled else 0 < again < made.epochs[0].of("sample") / 2


def first_two(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    """A step on a batch that holds more than the model looks at."""
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])


@pytest.mark.parametrize(
    "changes",
    [
        {"accumulation_steps": 3},
        {"val_interval": 5},
        {"snapshot_every_steps": 4},
        {"shares": (3.0, 1.0)},
        {"save_every_steps": 6},
    ],
    ids=str,
)
def test_what_a_plan_asks_for_is_in_the_forecast(cluster: Cluster, tmp_path: Path, changes: dict[str, Any]) -> None:
    session, run_spec = Session(cluster, 2), spec(model=WIDE)
    extra = {"save_folder": tmp_path} if "save_every_steps" in changes else {}
    made = forecast(session, run_spec, plan_for(loader(rows=203), loader(rows=60), **changes))
    run = session.train(run_spec, plan_for(loader(rows=203), loader(rows=60), **changes, **extra), tmp_path)
    assert made.steps == len(run.history)
    assert_close(made, run)


@pytest.mark.parametrize(
    ("workers", "rounds", "wire"),
    [
        (1, RoundSpec(), "fp32"),
        (2, RoundSpec(), "fp32"),
        (2, RoundSpec(), "int8"),
        (2, RoundSpec("sparse", 1.0, 0.0), "fp32"),
        (5, RoundSpec("sparse", 1.0, 0.0), "fp32"),
        (3, RoundSpec("partial", 1.0, 0.0), "fp32"),
        (3, RoundSpec("partial", 1.0, 0.0, density=0.7, bits=32), "fp32"),
    ],
)
def test_a_run_of_local_rounds_takes_what_was_forecast(
    cluster: Cluster, tmp_path: Path, workers: int, rounds: RoundSpec, wire: str
) -> None:
    session, run_spec = Session(cluster, workers), spec(model=WIDE, rounds=rounds, wire=wire)
    made = forecast(session, run_spec, plan_for(loader(rows=203), loader(rows=60), sync_every=3, val_interval=5))
    run = session.train(run_spec, plan_for(loader(rows=203), loader(rows=60), sync_every=3, val_interval=5), tmp_path)
    assert (made.steps, made.steps_per_epoch) == (run.history[-1]["step"], 7) == (21, 7)
    assert "a round of up to 3 steps" in repr(made)
    assert_close(made, run)


def test_a_forecast_leaves_loader_and_random_state_as_they_are(cluster: Cluster) -> None:
    session = Session(cluster, 1)
    data, other = loader(), loader()
    torch.manual_seed(3)
    before = torch.get_rng_state()
    forecast(session, spec(), plan_for(data, loader()))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(x, y) for (x, _), (y, _) in zip(data, other, strict=True))


def test_an_iterator_is_not_drawn(cluster: Cluster) -> None:
    batches = list(loader())
    once = iter(batches)
    made = forecast(Session(cluster, 1), spec(), plan_for(once, epochs=1))
    assert made.run is None and made.steps is None and any("once only" in note for note in made.notes)
    assert len(list(once)) == len(batches)


def test_a_loader_without_a_length_gives_a_step_alone(cluster: Cluster) -> None:
    class Stream:
        def __iter__(self) -> Iterator[Any]:
            return iter(list(loader()))

    made = forecast(Session(cluster, 2), spec(model=WIDE), plan_for(Stream()))
    assert made.run is None and made.run_bytes is None and made.step.of("sample") > 32 * 88
    assert "no length" in repr(made) and all(saving.per_step for saving in made.savings)


# ------------------------------------------------------------------------------------------------------------- budgets


def budgeted(session: Session, run_spec: RunSpec, limit_bytes: int, rows: int = 203, **changes: Any) -> TrainingPlan:
    plan = plan_for(loader(rows=rows), loader(rows=60), snapshot_every_steps=0, **changes)
    plan.budget = budget_of(Limit(limit_bytes, None), session.planned(run_spec, plan))
    return plan


@pytest.mark.parametrize("site", ["workers", "orchestrator"])
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("part", [0.5, 0.8])
def test_a_budget_is_not_passed_and_the_run_goes_on_from_its_checkpoint(
    cluster: Cluster, tmp_path: Path, workers: int, site: str, part: float
) -> None:
    session, run_spec = Session(cluster, workers), spec(model=WIDE, optimizer_site=site)
    rows = 1503 if workers == 1 and site == "workers" else 203  # states weigh more than the few samples else
    whole = forecast(session, run_spec, plan_for(loader(rows=rows), loader(rows=60), snapshot_every_steps=0)).run_bytes
    assert whole is not None
    limit, begin, runs, steps = int(whole * part), None, 0, 0
    while True:
        plan = budgeted(session, run_spec, limit, rows)
        if begin is not None:
            plan.start = Position(**checkpoint.read(begin)["position"])
            plan.start.rewind(plan.feed, plan.val_feed)
        run = session.train(run_spec, plan, tmp_path, begin)
        wire, runs, steps = run.wire, runs + 1, steps + len(run.history)
        assert wire.out_bytes + wire.in_bytes <= limit
        if run.state == "done":
            break
        begin, message = session.saved["path"], run.status().message
        assert run.state == "stopped" and runs < 9
        assert (
            "budget" in message
            and f"step {begin.stem.rpartition('-')[2]}" in message
            and f"%guava_resume {begin}" in message
        )
        assert run.report()["budget"] == {
            "limit_bytes": limit,
            "used_bytes": wire.out_bytes + wire.in_bytes,
            "stopped": True,
        }
    assert runs > 1 and steps == 3 * -(-rows // 32)
    model, _ = plain(run_spec, loader(rows=rows), 3)
    names = [name for name, _ in model.named_parameters()]
    ours, theirs = run.model().state_dict(), model.state_dict()
    if workers == 1:  # several see batch statistics of their own shares
        assert max(float((ours[n] - theirs[n]).abs().max()) for n in names) <= 1e-9


def test_a_budget_holds_when_a_worker_is_lost_in_the_middle(cluster: Cluster, tmp_path: Path) -> None:
    hook = once_after(12, GradientBucket, DirectWorker.die)
    session, run_spec = Session(cluster, 3, hook), spec(model=WIDE)
    run = session.train(run_spec, budgeted(session, run_spec, 2_000_000, epochs=9), tmp_path)
    wire = run.wire
    assert hook.fired and run.state == "stopped"  # type: ignore[attr-defined]
    assert wire.out_bytes + wire.in_bytes <= 2_000_000 and session.saved["path"].exists()
    assert (run.lost_samples, run.duplicated_samples) == (0, 0)


def test_what_a_budget_keeps_for_the_last_state_is_for_that_of_who_leaves(cluster: Cluster, tmp_path: Path) -> None:
    hook = once_after(9, StepApplied, lambda worker: worker.loop.leave("asked to leave"))
    session, run_spec = Session(cluster, 1, hook), spec(model=WIDE)
    state_bytes = 8 * 3 * sum(p.numel() for p in replica(run_spec).model.parameters())  # with Adam's two means
    limit = int(2.2 * state_bytes) + 200_000  # there and back once
    run = session.train(run_spec, budgeted(session, run_spec, limit, rows=1503), tmp_path)
    assert hook.fired and run.state == "stopped" and run.wire.out_bytes + run.wire.in_bytes <= limit  # type: ignore[attr-defined]
    saved = checkpoint.read(session.saved["path"])
    assert saved["step"] + 1 == len(run.history) >= 9
    assert (run.lost_samples, run.duplicated_samples) == (0, 0)


def test_who_breaks_when_nothing_can_be_sent_again_is_let_go(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    cluster.tell = told.append
    monkeypatch.setattr(Budget, "can_send_again", lambda self: False)
    hook = once_after(6, GradientBucket, DirectWorker.go_away)
    session, run_spec = Session(cluster, 2, hook), spec(model=WIDE)
    run = session.train(run_spec, budgeted(session, run_spec, 1 << 30), tmp_path)
    assert hook.fired and run.state == "done" and cluster.members()[0].state == "lost"  # type: ignore[attr-defined]
    assert any("of the budget are left" in sentence for sentence in told)
    assert (run.lost_samples, run.duplicated_samples) == (0, 0)


def test_a_newcomer_whose_state_has_no_room_stays_out(cluster: Cluster, tmp_path: Path) -> None:
    told: list[str] = []
    cluster.notice = told.append
    late: list[DirectWorker] = []

    def hook(worker: DirectWorker, message: Message) -> None:
        if isinstance(message, GradientBucket) and message.step == 3 and not late:
            late.append(DirectWorker(cluster, "late").start())

    session, run_spec = Session(cluster, 2, hook), spec(model=WIDE)
    need = forecast(session, run_spec, plan_for(loader(rows=203), loader(rows=60))).run_bytes
    assert need is not None
    run = session.train(run_spec, budgeted(session, run_spec, int(need * 1.12)), tmp_path)
    assert late and run.wire.out_bytes + run.wire.in_bytes <= need * 1.12
    assert any("can take no part in this run" in sentence for sentence in told) == (run.generations == 1)


def test_a_budget_too_small_for_one_step_is_refused_with_the_numbers(cluster: Cluster) -> None:
    session, run_spec = Session(cluster, 2), spec(model=WIDE)
    with pytest.raises(
        ConfigError, match=r"50\.0 kB is too small: .* to start, .* first step.* checkpoint.*Nothing was started"
    ):
        budgeted(session, run_spec, 50_000)


def test_a_budget_that_is_enough_changes_nothing(cluster: Cluster, tmp_path: Path) -> None:
    session, run_spec = Session(cluster, 1), spec()
    run = session.train(run_spec, replace(budgeted(session, run_spec, 1 << 40), val_feed=None), tmp_path)
    model, losses = plain(run_spec, loader(rows=203), 3)
    assert run.state == "done" and difference(run.model(), model) <= 1e-9 and len(losses) == len(run.history)
    assert not session.saved and run.report()["budget"]["stopped"] is False
