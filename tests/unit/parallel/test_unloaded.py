"""What is asked about without loading torch's compiler, DTensor or FSDP2: the same answers and numbers as with them."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim import Optimizer

from guava_nb.parallel import unloaded
from guava_nb.parallel.unloaded import go_back, is_dtensor, is_optimized, is_sharded_module, spare_compiler, take_step
from guava_nb.replica.optimizer import OPTIMIZERS

#: Muon takes matrices only; LBFGS wants a closure, SparseAdam sparse gradients.
NAMES = sorted(set(OPTIMIZERS) - {"LBFGS", "SparseAdam"})


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has not loaded it: another test of this one may have."""
    monkeypatch.setattr(unloaded, "_COMPILER", "a module that is not loaded")


def made(name: str) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(3)
    model = nn.Linear(4, 3, bias=False).double()
    return model, OPTIMIZERS[name](model.parameters(), lr=0.05)  # type: ignore[call-arg]


def graded(model: nn.Module, number: int) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.3 + number).sin()


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize("name", NAMES)
def test_a_step_is_the_same_to_the_bit(name: str) -> None:
    (one, ours), (other, plain) = made(name), made(name)
    for number in range(3):
        for model in (one, other):
            graded(model, number)
        take_step(ours)
        plain.step()
        assert torch.equal(one.weight, other.weight), number
    assert not any(value.requires_grad for value in ours.state[one.weight].values() if isinstance(value, torch.Tensor))
    assert torch.is_grad_enabled()


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize("name", sorted(set(NAMES) - {"Adafactor", "Muon"}))  # which have no wrapper that loads it
def test_torchs_wrappers_are_left_out(name: str) -> None:
    model, optimizer = made(name)
    graded(model, 0)
    assert unloaded._computation(optimizer, optimizer.step) is not None
    before = model.weight.detach().clone()
    take_step(optimizer)
    assert not torch.equal(model.weight, before)


class Users(optim.SGD):
    """An optimizer of the user's."""


def _with_hook(optimizer: Optimizer) -> Callable[[], object]:
    return optimizer.register_step_pre_hook(lambda *_: None).remove


def _patched(optimizer: Optimizer) -> Callable[[], object]:
    before = optimizer.step

    def step(closure: Any = None) -> Any:
        return before(closure)

    optimizer.step = step  # type: ignore[method-assign]
    return lambda: None


def _patched_below_a_schedule(optimizer: Optimizer) -> Callable[[], object]:
    """As ZeRO 1, whose ranks send parameters at the end of a step."""
    before = optimizer.step

    def step(self: Optimizer, closure: Any = None) -> Any:
        return before(closure)

    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]
    optim.lr_scheduler.StepLR(optimizer, 1)
    return lambda: None


def _wrapped_class(optimizer: Optimizer) -> Callable[[], object]:
    before = type(optimizer).step

    def step(self: Optimizer, closure: Any = None) -> Any:
        return before(self, closure)

    step.__wrapped__ = before  # type: ignore[attr-defined]
    type(optimizer).step = step  # type: ignore[method-assign]
    return lambda: setattr(type(optimizer), "step", before)


def _differentiable(optimizer: Optimizer) -> Callable[[], object]:
    optimizer.defaults["differentiable"] = True
    return lambda: None


def _users(optimizer: Optimizer) -> Callable[[], object]:
    optimizer.__class__ = Users
    return lambda: None


def _profiled(optimizer: Optimizer) -> Callable[[], object]:
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    profiler.start()
    return profiler.stop


CHANGES = [_with_hook, _patched, _patched_below_a_schedule, _wrapped_class, _differentiable, _users, _profiled]


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize("change", CHANGES)
def test_a_step_that_may_do_more_is_called_whole(change: Callable[[Optimizer], Callable[[], object]]) -> None:
    model, optimizer = made("SGD")
    assert unloaded._computation(optimizer, optimizer.step) is not None
    undo = change(optimizer)
    try:
        assert unloaded._computation(optimizer, optimizer.step) is None
        graded(model, 0)
        before = model.weight.detach().clone()
        if change is _differentiable:
            return  # a leaf that asks for gradients cannot be stepped so
        take_step(optimizer)
        assert not torch.equal(model.weight, before)
    finally:
        undo()


