from __future__ import annotations

import collections
import io
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim import lr_scheduler

from guava_nb.errors import CheckpointError, ConfigError, PreparationError
from guava_nb.protocol.messages import Factory
from guava_nb.replica.optimizer import (
    OPTIMIZERS,
    SCHEDULERS,
    LossScale,
    StepUndo,
    _may_be_fused,
    build_optimizer,
    build_scheduler,
)
from guava_nb.replica.state_dict import copied, like, plain
from tests.support.star import resolver


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 3, bias=False)


def through_a_file(state: object) -> object:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_names_and_functions_make_optimizers() -> None:
    net = model()
    made = build_optimizer(Factory("AdamW", {"lr": 0.5, "betas": [0.8, 0.9]}), net.named_parameters(), resolver())
    assert type(made) is optim.AdamW and made.param_groups[0]["lr"] == 0.5

    def groups(named: list, lr: float) -> optim.Optimizer:
        assert [name for name, _ in named] == ["weight"]
        return optim.SGD([p for _, p in named], lr)

    assert (
        build_optimizer(Factory("groups", {"lr": 0.25}), net.named_parameters(), resolver(groups=groups)).param_groups[
            0
        ]["lr"]
        == 0.25
    )


@pytest.mark.parametrize(
    ("factory", "says"),
    [
        (Factory("AdamWW"), "did you mean 'AdamW'"),
        (Factory("adam"), "did you mean 'Adam'"),
        (Factory("SGD", {"learning_rate": 1}), "does not take 'learning_rate'.* it takes: lr, momentum"),
        (Factory("SGD", {"momentun": 1}), "did you mean 'momentum'"),
        (Factory("SGD", {"lr": -1.0}), "refuses its arguments"),
        (Factory("SGD", {"lr": "1e-3"}), "refuses its arguments"),
        (Factory("LBFGS"), "several times in one step"),
        (Factory("SparseAdam"), "sparse"),
        (Factory("none"), "returned a NoneType"),
        (Factory("rateless"), "'rateless' has a parameter group without 'lr'"),
        (Factory("stranger"), "1 tensors that are not parameters"),
    ],
)
def test_mistakes_of_the_optimizer_are_named(factory: Factory, says: str) -> None:
    names = {
        "none": lambda named: None,
        "stranger": lambda named: optim.SGD([torch.zeros(1, requires_grad=True)], 1.0),
        "rateless": lambda named: optim.Optimizer([p for _, p in named], {}),
    }
    with pytest.raises(ConfigError, match=says):
        build_optimizer(factory, model().named_parameters(), resolver(**names))


class Holding(optim.Optimizer):
    """Steps by another optimizer, and may return its state."""

    def __init__(self, named: list, returns: bool, momentum: float = 0.9) -> None:
        super().__init__([p for _, p in named], {"lr": 0.1})
        self.returns, self.inner = returns, [optim.SGD([p for _, p in named], lr=0.1, momentum=momentum)]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner[0].step()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), **({"state": self.inner[0].state_dict()["state"]} if self.returns else {})}


def test_state_of_an_optimizer_inside_another_must_be_in_its_state_dict() -> None:
    def make(**words: Any) -> optim.Optimizer:
        return build_optimizer(
            Factory("Holding", words), model().named_parameters(), resolver(Holding=lambda *a, **k: Holding(*a, **k))
        )

    assert isinstance(make(returns=True), Holding) and isinstance(make(returns=False, momentum=0.0), Holding)
    with pytest.raises(ConfigError, match="'Holding' holds another one in its 'inner', whose state its own state_dict"):
        make(returns=False)


def test_a_raising_function_is_a_preparation_error() -> None:
    def broken(named: list) -> None:
        raise KeyError("decay")

    with pytest.raises(PreparationError, match="'broken' raised KeyError"):
        build_optimizer(Factory("broken"), model().named_parameters(), resolver(broken=broken))
    with pytest.raises(ConfigError, match="nothing to train"):
        build_optimizer(Factory("SGD"), nn.ReLU().named_parameters(), resolver())


