"""What stages share: a change of it is refused, what nobody changes and what is filled first is not."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from guava_nb.errors import ConfigError
from guava_nb.parallel.pipeline.shared_state import SharedState


class Layer(nn.Linear):
    def __init__(self, **own: Any) -> None:
        super().__init__(2, 2)
        for name, value in own.items():
            setattr(self, name, value)


def checked(layer: nn.Module, other: nn.Module, change: Callable[[], object]) -> None:
    """Go through a batch in which the first of two stages does this."""
    shared = SharedState({0: [nn.Sequential(layer)], 1: [nn.Sequential(other)]}, 0)
    shared.begin()
    change()
    shared.check()


@pytest.mark.parametrize(
    ("value", "change"),
    [
        ({"ticks": 0}, lambda value: value.update(ticks=1)),
        ([0.5], lambda value: value.__setitem__(0, 0.25)),
        ([torch.zeros(2)], lambda value: value.__setitem__(0, torch.ones(2))),
        (torch.zeros(2), lambda value: value.add_(1)),
        (torch.zeros(300, 300), lambda value: value.add_(1)),
        (SimpleNamespace(deep={"n": [1]}), lambda value: value.deep["n"].__setitem__(0, 2)),
    ],
    ids=["dict", "list", "tensor in a list", "tensor", "large tensor", "object"],
)
def test_a_change_of_what_layers_of_two_stages_share_is_refused(value: Any, change: Callable[[Any], object]) -> None:
    with pytest.raises(ConfigError, match="changes 0.kept, which layers of several stages share"):
        checked(Layer(kept=value), Layer(also=value), lambda: change(value))
    checked(Layer(kept=value), Layer(also=[]), lambda: change(value))  # nobody else has it


def test_a_shared_buffer_and_a_shared_module_are_watched() -> None:
    one, two = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    two.running_mean = one.running_mean
    with pytest.raises(ConfigError, match=r"changes buffer 0.running_mean, which"):
        checked(one, two, lambda: one(torch.randn(4, 2)))
    with pytest.raises(ConfigError, match=r"changes buffer 0.running_mean, which"):
        checked(one, one, lambda: one(torch.randn(4, 2)))


def test_an_attribute_that_is_replaced_is_a_change() -> None:
    layer, start = Layer(), torch.zeros(2)
    layer.kept = start
    with pytest.raises(ConfigError, match=r"changes 0.kept, which"):
        checked(layer, Layer(kept=start), lambda: setattr(layer, "kept", start + 1))
    checked(layer, Layer(kept=layer.kept), lambda: setattr(layer, "kept", layer.kept.clone()))


def test_a_cache_that_is_filled_and_what_stays_are_none() -> None:
    cache, settings = {"masks": None}, SimpleNamespace(heads=4, names=["a", "b"])
    layer, other = Layer(cache=cache, settings=settings), Layer(cache=cache, settings=settings)
    checked(layer, other, lambda: cache.update(masks=torch.ones(3), more=torch.ones(2)))
    checked(layer, other, lambda: layer(torch.randn(3, 2)))
    loop: list[Any] = [1]
    loop.append(loop)
    checked(Layer(loop=loop), Layer(loop=loop), lambda: None)
