"""A small training problem, its plain PyTorch answer, and the same through a training job without a network."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters
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
from guava_nb.wire_formats.registry import WIRE_FORMATS
from tests.support.direct import RANDOM_STATE
from tests.unit.outer_methods.test_outer_methods import SparseLoCo


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
    run_spec: RunSpec,
    data: Any,
    workers: int,
    every: int,
    epochs: int = 2,
    shares: Sequence[float] | None = None,
) -> tuple[torch.nn.Module, list[float]]:
    """The oracle: local SGD, DiLoCo or SparseLoCo as the papers have them, with nothing of ours but the initial weights, the
    cut, and the rounding of single messages. With a delay what was sent at the end of a round comes so many steps later, and each
    worker keeps what its steps came to meanwhile (DaSGD, arXiv 2006.00441), or a part of its weights (Streaming DiLoCo with one
    fragment, arXiv 2501.18512, algorithm 2).
    """
    rounds = run_spec.rounds
    assert rounds is not None
    model = replica(run_spec).model
    travelled = Messages(run_spec, workers)
    locals_ = [copy.deepcopy(model) for _ in range(workers)]
    inner = [
        getattr(torch.optim, run_spec.optimizer.name)(one.parameters(), **run_spec.optimizer.args) for one in locals_
    ]
    schedules = [torch.optim.lr_scheduler.StepLR(one, **run_spec.scheduler.args) for one in inner if run_spec.scheduler]
    outer = torch.optim.SGD(
        model.parameters(), rounds.outer_lr, rounds.outer_momentum, nesterov=rounds.outer_momentum > 0
    )
    criterion, losses = torch.nn.CrossEntropyLoss(reduction="sum"), []
    waiting: dict[int, Any] = {}  # what those workers had sent that have not mixed in the last outer step
    for _ in range(epochs):
        batches = list(data)
        for start in range(0, len(batches), every):
            seen, total, taken = [0] * workers, 0.0, batches[start : start + every]
            for number, (x, y) in enumerate(taken):
                if number == min(rounds.sync_delay, len(taken) - 1):
                    for k in mix(locals_, model, rounds.mixing, waiting):
                        travelled.keep(k, locals_[k])
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
                begun = parameters_to_vector(reversed(list(model.parameters())))
                ended = [parameters_to_vector(reversed(list(one.parameters()))) for one in locals_]
                ways = {
                    k: (begun - end) * (1 if travelled.is_partial else n / sum(seen))
                    for k, (n, end) in enumerate(zip(seen, ended, strict=True))
                    if n
                }
                for parameter in model.parameters():
                    parameter.grad = torch.empty_like(parameter)
                vector_to_parameters(travelled.sum_of(ways), [p.grad for p in reversed(list(model.parameters()))])  # type: ignore[misc]
            outer.step()
            on_the_way = [k for k, n in enumerate(seen) if n and rounds.sync_delay and workers > 1]
            waiting = {k: copy.deepcopy(locals_[k]) for k in on_the_way}
            for k in set(range(workers)) - set(on_the_way):
                locals_[k].load_state_dict(model.state_dict())
                travelled.keep(k, locals_[k])
    return model, losses


@torch.no_grad()
def mix(
    locals_: Sequence[torch.nn.Module],
    model: torch.nn.Module,
    mixing: float | None,
    waiting: dict[int, torch.nn.Module],
) -> list[int]:
    """Of the oracle: the outer step reaches the workers that wait for it; return which they were."""
    for k, sent in waiting.items():
        triples = zip(locals_[k].parameters(), sent.parameters(), model.parameters(), strict=True)
        for own, before, common in triples:
            own.copy_(common + (own - before) if mixing is None else mixing * own + (1 - mixing) * common)
    reached = list(waiting)
    waiting.clear()
    return reached


class Messages:
    """Of the oracle: what arrives of the workers' ways, and what each sender still owes, in one flat tensor each."""

    def __init__(self, run_spec: RunSpec, workers: int) -> None:
        assert run_spec.rounds is not None
        self.rounds, self.is_sparse = run_spec.rounds, run_spec.rounds.outer == "sparse"
        self.is_partial = run_spec.rounds.outer == "partial" and workers > 1
        self.dense, self.chunk = WIRE_FORMATS[run_spec.wire], 65536 if run_spec.rounds.bits == 1 else 4096
        self.owed = [torch.zeros(()) for _ in range(workers + 1)]  # the last is the hub's

    def _sent(self, sender: int, values: torch.Tensor, count: int = 0) -> torch.Tensor:
        values = values + self.owed[sender] * (
            self.rounds.decay if self.is_sparse and sender < len(self.owed) - 1 else 1.0
        )
        if self.is_sparse:
            arrived = SparseLoCo(count, self.chunk, self.rounds.bits, 0.0).compressed(values)
        else:
            arrived = self.dense.decode(self.dense.encode(values), values.numel(), values.dtype)
        self.owed[sender] = values - arrived
        return arrived

    def _mean_of_senders(self, ways: dict[int, torch.Tensor], count: int) -> torch.Tensor:
        arrived = {k: SparseLoCo(count, self.chunk, self.rounds.bits, 0.0).compressed(way) for k, way in ways.items()}
        for k, way in ways.items():
            self.owed[k] = way - arrived[k]
        found = torch.stack(list(arrived.values()))
        return found.sum(0) / (found != 0).sum(0).clamp(min=1)

    def keep(self, worker: int, model: torch.nn.Module) -> None:
        """Have a worker begin with what it did not send of its own way."""
        if self.is_partial:
            parameters = list(reversed(list(model.parameters())))
            vector_to_parameters(parameters_to_vector(parameters) - self.owed[worker], parameters)

    def sum_of(self, ways: dict[int, torch.Tensor]) -> torch.Tensor:
        if len(self.owed) == 2:  # a lone worker sends nothing
            return ways[0]
        count = max(1, round(self.rounds.density * self.chunk))
        if self.is_partial:
            return self._mean_of_senders(ways, count)
        total = torch.stack([self._sent(k, way, count) for k, way in ways.items()]).sum(0)
        if not self.is_sparse:
            return self._sent(-1, total)
        # Two workers get each other's messages; more get the sum, made sparse once more.
        return total if len(ways) <= 2 else self._sent(len(self.owed) - 1, total, count)


def difference(a: torch.nn.Module, b: torch.nn.Module) -> float:
    """Largest absolute difference of any parameter or buffer."""
    ours, theirs = a.state_dict(), b.state_dict()
    assert ours.keys() == theirs.keys()
    return max(float((_wide(ours[k]) - _wide(theirs[k])).abs().max()) for k in ours)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def losses_of(run: Run) -> Sequence[float]:
    return [record["loss"] for record in run.history]