SCHEDULER_ARGS = {
    "LambdaLR": {"lr_lambda": "warm"},
    "MultiplicativeLR": {"lr_lambda": "warm"},
    "StepLR": {"step_size": 3},
    "MultiStepLR": {"milestones": [2, 5, 5]},
    "ExponentialLR": {"gamma": 0.9},
    "CosineAnnealingLR": {"T_max": 7},
    "CyclicLR": {"base_lr": 0.01, "max_lr": 0.1, "step_size_up": 3},
    "CosineAnnealingWarmRestarts": {"T_0": 4},
    "OneCycleLR": {"max_lr": 0.4, "total_steps": 30},
}


def schedule_of(name: str, optimizer: optim.Optimizer):
    factory = Factory(name, SCHEDULER_ARGS.get(name, {}))
    interval = "validation" if name == "ReduceLROnPlateau" else "step"
    return build_scheduler(factory, optimizer, resolver(warm=lambda n: min(1.0, (n + 1) / 5)), interval)


def advance(schedule, optimizer, steps) -> list[float]:
    rates = []
    for step in steps:
        optimizer.step()
        schedule.on_step()
        schedule.on_tick(float(step % 3 + step))
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


@pytest.mark.parametrize("name", sorted(set(SCHEDULERS) - {"SequentialLR", "ChainedScheduler"}))
def test_every_torch_scheduler_resumes_from_plain_data(name: str) -> None:
    def fresh():
        optimizer = optim.SGD(model().parameters(), lr=0.1, momentum=0.9)
        return optimizer, schedule_of(name, optimizer)

    optimizer, schedule = fresh()
    advance(schedule, optimizer, range(12))
    saved = through_a_file([plain(optimizer.state_dict()), plain(schedule.scheduler.state_dict())])
    other, resumed = fresh()
    other.load_state_dict(copied(saved[0]))
    resumed.scheduler.load_state_dict(like(resumed.scheduler.state_dict(), saved[1]))
    assert advance(resumed, other, range(12, 24)) == advance(schedule, optimizer, range(12, 24))


def test_a_shared_function_makes_chained_schedules_that_resume() -> None:
    def chain(optimizer: optim.Optimizer):
        warm = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4)
        return lr_scheduler.SequentialLR(optimizer, [warm, lr_scheduler.MultiStepLR(optimizer, [3, 6])], [5])

    def fresh():
        optimizer = optim.SGD(model().parameters(), lr=0.1)
        return optimizer, build_scheduler(Factory("chain"), optimizer, resolver(chain=chain), "step")

    optimizer, schedule = fresh()
    advance(schedule, optimizer, range(7))
    saved = through_a_file([plain(optimizer.state_dict()), plain(schedule.scheduler.state_dict())])
    other, resumed = fresh()
    other.load_state_dict(saved[0])
    resumed.scheduler.load_state_dict(like(resumed.scheduler.state_dict(), saved[1]))
    assert advance(resumed, other, range(7, 14)) == advance(schedule, optimizer, range(7, 14))


@pytest.mark.parametrize(
    ("factory", "interval", "says"),
    [
        (Factory("StepLRR", {}), "step", "did you mean 'StepLR'"),
        (Factory("StepLR", {}), "step", "missing.*step_size"),
        (Factory("StepLR", {"step_siz": 1}), "step", "did you mean 'step_size'"),
        (Factory("StepLR", {"step_size": 1}), "batch", "choose one of step, epoch, validation"),
        (Factory("ReduceLROnPlateau"), "step", 'use scheduler_interval="validation"'),
        (Factory("LambdaLR", {"lr_lambda": "unknown"}), "step", "'unknown' cannot be found"),
        (Factory("nothing"), "step", "returned a int"),
    ],
)
def test_mistakes_of_the_scheduler_are_named(factory: Factory, interval: str, says: str) -> None:
    optimizer = optim.SGD(model().parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=says):
        build_scheduler(factory, optimizer, resolver(nothing=lambda optimizer: 3), interval)


def test_a_plateau_without_a_metric_says_what_to_give() -> None:
    optimizer = optim.SGD(model().parameters(), lr=0.1)
    schedule = build_scheduler(Factory("ReduceLROnPlateau"), optimizer, resolver(), "epoch")
    with pytest.raises(ConfigError, match="val_loader="):
        schedule.on_tick(None)
    assert build_scheduler(None, optimizer, resolver(), "step") is None


