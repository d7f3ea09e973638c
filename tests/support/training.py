"""A small training problem, its plain PyTorch answer, and the same through a training job without a network."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from guava_nb.cluster.cluster import Cluster
from guava_nb.data.loader_feed import LoaderFeed
from guava_nb.data.split import share_ranges
from guava_nb.protocol.messages import Factory, RunSpec
from guava_nb.replica.replica import Replica
from guava_nb.replica.rounds.local_replica import whole_replica
from guava_nb.spec.cells import resolve
from guava_nb.sync.handover import fetch_between_runs
from guava_nb.sync.whole_replica_set import WholeReplicaSet
from guava_nb.training.job import TrainingJob
from guava_nb.training.plan import TrainingPlan
from guava_nb.training.run import Run
from tests.support.direct import RANDOM_STATE


class SmallNet(torch.nn.Module):
    """Two layers; optionally dropout and batch norm."""

    def __init__(self, dropout: float = 0.0, norm: bool = False) -> None:
        super().__init__()
        self.first = torch.nn.Linear(10, 16)
        self.norm = torch.nn.BatchNorm1d(16) if norm else torch.nn.Identity()
        self.drop = torch.nn.Dropout(dropout)
        self.last = torch.nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.drop(torch.relu(self.norm(self.first(x)))))


def dataset(rows: int = 101, dtype: torch.dtype = torch.float64) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(rows, 10, generator=generator, dtype=torch.float64).to(dtype)
    return TensorDataset(x, torch.randint(0, 4, (rows,), generator=generator))


def loader(rows: int = 101, batch_size: int = 32, dtype: torch.dtype = torch.float64, seed: int = 9) -> DataLoader[Any]:
    return DataLoader(
        dataset(rows, dtype), batch_size=batch_size, shuffle=True, generator=torch.Generator().manual_seed(seed)
    )


def spec(**changes: Any) -> RunSpec:
    fields: dict[str, Any] = {
        "model": Factory(f"{__name__}:SmallNet"),
        "criterion": Factory("CrossEntropyLoss"),
        "step": None,
        "optimizer": Factory("AdamW", {"lr": 0.01}),
        "scheduler": None,
        "precision": "fp64",
        "bucket_bytes": 1024,
        "hash_every_steps": 3,
        **changes,
    }
    return RunSpec(**fields)


def replica(run_spec: RunSpec) -> Replica:
    with RANDOM_STATE:
        return whole_replica(run_spec, lambda name: resolve(name, None), torch.device("cpu"))


def job_for(cluster: Cluster, run_spec: RunSpec, plan: TrainingPlan, run_id: str = "run-1") -> TrainingJob:
    replica_set = WholeReplicaSet(run_id, run_spec, (), replica(run_spec))

    def model() -> torch.nn.Module:
        fetch_between_runs(replica_set, cluster, 20)
        return replica_set.master.model

    return TrainingJob(replica_set, plan, cluster, model)


def plan_for(data: Any, epochs: int = 2, batch: str | None = None, **changes: Any) -> TrainingPlan:
    return TrainingPlan(LoaderFeed(data, batch=batch), None, epochs, **changes)


def plain(
    run_spec: RunSpec, data: Any, epochs: int = 2, accumulate: int = 1, limit: int | None = None
) -> tuple[torch.nn.Module, list[float]]:
    """The oracle: one process, whole batches, nothing of ours but the initial weights."""
    model = replica(run_spec).model
    optimizer = getattr(torch.optim, run_spec.optimizer.name)(model.parameters(), **run_spec.optimizer.args)
    schedule = None
    if run_spec.scheduler is not None:
        schedule = getattr(torch.optim.lr_scheduler, run_spec.scheduler.name)(optimizer, **run_spec.scheduler.args)
    assert run_spec.criterion is not None
    criterion = torch.nn.CrossEntropyLoss(reduction="sum", **run_spec.criterion.args)
    losses: list[float] = []
    model.train()
    for _ in range(epochs):
        group: list[Any] = []
        batches = list(data)
        for index, batch in enumerate(batches):
            group.append(batch)
            if len(group) < accumulate and index < len(batches) - 1:
                continue
            count = sum(int((y != criterion.ignore_index).sum()) for _, y in group)
            optimizer.zero_grad()
            total = sum(criterion(model(x), y) for x, y in group) / count
            total.backward()
            if run_spec.max_grad_norm is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), run_spec.max_grad_norm)
            optimizer.step()
            if schedule is not None:
                schedule.step()
            losses.append(float(total.detach()))
            group = []
            if limit is not None and len(losses) == limit:
                return model, losses
    return model, losses


def by_hand(
    run_spec: RunSpec, data: Any, workers: int, every: int, epochs: int = 2, shares: Sequence[float] | None = None
) -> tuple[torch.nn.Module, list[float]]:
    """The oracle: local SGD or DiLoCo as the papers have it, with nothing of ours but the initial weights and the cut."""
    rounds = run_spec.rounds
    assert rounds is not None
    model = replica(run_spec).model
    locals_ = [copy.deepcopy(model) for _ in range(workers)]
    inner = [
        getattr(torch.optim, run_spec.optimizer.name)(one.parameters(), **run_spec.optimizer.args) for one in locals_
    ]
    schedules = [torch.optim.lr_scheduler.StepLR(one, **run_spec.scheduler.args) for one in inner if run_spec.scheduler]
    outer = torch.optim.SGD(
        model.parameters(), rounds.outer_lr, rounds.outer_momentum, nesterov=rounds.outer_momentum > 0
    )
    criterion, losses = torch.nn.CrossEntropyLoss(reduction="sum"), []
    for _ in range(epochs):
        batches = list(data)
        for start in range(0, len(batches), every):
            seen, total = [0] * workers, 0.0
            for x, y in batches[start : start + every]:
                for k, (first, last) in enumerate(share_ranges(len(x), shares or [1.0] * workers)):
                    if last > first:
                        loss = criterion(locals_[k](x[first:last]), y[first:last])
                        inner[k].zero_grad()
                        (loss / (last - first)).backward()
                        if run_spec.max_grad_norm is not None:
                            torch.nn.utils.clip_grad_norm_(locals_[k].parameters(), run_spec.max_grad_norm)
                        inner[k].step()
                        seen[k], total = seen[k] + last - first, total + float(loss.detach())
                    if schedules:
                        schedules[k].step()
            losses.append(total / sum(seen))
            with torch.no_grad():
                for parameter, *ends in zip(model.parameters(), *(one.parameters() for one in locals_), strict=True):
                    parameter.grad = sum(n / sum(seen) * (parameter - end) for n, end in zip(seen, ends, strict=True))  # type: ignore[assignment]
            outer.step()
            for one in locals_:
                one.load_state_dict(model.state_dict())
    return model, losses


def difference(a: torch.nn.Module, b: torch.nn.Module) -> float:
    """Largest absolute difference of any parameter or buffer."""
    ours, theirs = a.state_dict(), b.state_dict()
    assert ours.keys() == theirs.keys()
    return max(float((_wide(ours[k]) - _wide(theirs[k])).abs().max()) for k in ours)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def losses_of(run: Run) -> Sequence[float]:
    return [record["loss"] for record in run.history]
