"""The likeness of a model that lives elsewhere: the same layout and state dict, whatever the model looks like."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from guava_nb.errors import ConfigError, GuavaError, PreparationError
from guava_nb.protocol.messages import TensorInfo
from guava_nb.replica.buckets import build_layout
from guava_nb.replica.model.resident import HeldOptimizer, ResidentParts, describe_model, likeness


class Odd(nn.Module):
    """Ties, a module that stands twice, buffers before parameters, a hidden buffer, a missing bias, a frozen weight."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3, affine=False)
        self.first = nn.Linear(3, 3, bias=False)
        self.again = self.first
        self.last = nn.Linear(3, 3, dtype=torch.float64)
        self.tied = nn.Embedding(3, 3)
        self.tied.weight = self.first.weight
        self.last.weight.requires_grad = False
        self.register_buffer("hidden", torch.zeros(2), persistent=False)
        self.register_buffer("scale", torch.ones((), dtype=torch.bfloat16))
        self.own = nn.Parameter(torch.zeros(()))


LAYERS = {
    "linear": lambda: nn.Linear(3, 3),
    "norm": lambda: nn.BatchNorm1d(3),
    "bare": lambda: nn.ReLU(),
    "half": lambda: nn.Linear(3, 2).half(),
    "deep": lambda: nn.Sequential(nn.ReLU(), nn.Sequential(nn.LayerNorm(3), nn.BatchNorm1d(3, affine=False))),
    "odd": Odd,
    "attention": lambda: nn.MultiheadAttention(4, 2),
}


@settings(deadline=None)
@given(st.lists(st.sampled_from(sorted(LAYERS)), min_size=1, max_size=5), st.booleans(), st.integers(8, 4096))
def test_layout_and_state_are_those_of_the_model(names: list[str], twice: bool, bucket_bytes: int) -> None:
    model = nn.Sequential(*[LAYERS[name]() for name in names])
    if twice:
        model.append(model[0])
    made = likeness(describe_model(model))
    assert build_layout(made, bucket_bytes) == build_layout(model, bucket_bytes)
    assert build_layout(made, bucket_bytes).digest() == build_layout(model, bucket_bytes).digest()
    ours, theirs = made.state_dict(), model.state_dict()
    assert {name: (t.shape, t.dtype) for name, t in ours.items()} == {n: (t.shape, t.dtype) for n, t in theirs.items()}
    made.load_state_dict(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert [name for name, _ in made.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert [name for name, _ in made.named_buffers()] == [name for name, _ in model.named_buffers()]


def test_ties_stay_ties_and_nothing_computes() -> None:
    made = likeness(describe_model(Odd()))
    assert made.get_parameter("tied.weight") is made.get_parameter("first.weight") is made.get_parameter("again.weight")
    with pytest.raises(GuavaError, match="state_dict"):
        made(torch.zeros(1))
    with pytest.raises(PreparationError, match="'float3'"):
        likeness([TensorInfo("w", (1,), "float3", "parameter")])


def test_the_optimizer_s_state_is_kept_as_it_came() -> None:
    model = nn.Linear(2, 2)
    theirs = torch.optim.Adam([{"params": [model.weight], "lr": 0.5}, {"params": [model.bias]}])
    model(torch.ones(1, 2)).sum().backward()
    theirs.step()
    held = HeldOptimizer(likeness(describe_model(model)).parameters())
    held.load_state_dict(theirs.state_dict())
    other = torch.optim.Adam([{"params": [model.weight]}, {"params": [model.bias]}])
    other.load_state_dict(held.state_dict())
    assert other.param_groups[0]["lr"] == 0.5 and torch.equal(
        other.state[model.bias]["exp_avg"], theirs.state[model.bias]["exp_avg"]
    )


def test_what_a_worker_has_of_its_own() -> None:
    model = nn.Linear(2, 2)
    parts = ResidentParts(model, nn.MSELoss(), service="validation")
    assert parts.names() == ("model", "criterion", "service")
    assert parts.find("@model") is model
    for name in ("@optimizer", "@service", "@find"):
        with pytest.raises(ConfigError, match="no .* of its own"):
            parts.find(name)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    assert ResidentParts(model, optimizer=optimizer).find("@optimizer")([]) is optimizer  # type: ignore[operator]
