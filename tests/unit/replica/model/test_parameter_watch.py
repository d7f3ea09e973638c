from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from guava_nb.errors import TrainingError
from guava_nb.replica.model.parameter_watch import ParameterWatch


def net() -> Any:
    return nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2).requires_grad_(False))


def _add(model: Any) -> None:
    model.append(nn.Linear(2, 2))


def _replace(model: Any) -> None:
    model[0].weight = nn.Parameter(torch.zeros(2, 2))


def _remove(model: Any) -> None:
    model[0].bias = None


@pytest.mark.parametrize(
    ("change", "says"),
    [(_add, r"'3\.weight' was added"), (_replace, r"'0\.weight' was replaced"), (_remove, r"'0\.bias' was removed")],
)
@pytest.mark.parametrize("exchanged", [False, True])
def test_other_parameters_are_refused_whoever_trains(change: Any, says: str, exchanged: bool) -> None:
    model = net()
    watch = ParameterWatch(model)
    watch.check(exchanged)
    change(model)
    with pytest.raises(TrainingError, match=says):
        watch.check(exchanged)


def test_parts_without_parameters_may_be_swapped_and_values_changed() -> None:
    model = net()
    watch = ParameterWatch(model)
    model[1] = nn.Tanh()
    model[0].weight.data = torch.ones(2, 2)
    watch.check(True)
    model.append(nn.Tanh())
    watch.check(True)
    model[0].requires_grad_(False)  # has no gradient from now on, as in a plain loop
    watch.check(True)


def test_gradients_that_begin_later_are_refused_where_they_are_exchanged() -> None:
    model = net()
    watch = ParameterWatch(model)
    model[2].bias.requires_grad_(True)
    watch.check(False)
    with pytest.raises(TrainingError, match=r"'2\.bias' began to take a gradient during the run"):
        watch.check(True)
