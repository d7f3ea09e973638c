"""Sums of gradients where replicas have none of some parameters: the other replica is played by numbers that are added."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from guava_nb.parallel.replicas import gradient_sum
from guava_nb.parallel.replicas.gradient_sum import GradientSum


@pytest.fixture
def peer(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """What the other replica sends, bucket by bucket."""
    sends: list[Tensor] = []

    def all_reduce(flat: Tensor, group: Any, async_op: bool) -> Any:
        flat.add_(sends.pop(0))
        return SimpleNamespace(wait=lambda: None)

    fake = SimpleNamespace(get_backend=lambda group: "gloo", get_world_size=lambda group: 2, all_reduce=all_reduce)
    monkeypatch.setattr(gradient_sum, "dist", fake)
    return sends


def parameters() -> dict[str, nn.Parameter]:
    channels_last = torch.zeros(1, 2, 2, 2).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return {
        "a": nn.Parameter(torch.zeros(2)),
        "b": nn.Parameter(torch.zeros(3)),
        "c": nn.Parameter(torch.zeros(1)),
        "d": nn.Parameter(channels_last),
        "half": nn.Parameter(torch.zeros(2, dtype=torch.bfloat16)),
    }


def test_gradients_are_sums_and_views_where_that_is_possible(peer: list[Tensor]) -> None:
    named = parameters()
    for name, parameter in named.items():
        if name != "c":
            parameter.grad = torch.ones_like(parameter)
    # One bucket, the last parameter first; then who has a gradient.
    peer += [torch.tensor([2.0] * 2 + [3.0] * 8 + [0.0] + [4.0] * 3 + [5.0] * 2 + [1, 1, 0, 1, 1])]
    summing = GradientSum(named, None)  # type: ignore[arg-type]
    apart = summing.finish()
    assert apart is not None and float(apart) == 0.0
    assert named["c"].grad is None
    sums = {name: p.grad.float().flatten().tolist() for name, p in named.items() if p.grad is not None}
    assert sums == {"a": [6.0] * 2, "b": [5.0] * 3, "d": [4.0] * 8, "half": [3.0] * 2}
    assert named["d"].grad.stride() == named["d"].stride() and named["half"].grad.dtype is torch.bfloat16  # type: ignore[union-attr]
    assert named["a"].grad.untyped_storage().data_ptr() == named["b"].grad.untyped_storage().data_ptr()  # type: ignore[union-attr]


@pytest.mark.parametrize("here", [True, False])
def test_a_gradient_that_one_replica_has_counts_on_both(peer: list[Tensor], here: bool) -> None:
    named = {"a": nn.Parameter(torch.zeros(2)), "b": nn.Parameter(torch.zeros(1))}
    named["b"].grad = torch.ones(1)
    if here:
        named["a"].grad = torch.ones(2)
    peer += [torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0] if here else [1.0, 7.0, 8.0, 1.0, 1.0])]
    summing = GradientSum(named, None)  # type: ignore[arg-type]
    apart = summing.finish()
    assert apart is not None and float(apart) > 0.0
    assert (named["a"].grad is None) is not here
    summing.settle()
    assert named["a"].grad is not None and named["a"].grad.tolist() == ([1.0, 1.0] if here else [7.0, 8.0])
    assert named["b"].grad.tolist() == [2.0]
