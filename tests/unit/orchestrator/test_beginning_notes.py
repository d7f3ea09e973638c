"""What is odd about a run is told before it begins, and what is usual is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim.optimizer import register_optimizer_step_pre_hook

from guava_nb.orchestrator.beginning_notes import changed_torch, notes_on
from guava_nb.replica.replica import Replica
from tests.support.explorer.orchestrator import replica_set_for, spec_for
from tests.support.training import loader, plan_for, replica, spec


def test_changes_of_torch_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert changed_torch() == []
    monkeypatch.setattr(functional, "relu", lambda x: x.clamp(min=0))
    monkeypatch.setattr(nn.ReLU, "forward", lambda self, x: x)
    handle = nn.modules.module.register_module_forward_hook(lambda module, given, output: output)
    other = register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: None)
    try:
        assert changed_torch() == [
            "forward_hooks of all modules",
            "optimizer_pre_hooks of all optimizers",
            "torch.nn.functional.relu",
            "nn.ReLU.forward",
        ]
    finally:
        handle.remove()
        other.remove()


def notes(optimizer: Any = None, precision: str | None = None, **options: Any) -> list[str]:
    made = replica_set_for(spec_for("star", "workers", 1), 4, 1, None)
    made.spec = spec(**options)
    made.master = replica(made.spec)
    if optimizer is not None:
        made.master.optimizer = optimizer(made.master.model)
    return list(notes_on(made, plan_for(loader()), precision))


def head_only(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([list(model.parameters())[-1]], lr=0.1)


def test_clipping_beside_the_optimizer_is_told() -> None:
    assert notes() == notes(max_grad_norm=1.0) == notes(head_only) == []
    (told,) = notes(head_only, max_grad_norm=1.0)
    assert told.startswith("max_grad_norm counts the gradients of") and "requires_grad_(False)" in told


def test_gradient_hooks_are_told_since_the_norm_is_measured_before_them() -> None:
    made = replica_set_for(spec_for("star", "workers", 1), 4, 1, None)
    made.spec = spec()
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].weight.register_hook(lambda gradient: gradient * 0)
    model[0].bias.register_post_accumulate_grad_hook(lambda parameter: None)
    made.master = Replica(made.spec, lambda name: nn, torch.device("cpu"), model)
    (told,) = notes_on(made, plan_for(loader()), None)
    assert "that before the hooks on the gradients of 0.weight, 0.bias;" in told


def test_what_auto_came_to_is_told() -> None:
    (told,) = notes(precision="auto")
    assert told.startswith("precision auto: fp")
