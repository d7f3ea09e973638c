import copy
import itertools
import random
import sys

import numpy as np
import pytest
import torch
from torch import nn

from guava_nb.parallel.tensor.plan_search import make_plan
from guava_nb.parallel.tensor.tensor_plan import split_modules
from guava_nb.replica.one_step_check.python_state import (
    ModuleGlobals,
    PythonState,
    adopt,
    changed_since,
    digests,
    is_alike,
    is_apart,
)
from tests.support.spread import Attention, FusedAttention

calls = 0
seen = {"batches": 0, "names": ["a"]}


class Meter:
    def __init__(self):
        self.total = 0.0


meter = Meter()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.it, self.history = nn.Linear(2, 2), 0, []
        self.hidden = [nn.Linear(2, 2)]
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, x):
        return self.layer(x)


def step(model, x):
    global calls
    calls += 1
    seen["batches"] += 1
    seen["names"].append("b")
    meter.total += 1.0
    step.n = getattr(step, "n", 0) + 1
    model.it += 1
    model.late = torch.ones(2)
    model.history.append(model(x))
    model.hidden[0].weight.data += 1


class Loss(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.zeros(2))

    def forward(self, x):
        self.center = self.center + x.mean(0).detach()
        return x.sum()


def test_everything_that_a_step_changes_is_named_and_put_back():
    model, loss = Net(), Loss()
    state = PythonState(model, {"criterion": loss, "step": step})
    names, before = seen["names"], copy.deepcopy(model.hidden[0].weight)
    step(model, torch.ones(1, 2))
    loss(torch.ones(1, 2))
    module = __name__
    assert set(state.moved(state.read())) == {
        "model.it", "model.late", "model.history", "model.hidden", "criterion.center", "step.n", f"{module}.calls",
        f"{module}.seen", f"{module}.meter.total",
    }  # fmt: skip
    state.restore(but={"model.it"})
    assert state.moved(state.read()) == ("model.it",)
    assert (calls, seen, model.it, model.history, meter.total) == (0, {"batches": 0, "names": ["a"]}, 1, [], 0.0)
    assert not hasattr(step, "n") and not hasattr(model, "late") and torch.equal(model.hidden[0].weight, before)
    assert len(names) >= 1 and loss.center.tolist() == [0.0, 0.0]


def test_a_model_that_was_built_again_goes_on_from_the_one_that_trains():
    trained, built = Net(), Net()
    trained.it, trained.late = 7, (trained.layer.weight * 2).sum()
    trained.mean += 3
    adopt(built, trained)
    assert (built.it, built.mean.tolist()) == (7, [3.0, 3.0])
    assert torch.equal(built.layer.weight, trained.layer.weight) and built.hidden[0] is not trained.hidden[0]


def test_what_two_modules_of_a_model_share_they_share_in_one_that_was_built_again():
    trained, built = (nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)]) for _ in range(2))
    for model in (trained, built):
        clock, mean = {"ticks": 0}, torch.zeros(1)
        for part in model:
            part.clock, part.mean = clock, mean
    trained[0].clock["ticks"] = 3
    trained[0].mean.add_(2)
    adopt(built, trained)
    assert built[0].clock is built[1].clock is not trained[0].clock and built[1].clock == {"ticks": 3}
    assert built[0].mean is built[1].mean is not trained[0].mean and built[1].mean.tolist() == [2.0]


@pytest.mark.parametrize(
    ("whole", "pieces", "apart"),
    [
        ({"": torch.arange(4)}, [{"": torch.arange(2)}, {"": torch.arange(2, 4)}], True),
        ({"h": torch.eye(4)}, [{"h": torch.eye(4)[:, :1]}, {"h": torch.eye(4)[:, 1:]}], True),
        ({"": torch.ones(2)}, [{"": torch.ones(2)}, {"": torch.zeros(2)}], False),
        ({"": 1.0}, [{"": 1.0}, {"": 1.0}], True),
        ({"": 1.0}, [{"": 1.0}, {"": 2.0}], False),
        ({"": 1}, [{}], False),
    ],
)
def test_state_of_single_samples_is_told_from_state_of_a_batch(whole, pieces, apart):
    assert is_apart(whole, pieces, 1e-6) == apart
    assert is_alike(whole, whole, 0.0)


class Slow(torch.optim.SGD):
    """Keeps something beside its state."""

    def __init__(self, params):
        super().__init__(params, lr=0.1, momentum=0.9)
        self.slow, self.turns = [torch.zeros(2)], 0

    def step(self, closure=None):
        super().step(closure)
        self.turns += 1
        self.slow[0] += 1