@pytest.mark.usefixtures("no_compiler")
def test_a_schedule_knows_that_a_step_was_taken() -> None:
    model, optimizer = made("Adam")
    schedule = optim.lr_scheduler.StepLR(optimizer, 1)
    graded(model, 0)
    take_step(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedule.step()


@pytest.mark.usefixtures("no_compiler")
def test_who_stands_around_a_step_has_it_taken_below() -> None:
    model, optimizer = made("SGD")
    own, ended = optimizer.step, list[str]()

    def step(self: Optimizer) -> None:
        take_step(self, own)
        ended.append("sent")

    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]
    graded(model, 0)
    before = model.weight.detach().clone()
    take_step(optimizer)
    assert ended == ["sent"] and not torch.equal(model.weight, before)


def test_where_the_compiler_is_loaded_torchs_own_step_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unloaded, "_COMPILER", "sys")
    called: list[str] = []
    take_step(SimpleNamespace(step=lambda: called.append("step")))  # type: ignore[arg-type]
    assert called == ["step"]


def test_a_method_that_torch_keeps_from_its_compiler_runs_alone_until_that_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def method(number: int) -> int:
        return number + 1

    monkeypatch.setattr(unloaded, "_COMPILER", "a module that is not loaded")
    wrapped = torch._disable_dynamo(method)
    spare_compiler(wrapped)
    spared = vars(method)["__dynamo_disable"]
    assert wrapped(1) == 2 and vars(method)["__dynamo_disable"] is spared
    monkeypatch.setattr(unloaded, "_COMPILER", "sys")  # loaded
    assert wrapped(2) == 3 and vars(method)["__dynamo_disable"] is not spared, "torch's own way"
    own = vars(method)["__dynamo_disable"]
    spare_compiler(wrapped, made)
    assert vars(method)["__dynamo_disable"] is own, "and it stays so; what torch has not wrapped is left alone"
    assert not hasattr(made, "__dynamo_disable")


def test_backward_from_a_seed_gives_the_same_gradient_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for module in ("sys", "a module that is not loaded"):
        monkeypatch.setattr(unloaded, "_SYMBOLIC", module)
        given = torch.linspace(-1, 1, 5, requires_grad=True)
        for _ in range(2):
            go_back((given * 1.7).exp().sum(), torch.tensor(1 / 3), keep_graph=False)
        found.append(given.grad)
    assert torch.equal(*found)


def test_what_is_loaded_is_known() -> None:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    sharded = type("Sharded", (FSDPModule, nn.Linear), {})
    assert is_sharded_module(object.__new__(sharded)) and not is_sharded_module(nn.Linear(1, 1))
    assert is_dtensor(torch.Tensor._make_subclass(DTensor, torch.ones(1)))
    assert not is_dtensor(torch.ones(1)) and not is_dtensor(None)
    assert not is_optimized(nn.Linear(1, 1))


COLD = """
import copy, sys
import torch
from torch import nn
import guava_nb.orchestrator, guava_nb.worker.worker_session, guava_nb.worker.listening
from guava_nb.protocol.messages import Factory
from guava_nb.replica.objective import backward
from guava_nb.replica.optimizer import build_optimizer
from guava_nb.parallel.unloaded import take_step

def heavy():
    return [name for name in ("torch._dynamo", "torch._inductor", "sympy", "torch.distributed.tensor") if name in sys.modules]

torch.manual_seed(0)
ours = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
plain = copy.deepcopy(ours)
named = list(ours.named_parameters())
optimizer = build_optimizer(Factory("AdamW", {"lr": 0.1}), named, lambda name: None)

def step(seed):
    rows = torch.randn(16, 4, generator=torch.Generator().manual_seed(seed))
    optimizer.zero_grad()
    backward(ours(rows).square().mean(), 1.0, keep_graph=False)
    take_step(optimizer)
    return rows

given = [step(0), step(1)]
optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
given.append(step(2))
assert not heavy(), heavy()
reference = torch.optim.AdamW(plain.parameters(), lr=0.1)  # loads the compiler; from here on ours takes torch's own way
for rows in given:
    reference.zero_grad()
    plain(rows).square().mean().backward()
    reference.step()
assert "torch._dynamo" in sys.modules
for seed in (3, 4):
    rows = step(seed)
    reference.zero_grad()
    plain(rows).square().mean().backward()
    reference.step()
assert all(torch.equal(one, other) for one, other in zip(ours.parameters(), plain.parameters(), strict=True))
print("equal")
"""


def test_a_process_trains_without_them_and_goes_on_with_them() -> None:
    """In a process of its own, which takes three seconds: this one has loaded them."""
    done = subprocess.run([sys.executable, "-c", COLD], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["equal"], done.stderr