def test_the_loss_scale_follows_torch() -> None:
    mine = LossScale(scale=2.0**10, growth_interval=3)
    theirs = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    weight = torch.zeros(1, requires_grad=True)
    optimizer = optim.SGD([weight], lr=0.1)
    for skip in [False, False, True, False, False, False, False, True, True, False]:
        weight.grad = torch.tensor([float("inf") if skip else 1.0])
        theirs.scale(torch.zeros(1))
        theirs.step(optimizer)
        theirs.update()
        mine.update(skip)
        assert mine.scale == theirs.get_scale()
        assert mine.state() == theirs.state_dict()
    again = LossScale()
    again.load(theirs.state_dict())
    assert again == mine


def test_the_loss_scale_stays_a_float32() -> None:
    scale = LossScale(scale=2.0**127, growth_interval=1)
    scale.update(False)
    assert scale.scale == 2.0**127


OPTIMIZER_ARGS = {
    "Muon": {"lr": 0.01},
    "SGD": {"lr": 0.1, "momentum": 0.9},
    "RMSprop": {"momentum": 0.5, "centered": True},
}


@pytest.mark.parametrize("name", sorted(set(OPTIMIZERS) - {"LBFGS", "SparseAdam"}))
def test_every_torch_optimizer_resumes_bit_for_bit(name: str) -> None:
    def fresh():
        net = model()
        return net, build_optimizer(Factory(name, OPTIMIZER_ARGS.get(name, {})), net.named_parameters(), resolver())

    def train(net, optimizer, steps) -> None:
        for step in steps:
            net.weight.grad = torch.sin(net.weight.detach() * 7 + step)
            optimizer.step()

    net, optimizer = fresh()
    train(net, optimizer, range(5))
    saved = through_a_file({"o": plain(optimizer.state_dict()), "m": plain(net.state_dict())})
    other, resumed = fresh()
    other.load_state_dict(saved["m"])
    resumed.load_state_dict(copied(saved["o"]))
    train(net, optimizer, range(5, 10))
    train(other, resumed, range(5, 10))
    assert torch.equal(net.weight, other.weight)


def test_plain_keeps_ties_and_names_what_cannot_be_saved() -> None:
    tensor = torch.arange(4.0)
    out = plain({"a": tensor, "b": tensor, "view": tensor[:2], "f": print, "e": (torch.empty(0), 1)})
    assert out["a"] is out["b"] and out["a"] is not tensor and "f" not in out
    assert torch.equal(out["view"], tensor[:2])
    with pytest.raises(CheckpointError, match=r"state\['a'\]\[1\] is a object"):
        plain({"a": [1, object()]})


class Forgetful(optim.SGD):
    """Its state is a form of its own."""

    def state_dict(self):  # type: ignore[no-untyped-def]
        return {"lr": 0.1}


class Bare(optim.Optimizer):
    """Does not call torch's own beginning."""

    def __init__(self, params):  # type: ignore[no-untyped-def]
        self.params = list(params)

    def step(self):  # type: ignore[no-untyped-def,override]
        pass


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (Forgetful, r"'mine' gives a state_dict\(\) without 'state' and 'param_groups'.*self.state\[parameter\]"),
        (Bare, r"'mine' has no list param_groups: its __init__ must call super\(\).__init__\(params, defaults\)"),
    ],
)
def test_an_optimizer_without_what_torch_s_have_is_refused(made: type, words: str) -> None:
    net = torch.nn.Linear(2, 1)
    with pytest.raises(ConfigError, match=words):
        build_optimizer(Factory("mine", {}), net.named_parameters(), resolver(mine=made))


