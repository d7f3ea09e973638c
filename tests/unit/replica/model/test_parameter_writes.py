from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from guava_nb.replica.model.parameter_writes import ParameterWrites


def assigned(layer: nn.Linear) -> None:
    layer.weight.data = torch.renorm(layer.weight.data, 2, 0, 0.1)


def copied(layer: nn.Linear) -> None:
    with torch.no_grad():
        torch.stack([p.mean() for p in layer.parameters()], out=torch.empty(2))
        layer.weight[0].copy_(torch.ones(3))


WRITES: dict[str, Callable[[nn.Linear], object]] = {
    "by data": lambda layer: layer.weight.data.clamp_(-10, 10),  # it changes no value yet
    "assigned": assigned,
    "a row": copied,
    "out": lambda layer: torch.mul(layer.weight.detach(), 2, out=layer.weight.data),
    "an embedding": lambda layer: functional.embedding(torch.tensor([1]), layer.weight, max_norm=0.1),
    "several": lambda layer: torch._foreach_mul_([layer.weight.data], 0.5),
}


@pytest.mark.parametrize("kind", WRITES)
def test_what_is_written_into_is_noted_and_put_back(kind: str) -> None:
    layer = nn.Linear(3, 4)
    first, writes = layer.weight.detach().clone(), ParameterWrites(dict(layer.named_parameters()))
    with writes:
        WRITES[kind](layer)
    assert writes.names == ("weight",) == tuple(writes.values())
    assert (kind == "by data") == torch.equal(layer.weight, first)
    writes.restore()
    assert torch.equal(layer.weight, first) and writes.names == ("weight",)


def test_a_forward_and_a_backward_write_into_no_parameter() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.LSTM(4, 2))
    writes = ParameterWrites(dict(model.named_parameters()))
    with writes:
        model(torch.rand(5, 3))[0].mul(2).add_(1).sum().backward()
    assert writes.names == ()
