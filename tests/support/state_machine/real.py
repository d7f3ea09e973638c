"""A small model for the state machine, trained by the real replicas, and by plain PyTorch."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from typing import Any

import torch

from guava_nb.data.loader_feed import LoaderFeed
from guava_nb.protocol.messages import CacheSpec, Factory, RunSpec
from guava_nb.replica.replica import Replica
from guava_nb.spec.cells import resolve
from guava_nb.sync.whole_replica_set import WholeReplicaSet
from guava_nb.training.plan import TrainingPlan

__all__ = ["BATCHES", "EPOCHS", "Tiny", "difference", "plain_after", "plan_of", "replicas_of", "spec_of"]

BATCHES, ROWS, EPOCHS = 3, 4, 2


class Tiny(torch.nn.Module):
    """Two layers, and a buffer that counts the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(3, 4)
        self.last = torch.nn.Linear(4, 2)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += len(x)
        return self.last(torch.tanh(self.first(x)))


@functools.cache
def _batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randn(ROWS, 3, generator=generator, dtype=torch.float64), torch.randint(0, 2, (ROWS,), generator=generator))
        for _ in range(BATCHES)
    ]  # fmt: skip


def spec_of(site: str, cached: bool) -> RunSpec:
    """The record of the run."""
    return RunSpec(
        model=Factory(f"{__name__}:Tiny"), criterion=Factory("CrossEntropyLoss"), step=None,
        optimizer=Factory("AdamW", {"lr": 0.01}), scheduler=None, optimizer_site=site, precision="fp64", bucket_bytes=64,
        hash_every_steps=1, buffers="sum", cache=CacheSpec("memory", 1 << 20) if cached else None,
    )  # fmt: skip


def _replica(spec: RunSpec) -> Replica:
    return Replica(spec, lambda name: resolve(name, None), torch.device("cpu"))


def replicas_of(spec: RunSpec) -> WholeReplicaSet:
    """The replicas of a run that begins."""
    return WholeReplicaSet("run-1", spec, (), _replica(spec))


def plan_of(validates: bool, **changes: Any) -> TrainingPlan:
    """The plan of the run."""
    val = LoaderFeed(_batches()[:2]) if validates else None
    return TrainingPlan(LoaderFeed(_batches()), val, EPOCHS, prefetch_bytes=0, **changes)


@functools.cache
def plain_after() -> list[dict[str, torch.Tensor]]:
    """The state of the model after each number of steps of one plain process, from 0."""
    model = _replica(spec_of("workers", False)).model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    states = [copy.deepcopy(model.state_dict())]
    model.train()
    for x, y in _batches() * EPOCHS:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        states.append(copy.deepcopy(model.state_dict()))
    return states


def difference(state: Mapping[str, torch.Tensor], steps: int) -> float:
    """Largest difference of a model's state to that of a plain process after so many steps."""
    ours, plain = state, plain_after()[steps]
    return max(float((ours[name] - plain[name]).abs().max()) for name in plain)