def test_a_fused_optimizer_keeps_to_itself_how_it_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPUs; torch fuses on processors too, so that stands for it here."""
    named = [("weight", nn.Parameter(torch.ones(3)))]
    factory = Factory("AdamW", {"lr": 0.1})
    assert (
        build_optimizer(factory, named, resolver()).param_groups[0]["fused"] is None
    )  # on a processor it is torch's choice
    monkeypatch.setattr("guava_nb.replica.optimizer._may_be_fused", lambda *_: True)
    made = build_optimizer(factory, named, resolver())
    named[0][1].grad = torch.ones(3)
    made.step()
    state = made.state_dict()
    assert made.param_groups[0]["fused"] is True and state["param_groups"][0]["fused"] is None
    plain = torch.optim.AdamW([named[0][1]], lr=0.1)
    plain.load_state_dict(state)
    made.load_state_dict(plain.state_dict())
    assert made.param_groups[0]["fused"] is True and float(made.state[named[0][1]]["step"]) == 1.0


def test_what_the_user_says_of_the_way_to_step_counts() -> None:
    parameters = [nn.Parameter(torch.ones(2, device="meta"))]
    assert not _may_be_fused(torch.optim.AdamW, {"foreach": True}, parameters)
    assert not _may_be_fused(torch.optim.Adagrad, {}, parameters) and not _may_be_fused(
        torch.optim.AdamW, {}, parameters
    )


class Sharpness(optim.SGD):
    """As SAM is published: its step asks for the loss again."""

    def step(self, closure: object = None) -> None:
        assert closure is not None, "requires closure"
        closure()  # type: ignore[operator]


class Wrapping(optim.Optimizer):
    """As wrappers are published: it calls no `__init__` of torch's."""

    def __init__(self, params: object, lr: float = 0.1) -> None:
        self.base = optim.SGD(params, lr=lr)  # type: ignore[arg-type]
        self.param_groups, self.state, self.defaults = self.base.param_groups, self.base.state, self.base.defaults

    def step(self, closure: object = None) -> None:
        self.base.step()

    def state_dict(self) -> dict[str, Any]:
        return self.base.state_dict()


def test_an_optimizer_that_asks_for_the_loss_again_is_refused_before_the_run() -> None:
    with pytest.raises(ConfigError, match="Sharpness evaluates the loss several times in one step"):
        build_optimizer(Factory("Sharpness", {"lr": 0.1}), model().named_parameters(), resolver(Sharpness=Sharpness))


class Queued(optim.SGD):
    """As L-BFGS of some libraries: keeps gradients in a queue."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter].setdefault("last", collections.deque(maxlen=2)).append(parameter.grad)


def test_what_an_optimizer_prints_while_it_is_tried_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    def telling(named: Any) -> optim.Optimizer:
        made = optim.SGD([parameter for _, parameter in named], lr=0.1)
        made.register_step_post_hook(lambda *_: print("stepped"))
        return made

    made = build_optimizer(Factory("telling"), model().named_parameters(), resolver(telling=telling))
    assert capsys.readouterr().out == ""
    made.step()
    assert capsys.readouterr().out == "stepped\n"


def test_state_that_no_checkpoint_can_hold_is_refused_before_the_run() -> None:
    says = r"'Queued': state_dict\(\)\['state'\]\[0\]\['last'\] is a deque, which cannot be saved as plain data"
    with pytest.raises(ConfigError, match=says):
        build_optimizer(Factory("Queued", {"lr": 0.1}), model().named_parameters(), resolver(Queued=Queued))


def test_a_step_that_raises_for_another_reason_is_not_said_to_ask_for_the_loss() -> None:
    def hooked(named: Any) -> optim.Optimizer:
        made = optim.SGD([p for _, p in named], lr=0.1)
        made.register_step_post_hook(lambda *_: {}["ema.weight"])
        return made

    made = build_optimizer(Factory("hooked"), model().named_parameters(), resolver(hooked=hooked))
    with pytest.raises(KeyError, match=r"ema\.weight"):  # as in a plain loop
        made.step()


def test_a_wrapper_without_torchs_own_beginning_steps_and_is_undone() -> None:
    net = model()
    made = build_optimizer(Factory("Wrapping"), net.named_parameters(), resolver(Wrapping=Wrapping))
    undo = StepUndo(made, ())
    before = net.weight.detach().clone()
    undo.begin()
    net.weight.grad = torch.ones_like(net.weight)
    made.step()
    assert not torch.equal(net.weight, before) and undo.undo() and torch.equal(net.weight, before)
