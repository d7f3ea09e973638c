"""The trial of optimizers on parts of parameters: true alarms, and none for what acts on each element alone."""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from guava_nb.errors import ConfigError
from guava_nb.parallel import optimizer_trial
from guava_nb.parallel.optimizer_trial import check_optimizer
from guava_nb.parallel.tensor.plan_search import make_plan
from guava_nb.parallel.tensor.tensor_plan import Plan
from guava_nb.protocol.messages import ParallelSpec

SPECS = {
    "tensor": ParallelSpec(mode="tensor", tp=2),
    "pipeline": ParallelSpec(mode="pipeline", pp=2),
    "zero 1": ParallelSpec(mode="zero", dp=2, zero_stage=1),
}
#: Those of torch that act on each element alone.
PLAIN = [
    (cls, words)
    for name, cls in sorted(vars(optim).items())
    if isinstance(cls, type) and name not in ("Optimizer", "LBFGS", "SparseAdam", "Adafactor", "Muon")
    for words in ({}, {"foreach": True}, {"fused": True}, {"foreach": False, "maximize": True})
    if set(words) <= set(inspect.signature(cls).parameters)
]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(5, 9), nn.LayerNorm(5), nn.Linear(9, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(self.norm(x))))


@functools.cache
def found_plan() -> Plan:
    plan = make_plan(Net(), {}, 2)
    assert plan.splits
    return plan


def tried(make: Callable[..., optim.Optimizer], mode: str) -> str:
    model, spec = Net(), SPECS[mode]
    plan = found_plan() if spec.tp > 1 else Plan({})
    before = torch.get_rng_state(), [p.clone() for p in model.parameters()]
    try:
        check_optimizer(model, spec, plan, make)
        return ""
    except ConfigError as error:
        return str(error)
    finally:
        assert torch.equal(before[0], torch.get_rng_state())
        assert all(torch.equal(a, b) and b.grad is None for a, b in zip(before[1], model.parameters(), strict=True))


@pytest.mark.parametrize(("cls", "words"), PLAIN, ids=lambda value: getattr(value, "__name__", str(value)))
def test_no_alarm_for_what_acts_on_each_element(cls: type[optim.Optimizer], words: dict[str, Any]) -> None:
    for mode in SPECS:
        assert tried(lambda named: cls(list(named.values()), lr=0.01, **words), mode) == ""


class Own(optim.Optimizer):
    """Steps by a function of parameter, gradient and state."""

    def __init__(self, parameters: Any, rule: Callable[[Tensor, dict[str, Any]], None], lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})
        self.rule = rule

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                self.rule(parameter, self.state[parameter])


def by_norm(p: Tensor, state: dict[str, Any]) -> None:
    p.sub_(p.grad * (p.norm() / p.grad.norm()), alpha=0.1)


def noisy(p: Tensor, state: dict[str, Any]) -> None:
    p.sub_(p.grad + torch.randn_like(p), alpha=0.1).add_(torch.empty_like(p).normal_(), alpha=0.01)


def numpy_noise(p: Tensor, state: dict[str, Any]) -> None:
    p.sub_(p.grad + torch.tensor(time.perf_counter_ns() % 97), alpha=0.1)


def averaging(p: Tensor, state: dict[str, Any]) -> None:
    state["n"] = state.get("n", 0) + 1
    slow = state.setdefault("slow", p.clone())
    p.sub_(p.grad, alpha=0.1)
    if state["n"] % 5 == 0:
        p.copy_(slow.lerp_(p, 0.5))


def by_rows(p: Tensor, state: dict[str, Any]) -> None:
    state["rows"] = p.grad.reshape(len(p), -1).abs().amax(1) + state.get("rows", 0)
    p.sub_(p.grad, alpha=0.1)


def remembering(p: Tensor, state: dict[str, Any]) -> None:
    state.setdefault("last", []).append(p.grad.clone())
    p.sub_(sum(state["last"][-2:]), alpha=0.1)


class Beside(Own):
    """Keeps state that belongs to no parameter."""

    def step(self, closure: Any = None) -> None:
        self.state["all"] = {"n": self.state.get("all", {"n": 0})["n"] + 1}  # type: ignore[index, call-overload]
        super().step()


class SlowInGroups(Own):
    """Keeps a copy of each parameter in its group, as some look-ahead optimizers do."""

    def __init__(self, parameters: Any, rule: Any) -> None:
        super().__init__(parameters, rule)
        self.param_groups[0]["slow"] = [parameter.detach().clone() for parameter in self.param_groups[0]["params"]]


