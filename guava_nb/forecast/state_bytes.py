"""What a run's state takes on the wire, before and after it was trained, and what it takes to bring a worker to it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from guava_nb.cluster.traffic import Gauge, Traffic
from guava_nb.data.codec import pack
from guava_nb.protocol.messages import (
    CacheHeld,
    FetchState,
    LoadState,
    Prepare,
    Prepared,
    RunSpec,
    State,
    StateLoaded,
    Tree,
)
from guava_nb.replica.optimizer import build_optimizer
from guava_nb.sync.replica_set import ReplicaSet
from guava_nb.training.plan import TrainingPlan

__all__ = ["HASH", "STEP", "Asked", "coming_state", "starting", "state_bytes", "trained_state"]

#: A step in the middle of a run: numbers of three bytes.
STEP = 1000
HASH = "0" * 64
_KIND = "cpu, torch 2.0.0"
#: What a tensor's record takes more than that of an empty one: its shape, and where it lies.
_SPEC_BYTES = 14


@dataclass(frozen=True, slots=True)
class Asked:
    """What is to be forecast.

    Attributes:
        replica_set: of the run, its model as it is here.
        plan: of the run.
        workers: how many.
        spec: its record.
        held_before: part of the samples that workers hold already.
        optimizer_at_start: the state at the start has an optimizer's.
    """

    replica_set: ReplicaSet
    plan: TrainingPlan
    workers: int
    spec: RunSpec
    held_before: float = 0.0
    optimizer_at_start: bool = False

    def with_spec(self, spec: RunSpec) -> Asked:
        """The same run with another record, of the same model."""
        return replace(self, spec=spec)


def state_bytes(state: Any) -> tuple[Tree, int]:
    """Return the record of a state and the bytes of its tensors, which may be on torch's meta device."""
    seen: set[int] = set()
    total = 0

    def emptied(value: Any) -> Any:
        nonlocal total
        if isinstance(value, Tensor):
            if id(value) not in seen:
                seen.add(id(value))
                total += value.numel() * value.element_size() + _SPEC_BYTES
            return torch.empty(0, dtype=value.dtype)
        if isinstance(value, dict):
            return {key: emptied(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(map(emptied, value))
        return value

    tree, buffers = pack(emptied(state), "state")
    return tree, total + sum(buffer.nbytes for buffer in buffers)


def trained_state(replica_set: ReplicaSet, resolve: Callable[[str], Any]) -> dict[str, Any]:
    """Return the state of the model after a step, as to sizes: its optimizer's on the meta device where that goes."""
    state = replica_set.master.state()
    for device in ("meta", "cpu"):  # not every optimizer computes on the meta device
        with contextlib.suppress(Exception):
            state["optimizer"] = _stepped(replica_set, resolve, device)
            return state
    named = replica_set.master.model.named_parameters()  # one that takes its steps elsewhere: as large as Adam's
    state["optimizer"] = {name: [torch.empty_like(p, device="meta") for _ in range(2)] for name, p in named}
    return state


def _stepped(replica_set: ReplicaSet, resolve: Callable[[str], Any], device: str) -> Any:
    clones = {
        name: nn.Parameter(torch.zeros_like(value, device=device), requires_grad=value.requires_grad)
        for name, value in replica_set.master.model.named_parameters()
    }
    optimizer = build_optimizer(replica_set.spec.optimizer, list(clones.items()), resolve)
    for value in clones.values():
        value.grad = torch.zeros_like(value) if value.requires_grad else None
    optimizer.step()
    return optimizer.state_dict()


def coming_state(gauge: Gauge, asked: Asked, state: Any) -> Traffic:
    """Return what it takes to fetch the whole state from one worker."""
    tree, nbytes = state_bytes(state)
    run_id = asked.replica_set.run_id
    return gauge.back(State(1, run_id, STEP, tree), nbytes) + gauge.out(FetchState(1, run_id)) + gauge.acks(1, 1)


def starting(gauge: Gauge, asked: Asked, after: Any) -> Traffic:
    """Return what it takes to have one worker build the run and load its state."""
    replica_set, spec = asked.replica_set, asked.spec
    run_id = replica_set.run_id
    tree, nbytes = state_bytes(after if asked.optimizer_at_start else replica_set.master.state())
    total = gauge.out(Prepare(run_id, replica_set.cells, spec)) + gauge.back(
        Prepared(run_id=run_id, ok=True, layout=HASH)
    )
    total = total + gauge.out(LoadState(run_id, 1, -1, tree), nbytes)
    total = total + gauge.back(StateLoaded(run_id, -1, HASH, _KIND)) + gauge.acks(2, 2)
    if spec.cache is not None:
        total = total + gauge.back(CacheHeld(run_id, 0, bytes(16), spec.cache.budget_bytes))
    return total
