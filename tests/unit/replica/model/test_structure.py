from __future__ import annotations

import collections
import enum
import functools
import random
import threading
import types
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from guava_nb.protocol.messages import Cell
from guava_nb.replica.model.structure import first_difference
from guava_nb.spec.cells import build_module


@dataclass
class Settings:
    width: int = 3
    names: list[str] = field(default_factory=lambda: ["a"])


class Kind(enum.Enum):
    ONE = 1


class Holder(nn.Module):
    """Holds what users' models hold."""

    def __init__(self, slope: float = 0.1) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 3)
        self.layer = nn.TransformerEncoderLayer(4, 2, 4, activation=nn.functional.gelu)
        self.attention = nn.MultiheadAttention(4, 2)
        self.norm = nn.BatchNorm1d(3)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))
        self.old = nn.utils.spectral_norm(nn.Linear(3, 3))
        self.settings, self.kind, self.lock = Settings(), Kind.ONE, threading.Lock()
        self.table = np.arange(3)
        self.fixed = torch.arange(3.0)
        self.activation = functools.partial(nn.functional.leaky_relu, negative_slope=slope)
        self.also = lambda x: x * slope
        self.again = self.lstm
        self.listed = [self.lstm, {"norm": self.norm}]
        self.own_weight = [self.norm.weight]
        self.random, self.generator = random.Random(1), torch.Generator()
        self.nan, self.device, self.dtype = float("nan"), torch.device("cpu"), torch.float32
        self.queue: Any = collections.deque([1, 2], maxlen=4)
        self.groups = {"a": {1, 2}, "b": frozenset({"x"})}
        self.itself = self.method

    def method(self, x: Tensor) -> Tensor:
        return x


def difference(given: nn.Module, built: nn.Module, any_float: bool = False, hidden: bool = True) -> str:
    return first_difference(given, built, any_float=any_float, hidden=hidden)


def test_two_models_of_one_class_are_alike_whatever_their_weights() -> None:
    assert difference(Holder(), Holder()) == ""
    trained = Holder().eval().requires_grad_(False)
    assert difference(trained, Holder()) == ""
    assert difference(Holder().double(), Holder(), any_float=True) == ""


def _set(name: str, value: Any) -> Any:
    def change(model: Holder) -> None:
        owner, _, last = name.rpartition(".")
        setattr(functools.reduce(getattr, owner.split("."), model) if owner else model, last, value)

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_set("settings", Settings(width=4)), "'settings'"),
        (_set("settings.names", ["b"]), "'settings'"),
        (_set("table", np.arange(1, 4)), "'table' is a tensor of shape"),
        (_set("fixed", torch.ones(3)), "'fixed'"),
        (_set("activation", torch.nn.functional.relu), "'activation'"),
        (_set("also", lambda x: x * 0.1 + 1), "'also'"),
        (_set("queue", collections.deque([1, 3])), "'queue'"),
        (_set("groups", {"a": {1, 3}, "b": frozenset({"x"})}), "'groups'"),
        (_set("listed", []), r"'listed' is none"),
        (_set("own_weight", [nn.Parameter(torch.ones(3))]), "'own_weight'"),
        (_set("norm.momentum", 0.5), "module 'norm', attribute 'momentum' is 0.5 in"),
        (_set("new", 1), "'new' is 1 in the registered model and nothing"),
        (_set("layer.activation_relu_or_gelu", 1), "'layer', attribute 'activation_relu_or_gelu'"),
        (_set("itself", print), "'itself' is print"),
        (lambda model: model.norm.register_full_backward_hook(print), "'norm', backward hooks is print"),
        (lambda model: model.norm.register_buffer("running_mean", torch.zeros(3), persistent=False), "non_persistent"),
        (lambda model: model.norm.double(), "the dtype of norm.weight is float64"),
        (
            lambda model: nn.utils.parametrize.remove_parametrizations(model.normed, "weight"),
            "module 'normed' is Linear",
        ),
    ],
)
def test_the_first_difference_is_named(change: Any, says: str) -> None:
    model = Holder()
    change(model)
    with pytest.raises(AssertionError, match=says):
        assert difference(model, Holder()) == ""
    with pytest.raises(AssertionError):
        assert difference(Holder(), model) == ""


def test_closures_and_bound_arguments_count() -> None:
    assert "'activation'" in difference(Holder(0.2), Holder(0.1))
    a, b = Holder(), Holder()
    b.activation = a.activation
    a.also = Holder(0.3).also
    assert "'also'" in difference(a, b)


def test_hidden_buffers_count_only_where_nothing_else_carries_them() -> None:
    a, b = nn.Identity(), nn.Identity()
    for model, value in ((a, 0.0), (b, 1.0)):
        model.register_buffer("mask", torch.tensor([value, float("nan")]), persistent=False)
    assert difference(a, b, hidden=False) == ""
    assert "buffer mask" in difference(a, b)
    b.mask.copy_(a.mask)
    assert difference(a, b) == ""


def test_a_hidden_buffer_may_have_another_float_dtype_where_the_run_has_one_for_all() -> None:
    a, b = nn.Identity(), nn.Identity()
    for model in (a, b):
        model.register_buffer("mask", torch.tensor([0.1, float("nan")]), persistent=False)
    a.double()
    assert difference(a, b, any_float=True) == ""
    assert "dtype of mask" in difference(a, b)
    a.mask.add_(1e-9)
    assert "buffer mask" in difference(a, b, any_float=True)


def test_memory_that_only_one_of_them_shares_is_named() -> None:
    a, b = Holder(), Holder()
    a.layer.linear2.weight.data = a.layer.linear1.weight.data
    for one, other in ((a, b), (b, a)):
        told = difference(one, other)
        assert "layer.linear1.weight and layer.linear2.weight" in told and "in the same memory" in told
    b.layer.linear2.weight.data = b.layer.linear1.weight.data
    assert difference(a, b) == ""


CELL = """
from torch import nn

class Base(nn.Module):
    def act(self, x):
        return x * {factor}

class Net(Base):
    limit = {limit}
    def forward(self, x):
        return [self.act(y) for y in x]
"""


def module_of(factor: int = 2, limit: int = 3, before: str = "") -> types.ModuleType:
    return build_module([Cell("net", before + CELL.format(factor=factor, limit=limit))])


def test_an_instance_that_is_older_than_its_cell_is_found() -> None:
    old = module_of().Net()
    assert difference(old, module_of(before="# a comment\n\n").Net()) == ""
    for newer in (module_of(factor=3), module_of(limit=4)):
        assert "class Net whose code is not that" in difference(old, newer.Net())