class Together(optim.SGD):
    """One factor from all parameters, as optimizers without a learning rate have."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        given = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        self.param_groups[0]["lr"] = 0.1 / float(torch.stack([g.norm() for g in given]).norm())
        super().step()


def hooked(named: Mapping[str, nn.Parameter]) -> optim.Optimizer:
    made = optim.SGD(list(named.values()), lr=0.1, momentum=0.9)
    made.register_step_pre_hook(lambda *_: nn.utils.clip_grad_norm_(list(named.values()), 1.0) and None)
    return made


def watched(named: Mapping[str, nn.Parameter]) -> optim.Optimizer:
    made = optim.AdamW(list(named.values()), lr=0.0)
    made.register_step_post_hook(lambda *_: sum(p.norm() for p in named.values()) and None)
    return made


@pytest.mark.parametrize(
    ("make", "refused"),
    [
        (lambda named: Own(named.values(), by_norm), {"tensor"}),
        (lambda named: Own(named.values(), by_rows), {"tensor"}),
        (lambda named: optim.Adafactor(named.values()), {"tensor"}),
        (lambda named: Together(named.values(), lr=0.1), set(SPECS)),
        (hooked, {"tensor", "pipeline"}),  # with ZeRO 1 the hook sees all gradients
        (watched, set()),
        (lambda named: Own(named.values(), noisy), set()),
        (lambda named: Own(named.values(), numpy_noise), set()),
        (lambda named: Own(named.values(), averaging), set()),
        (lambda named: Beside(named.values(), averaging), {"tensor", "pipeline", "zero 1"}),
        (lambda named: Own(named.values(), remembering), {"tensor"}),
        (lambda named: SlowInGroups(named.values(), averaging), {"tensor", "pipeline", "zero 1"}),
    ],
    ids=[
        "norm",
        "state by rows",
        "adafactor",
        "together",
        "clip hook",
        "watching hook",
        "noise",
        "other noise",
        "slow",
        "state of no parameter",
        "tensors in a list",
        "tensors in groups",
    ],
)
def test_what_looks_at_more_than_an_element_is_found(make: Any, refused: set[str]) -> None:
    assert {mode for mode in SPECS if tried(make, mode)} == refused


def test_the_sentence_says_what_and_what_to_do() -> None:
    said = tried(hooked, "pipeline")
    assert said.startswith(
        "SGD with its hooks looks at whole parameters, or at several at once: tried on small stand-ins, it"
    )
    assert "the parameters of some layers only, as each stage of a pipeline has them. Use data mode" in said
    assert said.endswith("to clip, max_grad_norm= (--clip) counts all gradients in every mode")


@pytest.mark.skipif(not hasattr(optim, "Muon"), reason="this torch has no Muon")
def by_place(named: Mapping[str, nn.Parameter]) -> optim.Optimizer:
    return optim.SGD([{"params": [p], "lr": 0.1 * 0.5**place} for place, p in enumerate(named.values())])


def by_name(named: Mapping[str, nn.Parameter]) -> optim.Optimizer:
    return optim.SGD([{"params": [p], "lr": 0.1 if name.endswith("bias") else 0.2} for name, p in named.items()])


def test_a_rate_by_the_place_of_a_parameter_is_the_fault_of_the_function() -> None:
    sentence = tried(by_place, "pipeline")
    assert sentence.startswith("the function that makes SGD goes by the place") and "go by the names" in sentence
    assert tried(by_place, "tensor") == tried(by_name, "pipeline") == ""


def test_muon_is_for_whole_matrices() -> None:
    def muon(named: Mapping[str, nn.Parameter]) -> optim.Optimizer:
        return optim.Muon([p for p in named.values() if p.ndim == 2])

    assert "Muon looks at whole parameters" in tried(muon, "tensor")
    assert not tried(muon, "zero 1") and not tried(muon, "pipeline")


def test_a_step_that_fails_on_a_part_is_told_and_one_that_always_fails_is_not() -> None:
    def positional(named: Mapping[str, nn.Parameter]) -> optim.Optimizer:
        kept = [p.clone() for p in named.values()]
        made = optim.SGD(list(named.values()), lr=0.1)
        made.register_step_post_hook(
            lambda opt, *_: [p - k for p, k in zip(opt.param_groups[0]["params"], kept, strict=True)] and None
        )
        return made

    def broken(p: Tensor, state: dict[str, Any]) -> None:
        raise ValueError

    assert "cannot step on some of the parameters only, as zero_stage 1" in tried(positional, "zero 1")
    assert tried(lambda named: Own(named.values(), broken), "tensor") == ""


def test_stand_ins_of_a_large_model_are_small() -> None:
    """A trial of 67 million parameters touches a quarter of a million numbers."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4096, 8192), nn.Linear(8192, 4096))
    made = optimizer_trial._stand_ins(model.to_empty(device="cpu"), torch.Generator())
    assert 0 < sum(value.numel() for value in made.values()) <= 1 << 18
    assert made["0.weight"].ndim == 2 and made["0.bias"].ndim == 1


@pytest.mark.parametrize("holders", [1, 2, 3, 7])
def test_stand_ins_are_as_uneven_as_their_parameters(holders: int) -> None:
    """What torch does to uneven parts of complex parameters passed the trial where the stand-in had an even number of rows."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(5003, 1025), nn.Linear(6, 9))
    named = dict(model.named_parameters())
    made = optimizer_trial._stand_ins(model.to_empty(device="cpu"), torch.Generator(), holders)
    for name, value in made.items():
        assert [n % holders for n in value.shape] == [n % holders for n in named[name].shape]
        assert all(small <= large for small, large in zip(value.shape, named[name].shape, strict=True))


class Both(optim.Optimizer):
    """Two optimizers behind one, whose states lie in these; or none of its groups is in what it saves."""

    def __init__(self, named: Mapping[str, Tensor], shares_state: bool) -> None:
        parameters = list(named.values())
        super().__init__(parameters, {})
        self.inner = optim.AdamW(parameters, lr=0.1)
        self.param_groups = self.inner.param_groups
        self.state = self.inner.state if shares_state else self.state
        self.shares_state = shares_state

    def step(self, closure: Any = None) -> None:
        self.inner.step()

    def state_dict(self) -> dict[str, Any]:
        return {**self.inner.state_dict(), "param_groups": [] if self.shares_state else [{}]}


@pytest.mark.parametrize("mode", SPECS)
@pytest.mark.parametrize(("shares_state", "words"), [(False, "self.inner"), (True, "under 'param_groups'")])
def test_state_that_a_checkpoint_of_parts_would_lack_is_told(mode: str, shares_state: bool, words: str) -> None:
    assert words in tried(lambda named: Both(named, shares_state), mode)
