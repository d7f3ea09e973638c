"""Owners of whole parameters under ZeRO 1."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from guava_nb.parallel.replicas.zero1 import _share_after, owners

sizes = st.integers(0, 9)


@given(st.lists(sizes, min_size=1, max_size=8), st.integers(1, 4))
def test_owners_share_alike(lengths: list[int], ranks: int) -> None:
    named = {f"p{i}": nn.Parameter(torch.empty(n)) for i, n in enumerate(lengths)}
    owner = owners(named, ranks)
    assert set(owner) == set(named)
    load = [sum(max(1, named[n].numel()) for n, rank in owner.items() if rank == r) for r in range(ranks)]
    assert max(load) - min(load) <= max(1, *lengths)


class _Own(torch.optim.SGD):
    """A user's optimizer whose step calls that of its base class."""

    def step(self, closure=None):  # type: ignore[no-untyped-def, override]
        return super().step(closure)


def test_each_step_shares_once_whatever_optimizers_were_made_before() -> None:
    """torch runs the hooks of a step once more where the base class was ever made: ranks would send unlike often."""
    parameter = nn.Parameter(torch.ones(2))
    torch.optim.SGD([parameter], lr=0.1)
    optimizer, shared = _Own([parameter], lr=0.5), []
    _share_after(optimizer, lambda: shared.append(parameter.tolist()))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for _ in range(2):
        parameter.grad = torch.ones(2)
        optimizer.step()
        schedule.step()
    assert torch.allclose(torch.tensor(shared), torch.tensor([[0.5, 0.5], [0.45, 0.45]]))