def test_what_a_run_changed_outside_of_its_state_is_named():
    model = Net()
    optimizer = Slow(model.parameters())
    first = digests(model, {"step": step}, optimizer)
    assert changed_since(first, digests(model, {"step": step}, optimizer)) == ()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    model.it, model.late = 3, torch.ones(1)
    model.mean += 1
    assert changed_since(first, digests(model, {"step": step}, optimizer)) == (
        "model.it", "optimizer.slow", "optimizer.turns", "(model.late)",
    )  # fmt: skip
    assert digests(None, {}, None) == {}


class Carried(Net):
    def get_extra_state(self):
        return self.it

    def set_extra_state(self, state):
        self.it = state


def test_extra_state_is_carried_and_not_named():
    model = Carried()
    first = digests(model, {})
    model.it = 5
    assert changed_since(first, digests(model, {})) == ()


def test_what_spreads_a_module_over_ranks_is_not_looked_at():
    class Spread:
        def __init__(self):
            self.gathered = torch.zeros(2)

    Spread.__module__ = "torch.distributed.fsdp"  # whose tensors' memory is given back between two forwards
    model = Net()
    model.spread = {"state": Spread()}
    first = digests(model, {})
    model.spread["state"].gathered += 1
    assert first["model.spread"] == b"" and changed_since(first, digests(model, {})) == ()


@pytest.mark.parametrize("make", [
    lambda: torch.Generator().manual_seed(0), lambda: np.random.default_rng(0), lambda: np.random.RandomState(0),
    lambda: random.Random(0),
])  # fmt: skip
def test_a_stream_of_random_numbers_is_put_back_in_place(make):
    def drawn(stream):
        return float(torch.rand(1, generator=stream)) if isinstance(stream, torch.Generator) else stream.random()

    model = Net()
    model.rng = stream = make()
    state, first = PythonState(model, {}), drawn(make())
    assert (
        drawn(stream) == first
        and state.moved(state.read()) == ("model.rng",)
        and state.streams().keys() == {"model.rng"}
    )
    state.restore()
    assert model.rng is stream and drawn(stream) == first


def test_globals_of_imported_modules_begin_again_with_each_run(tmp_path, monkeypatch):
    (tmp_path / "own_counter.py").write_text("count = 0\ndef up():\n    global count\n    count += 1\n")
    (tmp_path / "own_trainer.py").write_text("import own_counter\nlog = []\ndef step(model, batch): own_counter.up()\n")
    monkeypatch.syspath_prepend(tmp_path)
    try:
        import own_trainer

        kept = ModuleGlobals()
        for _ in range(2):
            kept.restore()
            kept.note([own_trainer.step, torch.nn.Linear])
            assert own_trainer.own_counter.count == 0 and own_trainer.log == []
            own_trainer.step(None, None)
            own_trainer.log.append(1)
    finally:
        for name in ("own_counter", "own_trainer"):
            sys.modules.pop(name, None)


numbers = itertools.count(3)


class Counted:
    calls, log = 0, []


def counting(model, batch, state={"n": 0}):  # noqa: B006
    Counted.calls += 1
    Counted.log.append(1)
    state["n"] += 1
    return next(numbers)


def around():
    calls, seen = 0, []

    def step(model, batch):
        nonlocal calls
        calls += 1
        seen.append(counting(model, batch))
        return calls

    return step


def test_counters_in_classes_defaults_and_functions_around_are_put_back():
    step = around()
    state, module = PythonState(nn.Module(), {"step": step}), __name__
    assert step(None, None) == 1
    assert set(state.moved(state.read())) == {
        "step.calls", "step.seen", f"{module}.numbers", f"{module}.Counted.calls", f"{module}.Counted.log", "counting.state",
    }  # fmt: skip
    state.restore()
    assert state.moved(state.read()) == () and (Counted.calls, Counted.log, counting.__defaults__) == (
        0,
        [],
        ({"n": 0},),
    )
    assert step(None, None) == 1 and step(None, None) == 2 and next(numbers) == 5
    state.restore()


class FirstOfTwo:
    """One of two ranks, which never sends."""

    rank, size = 0, 2


@pytest.mark.parametrize(("make", "count"), [(Attention, "n_heads"), (FusedAttention, "n_head")])
def test_a_whole_model_takes_over_what_a_rank_counted_and_not_the_heads_that_it_has(make, count):
    """With half of the heads the whole model computes other numbers: a run in tensor mode was warned of that."""
    whole, part = nn.ModuleDict({"a": make()}), nn.ModuleDict({"a": make()})
    x = torch.randn(2, 5, whole["a"].get_submodule("o_proj" if make is Attention else "c_proj").out_features)
    before = whole["a"](x)
    split_modules(part, make_plan(part, {}, 2), FirstOfTwo())
    part["a"].calls = 3
    adopt(whole, part)
    assert (getattr(part["a"], count), getattr(whole["a"], count), whole["a"].calls) == (2, 4, 3)
    assert torch.equal(whole["a"](x), before)
