from __future__ import annotations

from typing import Any

import pytest
import torch

from guava_nb.training.initial_state import unfit


def stepped(kind: Any = torch.optim.AdamW, **args: Any) -> torch.optim.Optimizer:
    model = torch.nn.Linear(3, 4)
    optimizer: torch.optim.Optimizer = kind(model.parameters(), **args)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return optimizer


def told(optimizer: torch.optim.Optimizer) -> str:
    return unfit(optimizer, optimizer.state_dict())


@pytest.mark.parametrize(
    ("kind", "args"),
    [(torch.optim.AdamW, {"amsgrad": True}), (torch.optim.SGD, {"lr": 0.1}), (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
     (torch.optim.Adafactor, {}), (torch.optim.RMSprop, {"centered": True}), (torch.optim.NAdam, {}), (torch.optim.Adagrad, {}),
     (torch.optim.Rprop, {}), (torch.optim.ASGD, {})],
)  # fmt: skip
def test_the_state_of_every_optimizer_of_torch_fits(kind: Any, args: dict[str, Any]) -> None:
    assert told(stepped(kind, **args)) == ""


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"exp_avg": None}, "'exp_avg' of a parameter of shape (4, 3) is missing"),
        ({"exp_avg_sq": torch.zeros(4)}, "'exp_avg_sq' of a parameter of shape (4, 3) has shape (4,)"),
        ({"exp_avg": torch.zeros(4, 3, dtype=torch.int8)}, "'exp_avg' is a tensor of torch.int8"),
        ({"step": "x"}, "'step' of a parameter of shape (4, 3) is no number"),
    ],
)
def test_what_a_step_would_fail_of_is_said(change: dict[str, Any], said: str) -> None:
    optimizer = stepped()
    optimizer.state[optimizer.param_groups[0]["params"][0]].update(change)
    assert told(optimizer) == said


def test_another_program_s_optimizer_is_left_alone() -> None:
    own = type("Own", (torch.optim.SGD,), {"__module__": "elsewhere"})
    assert unfit(own([torch.zeros(2)]), {}) == ""
