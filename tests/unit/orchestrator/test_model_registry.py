"""The newest registration counts, and what it takes away is told."""

from __future__ import annotations

import functools

import pytest
import torch

from guava_nb.errors import ConfigError
from guava_nb.orchestrator.model_registry import ModelRegistry
from guava_nb.protocol.messages import Factory
from tests.support.training import spec

CELL = """
import torch
class Net(torch.nn.Linear):
    def __init__(self):
        super().__init__(2, 2)
"""


def test_a_class_takes_the_place_of_an_instance_of_it() -> None:
    said: list[str] = []
    registry = ModelRegistry(said.append)
    registry.share(CELL, "model")
    net_class = registry.shared().Net  # type: ignore[union-attr]
    net, of_run = net_class(), spec(model=Factory("Net"))
    net.weight.requires_grad_(False)
    assert registry.register(net, None) and registry.instance_for(of_run) is net
    assert registry.frozen_in(of_run.model) == ("weight",) and not said

    for named in ("Net", net_class):
        assert not registry.register(named, None)
        assert registry.instance_for(of_run) is None and registry.frozen_in(of_run.model) is None
        assert len(said) == 1 and "register it again" in said[0]  # once, not with each line that names the class
    assert registry.register(net, None) and registry.instance_for(of_run) is net


def test_an_instance_that_is_registered_again_without_a_change_is_no_news() -> None:
    registry = ModelRegistry()
    registry.share(CELL, "model")
    net = registry.shared().Net()  # type: ignore[union-attr]
    assert registry.register(net, None) and not registry.register(net, None)
    with torch.no_grad():
        net.weight.add_(1.0)
    assert registry.register(net, None)


def test_a_partial_object_is_its_class_with_its_arguments() -> None:
    registry = ModelRegistry()
    registry.share(CELL.replace("(self)", "(self, width=2)"), "model")
    net_class = registry.shared().Net  # type: ignore[union-attr]
    assert registry.factory_of(functools.partial(net_class, width=3), {"width": 4}) == Factory("Net", {"width": 4})


def test_none_lets_go_of_the_model() -> None:
    registry = ModelRegistry()
    registry.share(CELL, "model")
    registry.register("Net", None)
    assert not registry.register(None, None)
    with pytest.raises(ConfigError, match="no model is named yet"):
        registry.needed(None)
