from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from guava_nb.errors import TrainingError
from guava_nb.replica.model.parameter_watch import GradientSwitches, ParameterWatch


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
def test_other_parameters_are_refused_whoever_trains(change: Any, says: str) -> None:
    model = net()
    watch = ParameterWatch(model)
    watch.check()
    change(model)
    with pytest.raises(TrainingError, match=says):
        watch.check()


@pytest.mark.filterwarnings("ignore:.torch.jit.trace")
def test_a_part_that_torch_jit_made_is_no_change() -> None:
    model = nn.Sequential(torch.jit.trace(nn.Linear(2, 2), torch.zeros(1, 2)), nn.Linear(2, 2))
    watch = ParameterWatch(model)
    model(torch.ones(1, 2)).sum().backward()
    watch.check()
    model[1].bias = None
    with pytest.raises(TrainingError, match=r"'1\.bias' was removed"):
        watch.check()


@pytest.mark.parametrize(("change", "says"), [(_add, r"'3\.weight' was added"), (_remove, r"'0\.bias' was removed")])
def test_where_others_take_the_place_of_parameters_their_names_are_watched(change: Any, says: str) -> None:
    model = net()
    watch = ParameterWatch(model, by_name=True)
    _replace(model)
    watch.check()
    change(model)
    with pytest.raises(TrainingError, match=says):
        watch.check()


def test_parts_without_parameters_may_be_swapped_and_values_changed() -> None:
    model = net()
    watch = ParameterWatch(model)
    model[1] = nn.Tanh()
    model[0].weight.data = torch.ones(2, 2)
    watch.check()
    model.append(nn.Tanh())
    watch.check()
    switches = GradientSwitches(dict(model.named_parameters()))
    model[0].requires_grad_(False)  # has no gradient from now on, as in a plain loop
    assert switches.frozen() == switches.frozen(is_alone=True) == ("0.weight", "0.bias")


def test_gradients_that_begin_later_are_refused_where_they_are_exchanged() -> None:
    model = net()
    switches = GradientSwitches(dict(model.named_parameters()))
    model[2].bias.requires_grad_(True)
    with pytest.raises(TrainingError, match=r"'2\.bias' began to take a gradient during the run"):
        switches.frozen()


@pytest.mark.parametrize("had_samples", [False, True])
def test_switches_of_others_are_taken_over_where_the_step_had_no_samples(had_samples: bool) -> None:
    model = net()
    switches = GradientSwitches(dict(model.named_parameters()))
    if had_samples:
        switches.frozen()
    switches.end_step(("0.weight",))
    assert model[0].weight.requires_grad is had_samples and model[0].bias.requires_grad
    assert not model[2].weight.requires_grad  # took none from the beginning
    switches.end_step(None)  # nobody told
    assert model[0].weight.requires_grad is had_samples
    switches.end_step(())
    assert model[0].weight.requires_grad


def test_a_shard_that_does_not_count_is_no_own_one() -> None:
    model = net()
    switches = GradientSwitches(dict(model.named_parameters()))
    switches.frozen()
    switches.forget()
    switches.end_step(("0.weight",))
    assert not model[0].weight.requires_grad
