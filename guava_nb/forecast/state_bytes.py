"""What a run's state takes on the wire, before and after it was trained, and what it takes to bring a worker to it."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from guava_nb.cluster.traffic import Traffic
from guava_nb.data.codec import pack
from guava_nb.forecast.run_facts import HASH, RunFacts
from guava_nb.protocol import messages
from guava_nb.replica.optimizer import build_optimizer

__all__ = ["coming_state", "starting", "state_bytes", "trained_state"]

_KIND = "cpu, torch 2.0.0"
#: What a tensor's record takes more than that of an empty one: its shape, and where it lies.
_SPEC_BYTES = 14


def state_bytes(state: Any) -> tuple[messages.Tree, int]:
    """Return the record of a state and the bytes of its tensors, which may be on torch's meta device."""
    tensors = {id(leaf): leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor)}.values()
    tree, buffers = pack(tree_map_only(Tensor, lambda tensor: torch.empty(0, dtype=tensor.dtype), state), "state")
    nbytes = sum(tensor.numel() * tensor.element_size() + _SPEC_BYTES for tensor in tensors)
    return tree, nbytes + sum(buffer.nbytes for buffer in buffers)


def trained_state(run: RunFacts) -> dict[str, Any]:
    """Return the state of the model after a step, as to sizes: its optimizer's on the meta device where that goes."""
    state = run.replica_set.master.state()
    for device in ("meta", "cpu"):  # not every optimizer computes on the meta device
        with contextlib.suppress(Exception):
            state["optimizer"] = _stepped(run, device)
            return state
    named = run.model.named_parameters()  # one that takes its steps elsewhere: as large as Adam's
    state["optimizer"] = {name: [torch.empty_like(p, device="meta") for _ in range(2)] for name, p in named}
    return state


def _stepped(run: RunFacts, device: str) -> Any:
    clones = {
        name: nn.Parameter(torch.zeros_like(value, device=device), requires_grad=value.requires_grad)
        for name, value in run.model.named_parameters()
    }
    optimizer = build_optimizer(run.replica_set.spec.optimizer, list(clones.items()), run.resolve)
    for value in clones.values():
        value.grad = torch.zeros_like(value) if value.requires_grad else None
    optimizer.step()
    return optimizer.state_dict()


def coming_state(run: RunFacts, after: Any) -> Traffic:
    """Return what it takes to fetch the whole state from one worker."""
    tree, nbytes = state_bytes(after)
    return run.back(messages.State, nbytes, state=tree) + run.out(messages.FetchState) + run.acks(1, 1)


def starting(run: RunFacts, after: Any) -> Traffic:
    """Return what it takes to have one worker build the run and load its state."""
    tree, nbytes = state_bytes(after if run.trained else run.replica_set.master.state())
    total = run.out(messages.Prepare, cells=run.replica_set.cells, spec=run.spec)
    total = total + run.back(messages.Prepared, layout=HASH)
    total = total + run.out(messages.LoadState, nbytes, step=-1, state=tree) + run.acks(2, 2)
    total = total + run.back(messages.StateLoaded, step=-1, parameter_hash=HASH, device_kind=_KIND)
    if run.spec.cache is not None:
        total = total + run.back(messages.CacheHeld, digest=bytes(16), budget_bytes=run.spec.cache.budget_bytes)
    return total
