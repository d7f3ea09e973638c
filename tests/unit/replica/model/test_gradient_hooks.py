"""Hooks on gradients: as a plain loop calls them, or refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from guava_nb.errors import ConfigError
from guava_nb.replica.model.gradient_hooks import GradientHooks


def sign(p: Tensor) -> None:
    p.grad = p.grad.sign()


def halve(p: Tensor) -> None:
    p.grad.mul_(0.5)


def cleared(p: Tensor) -> None:
    p.grad = None


def clip(p: Tensor) -> None:
    nn.utils.clip_grad_norm_(p, 0.1)


class Stepping:
    """An optimizer in the backward, as torch's tutorial has it."""

    def __init__(self) -> None:
        self.made: dict[Any, torch.optim.Optimizer] = {}

    def __call__(self, p: Tensor) -> None:
        self.made.setdefault(p, torch.optim.SGD([p], lr=0.1, momentum=0.9)).step()
        p.grad = None


BEFORE: dict[str, Callable[[Tensor], Any]] = {
    "clamp": lambda g: g.clamp(-0.3, 0.3),
    "in place": lambda g: g.mul_(0.5),
    "norm": lambda g: g / g.norm(),
    "mask": lambda g: g * (torch.arange(len(g)) % 2).reshape(-1, *[1] * (g.ndim - 1)),
    "look": lambda g: None,
}
AFTER: dict[str, Callable[[Tensor], Any]] = {
    "sign": sign, "halve": halve, "clip": clip, "step": Stepping(), "clear": cleared, "print": lambda p: None,
}  # fmt: skip


def hooked(name: str) -> nn.Linear:
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    for parameter in model.parameters():
        if name in BEFORE:
            parameter.register_hook(BEFORE[name])
        else:
            parameter.register_post_accumulate_grad_hook(AFTER[name])
    return model


@pytest.mark.parametrize("name", [*BEFORE, *AFTER])
def test_a_step_is_that_of_a_plain_loop(name: str) -> None:
    """The sum of two shares comes without their hooks, and the hooks see it whole."""
    plain, model = hooked(name), hooked(name)
    x = torch.randn(6, 4, dtype=torch.float64)
    (plain(x).pow(2).sum() / 6).backward()
    hooks = GradientHooks(model)
    for part in (x[:2], x[2:]):
        (model(part).pow(2).sum() / 6).backward()
    hooks.run()
    for wanted, found in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.allclose(wanted, found, rtol=0, atol=1e-12)
        assert (wanted.grad is None) == (found.grad is None)
        assert wanted.grad is None or torch.allclose(wanted.grad, found.grad, rtol=0, atol=1e-12)


def test_hooks_are_put_back_and_taken_off_by_their_handles() -> None:
    seen: list[str] = []
    p = nn.Parameter(torch.ones(2))
    first = p.register_hook(lambda g: seen.append("before"))
    second = p.register_post_accumulate_grad_hook(lambda p: seen.append("after"))
    model = nn.ParameterList([p])
    hooks = GradientHooks(model)
    own = p.register_post_accumulate_grad_hook(lambda p: seen.append("own"))
    p.sum().backward()
    assert seen == ["own"]
    own.remove()
    hooks.run()
    assert seen == ["own", "before", "after"]
    first.remove()
    hooks.run()
    assert seen[3:] == ["after"]
    hooks.put_back()
    p.sum().backward()
    assert seen[4:] == ["after"]
    second.remove()
    p.sum().backward()
    assert seen[5:] == []


@pytest.mark.parametrize(
    ("name", "fits"),
    [("clamp", False), ("in place", True), ("norm", False), ("mask", True), ("look", True), ("sign", False), ("halve", False),
     ("clip", False), ("step", False), ("print", True)],
)  # fmt: skip
def test_several_backwards_in_a_step_must_come_to_the_same_as_one(name: str, fits: bool) -> None:
    hooks = GradientHooks(hooked(name))
    hooks.check_accumulation(1)
    if fits:
        hooks.check_accumulation(3)
        return
    with pytest.raises(
        ConfigError, match=r"gradient of 'weight' gives something else for the sum of 3 batches.*accumulation_steps=1"
    ):
        hooks.check_accumulation(3)


@pytest.mark.parametrize("name", ["clamp", "halve", "step"])
def test_a_hook_that_changes_gradients_is_refused_where_each_worker_has_a_part(name: str) -> None:
    model = hooked(name)
    named = {key: nn.Parameter(p[:2].detach()) for key, p in model.named_parameters()}
    with pytest.raises(ConfigError, match="a hook changes the gradient of 'weight', and each worker holds a part"):
        GradientHooks(model).move_to(named, clips=False)
    with pytest.raises(ConfigError, match="know the norm for max_grad_norm before hooks run"):
        GradientHooks(hooked(name)).move_to(dict(hooked(name).named_parameters()), clips=True)


@pytest.mark.parametrize("name", ["look", "print"])
def test_a_hook_that_only_looks_breaks_no_run(name: str) -> None:
    model = hooked(name)
    hooks = GradientHooks(model)
    hooks.move_to({"weight": nn.Parameter(model.weight[:2].detach())}, clips=True)
    hooks.run()


def test_hooks_follow_the_parameters_of_a_stage() -> None:
    model = hooked("sign")
    here = nn.Parameter(model.bias.detach().clone())
    hooks = GradientHooks(model)
    hooks.move_to({"bias": here}, clips=False)
    here.grad = torch.tensor([2.0, -3.0, 0.5], dtype=torch.float64)
    model.weight.grad = torch.full_like(model.weight, 5.0)
    hooks.run()
    assert here.grad.tolist() == [1.0, -1.0, 1.0] and math.isclose(float(model.weight.grad[0, 0]), 5.0)
