from __future__ import annotations

import copy
import functools
import random
import types
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from guava_nb.data.split import RowSplitter
from guava_nb.protocol.messages import Factory, Finding, ParallelSpec, RunSpec
from guava_nb.replica.one_step_check import causes, whole_against_cut
from guava_nb.replica.one_step_check.whole_against_cut import compare
from guava_nb.replica.replica import Replica


class Net(nn.Module):
    def __init__(self, fails_in: str = "") -> None:
        super().__init__()
        self.fails_in = fails_in
        self.calls = 0
        self.casts = False
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.tied = self.first
        self.register_buffer("offset", torch.zeros(3))
        self.norm.eval()  # the author froze it

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.casts:
            x = x.bfloat16()
        if str(x.dtype) == self.fails_in:
            raise TypeError(f"no {x.dtype} here")
        return self.last(functional.dropout(self.norm(self.first(x)), 0.5, self.training)) + self.offset


def coupled(model: nn.Module, batch: Any) -> torch.Tensor:
    out = functional.normalize(model(batch[0]), dim=1)
    return functional.cross_entropy(out @ out.T, torch.arange(len(out)))


def rough(model: nn.Module, batch: Any) -> torch.Tensor:
    """Apart, and rounded to a thousandth: less than single precision has."""
    out = model(batch[0])
    return functional.cross_entropy(out + (out.bfloat16() - out).detach() * len(out) / 64, batch[1])


def auxiliary(model: nn.Module, batch: Any) -> torch.Tensor:
    out = model(batch[0])
    (out.square().mean() * 0.1).backward(retain_graph=True)
    return functional.cross_entropy(out, batch[1])


def added(model: nn.Module, batch: Any) -> torch.Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")


def plain_sum(model: nn.Module, batch: Any) -> tuple[torch.Tensor, None]:
    return added(model, batch), None


def penalty(model: nn.Module) -> torch.Tensor:
    return 0.3 * sum((p.pow(2).sum() for p in model.parameters()), torch.zeros(()))


def penalised_sum(model: nn.Module, batch: Any) -> tuple[torch.Tensor, None]:
    return added(model, batch) + penalty(model), None


def penalised_count(model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
    return added(model, batch) + penalty(model), len(batch[1])


def penalised_as_mean(model: nn.Module, batch: Any) -> torch.Tensor:
    return added(model, batch) + penalty(model)


def penalised_right(model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
    return added(model, batch) + len(batch[1]) * penalty(model), len(batch[1])


def penalised_mean(model: nn.Module, batch: Any) -> torch.Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1]) + penalty(model)


def penalised_and_coupled(model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
    return len(batch[1]) * coupled(model, batch) + penalty(model), len(batch[1])


def mean_times_count(model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
    return functional.cross_entropy(model(batch[0]), batch[1]) * len(batch[1]), len(batch[1])


def coupled_times_count(model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
    return coupled(model, batch) * len(batch[1]), len(batch[1])


def clamped(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean over one class, of which a batch may have none."""
    losses, counts = functional.cross_entropy(model(batch[0]), batch[1], reduction="none"), batch[1] == 1
    return (losses * counts).sum(), counts.sum().clamp(min=4)


def attacked(model: nn.Module, batch: Any) -> torch.Tensor:
    """Adversarial samples, by a backward whose gradients are dropped."""
    x = batch[0].clone().requires_grad_(True)
    functional.cross_entropy(model(x), batch[1]).backward()
    assert x.grad is not None
    model.zero_grad()
    return functional.cross_entropy(model(batch[0] + 0.1 * x.grad.sign()), batch[1])


def built(step: str | None, precision: str, fails_in: str = "") -> tuple[Replica, RunSpec]:
    spec = RunSpec(
        model=Factory("Net", {"fails_in": fails_in}), criterion=None if step else Factory("CrossEntropyLoss"),
        step=Factory(step) if step else None, optimizer=Factory("AdamW"), scheduler=None, precision=precision,
        bucket_bytes=256, hash_every_steps=0,
    )  # fmt: skip
    return Replica(spec, found, torch.device("cpu")), spec


def found(name: str) -> object:
    return globals()[name]


def look(replica: Replica, spec: RunSpec, resolve: Any = found) -> Finding:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(7, 6, generator=generator), torch.randint(0, 3, (7,), generator=generator)
    return compare(replica, spec, resolve, [(x, y), *RowSplitter().split((x, y), [(0, 3), (3, 7)])], (7, 3, 4))


def everything(replica: Replica) -> dict[str, Any]:
    model = replica.model
    return {
        "values": {name: value.clone() for name, value in model.state_dict().items()},
        "gradients": {name: p.grad for name, p in model.named_parameters()},
        "flags": {name: module.training for name, module in model.named_modules()},
        "attributes": {name: {k: v for k, v in module.__dict__.items() if type(v) in (int, float, bool, str)}
                       for name, module in model.named_modules()},
        "random": (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()),
        "dtypes": {name: value.dtype for name, value in model.state_dict().items()},
    }  # fmt: skip


def alike(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(alike(a[key], b[key]) for key in a)
    if isinstance(a, tuple):
        return all(map(alike, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else bool(a == b)


@pytest.mark.parametrize("precision", ["fp32", "fp64", "bf16"])
@pytest.mark.parametrize("step", [None, "coupled"])
def test_nothing_of_the_replica_or_the_process_changes(step: str | None, precision: str) -> None:
    replica, spec = built(step, precision)
    before = everything(replica)
    look(replica, spec)
    assert alike(before, everything(replica))


def test_single_precision_is_doubted_and_double_precision_decides() -> None:
    assert look(*built(None, "fp32")).precision == "fp32"
    assert look(*built("coupled", "fp32")).precision == "fp64"


def test_a_model_without_double_precision_is_judged_roughly() -> None:
    finding = look(*built("coupled", "fp32", "torch.float64"))
    assert (finding.outcome, finding.causes, finding.precision) == ("differs", ("coupled",), "fp32")
    replica, spec = built("rough", "fp32", "torch.float64")
    replica.model.last.weight.data *= 1e-3
    finding = look(replica, spec)
    assert (finding.outcome, finding.causes, finding.precision) == ("same", (), "bf16"), "the step casts by itself"
    assert 1e-6 < max(finding.gradient_difference, finding.loss_difference) < 1e-3


def test_a_model_of_bfloat16_is_judged_as_such() -> None:
    replica, spec = built(None, "fp32", "torch.float64")
    replica.model.to(torch.bfloat16)
    replica.model.casts = True  # type: ignore[assignment]
    finding = look(replica, spec)
    assert (finding.outcome, finding.precision) == ("same", "bf16")


def test_a_copy_that_leads_back_to_the_model_is_not_trusted() -> None:
    """A lambda keeps the module that it was made in, in a copy too."""
    replica, spec = built("coupled", "fp64")
    model = replica.model
    model.forward = lambda x: Net.forward(model, x)  # type: ignore[method-assign]
    replica._named["last.bias"].grad = mine = torch.ones(3, dtype=torch.float64)
    before = everything(replica)
    finding = look(replica, spec)
    assert (finding.outcome, finding.causes) == ("differs", ("coupled",))
    model.calls = before["attributes"][""]["calls"]  # what is Python's own is the code's
    assert alike(before, everything(replica)) and replica._named["last.bias"].grad is mine
    assert mine.tolist() == [1.0] * 3


def test_a_batch_that_cannot_be_computed_is_told_as_it_is_raised() -> None:
    replica, spec = built(None, "fp64", "torch.float64")
    assert look(replica, spec) == Finding("whole failed", precision="fp64", problem="TypeError: no torch.float64 here")


def test_a_model_that_cannot_be_copied_is_built_once_more() -> None:
    replica, spec = built("coupled", "fp32")
    replica.model.lock = (one for one in ())  # type: ignore[assignment]
    assert look(replica, spec).causes == ("coupled",)


def test_a_large_model_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_against_cut, "MOST_MODEL_BYTES", 100)
    assert look(*built(None, "fp32")) == Finding("large")


def test_a_criterion_that_is_an_object_keeps_its_precision() -> None:
    criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]))
    replica, spec = built(None, "fp32")
    spec = msgspec.structs.replace(spec, criterion=Factory("weighted"))
    finding = look(replica, spec, lambda name: criterion if name == "weighted" else found(name))
    assert (finding.outcome, criterion.weight.dtype) == ("same", torch.float32)


class Normed(nn.Module):
    def __init__(self, **norm: Any) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8, **norm), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)))


@pytest.mark.parametrize("norm", [{}, {"momentum": None}, {"track_running_stats": False, "affine": False}])
@pytest.mark.parametrize("step", [None, "coupled"])
def test_norms_that_see_all_samples_are_no_cause(norm: dict[str, Any], step: str | None) -> None:
    _, spec = built(step, "fp32")
    spec = msgspec.structs.replace(spec, model=Factory("Normed", norm))
    replica = Replica(spec, found, torch.device("cpu"))
    coupling = ("coupled",) if step else ()
    assert look(replica, spec).causes == ("batch_statistics", *coupling)
    finding = look(replica, msgspec.structs.replace(spec, sync_batchnorm=True))
    assert (finding.outcome, finding.causes) == ("differs" if step else "same", coupling)


def test_a_backward_inside_the_step_is_told_as_one() -> None:
    """Its gradients are spanned by those of the pieces, but no count of the returned loss would mend it."""
    assert look(*built("auxiliary", "fp32")).causes == ("backward",)


def test_a_sum_is_told_from_a_mean_with_wrong_weights_and_may_be_asked_for() -> None:
    finding = look(*built("added", "fp32"))
    assert (finding.outcome, finding.causes) == ("differs", ("sum",))
    assert look(*built("plain_sum", "fp32")).outcome == "same"


def test_a_count_that_is_clamped_is_told_from_a_sum() -> None:
    assert look(*built("clamped", "fp32")).causes == (causes.COUNT,)


@pytest.mark.parametrize("step", ["penalised_sum", "penalised_count", "penalised_as_mean"])
def test_a_penalty_that_each_piece_adds_is_told_from_coupling(step: str) -> None:
    assert look(*built(step, "fp32")).causes == (causes.TERM,)


@pytest.mark.parametrize("step", ["penalised_right", "penalised_mean"])
def test_the_ways_out_of_a_repeated_penalty_are_right(step: str) -> None:
    assert look(*built(step, "fp32")).outcome == "same"


def test_a_penalty_beside_coupling_is_told_as_coupling() -> None:
    assert look(*built("penalised_and_coupled", "fp32")).causes == ("coupled",)


def test_a_mean_that_is_multiplied_by_its_count_is_looked_at() -> None:
    assert look(*built("mean_times_count", "fp32")).outcome == "same"
    assert look(*built("coupled_times_count", "fp32")).causes == ("coupled",)


class ByFrequency(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(3, 4, scale_grad_by_freq=True), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.table((x > 0).sum(1) % 3))


def test_an_embedding_that_counts_its_batch_is_named() -> None:
    spec = RunSpec(
        model=Factory("ByFrequency"), criterion=None, step=Factory("mean"), optimizer=Factory("SGD"), scheduler=None
    )
    replica = Replica(spec, found, torch.device("cpu"))
    assert look(replica, spec).causes == (causes.FREQUENCY,)


def mean(model: nn.Module, batch: Any) -> torch.Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def test_a_step_that_drops_gradients_drops_those_of_no_other_worker() -> None:
    assert look(*built("attacked", "fp32")).outcome == "same"


def test_what_the_step_s_own_module_keeps_is_looked_at_and_put_back() -> None:
    """The model is of another module."""
    kept: dict[str, Any] = {}
    module = types.ModuleType("own_step")
    module.__dict__.update(kept=kept, functional=functional, __file__="own_step.py")
    exec(STEP, module.__dict__)
    _, spec = built("added", "fp32")
    spec = msgspec.structs.replace(spec, step=Factory("own"))

    def resolve(name: str) -> object:
        return module.__dict__["step"] if name == "own" else found(name)

    finding = look(Replica(spec, resolve, torch.device("cpu")), spec, resolve)
    assert finding.outcome == "differs" and any("kept" in name for name in finding.unlike) and not kept


def test_a_buffer_that_a_validation_moves_too_is_named() -> None:
    def counting(model: nn.Module, batch: Any) -> torch.Tensor:
        model.offset.add_(1)
        return functional.cross_entropy(model(batch[0]), batch[1])

    def training_only(model: nn.Module, batch: Any) -> torch.Tensor:
        model.offset.add_(float(model.training))
        return functional.cross_entropy(model(batch[0]), batch[1])

    for step, expected in ((counting, ("offset",)), (training_only, ())):
        _, spec = built("added", "fp64")
        spec = msgspec.structs.replace(spec, step=Factory("own"))
        resolve = lambda name, step=step: step if name == "own" else found(name)  # noqa: E731
        replica = Replica(spec, resolve, torch.device("cpu"))
        assert look(replica, spec, resolve).kept_looking == expected
        assert not replica.model.offset.any()


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("TEACHER", "teacher"), ("LATER", "steps"), ("SLOTS", "meter.n"), ("MODULE", "clock.n"), ("TABLE", "stats"),
        ("REMEMBERED", "seen"), ("CACHE", ""), ("RECALLED", ""),
    ],
)  # fmt: skip
def test_what_is_kept_for_later_steps_is_named_in_the_first_check(text: str, name: str) -> None:
    """A copy of the weights that follows them, counters that matter from the tenth step on; no cache."""
    module = types.ModuleType("own_step")
    module.__dict__.update(copy=copy, torch=torch, functional=functional, cache=functools.cache, __file__="own_step.py")
    exec(globals()[text], module.__dict__)
    _, spec = built("added", "fp64")
    spec = msgspec.structs.replace(spec, step=Factory("own"))

    def resolve(wanted: str) -> object:
        return module.__dict__["step"] if wanted == "own" else found(wanted)

    replica = Replica(spec, resolve, torch.device("cpu"))
    before = [p.clone() for p in replica.model.parameters()]
    kept = [one for one in look(replica, spec, resolve).kept if not one.endswith("calls")]  # Net counts, too
    assert kept == ([f"own_step.{name}"] if name else [])
    put_back = {
        "SLOTS": "meter.n",
        "MODULE": "clock.n.item()",
        "TABLE": "stats['n'].item()",
        "REMEMBERED": "seen.cache_info()[1]",
    }
    assert eval(put_back.get(text, "0"), module.__dict__) == 0
    assert all(torch.equal(a, b) for a, b in zip(before, replica.model.parameters(), strict=True))


def test_an_iterator_that_the_model_keeps_is_named_and_stands_where_it_stood() -> None:
    def scaled(model: nn.Module, batch: Any) -> torch.Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1]) * next(model.scales)

    _, spec = built("added", "fp64")
    spec = msgspec.structs.replace(spec, step=Factory("own"))
    resolve = lambda name: scaled if name == "own" else found(name)  # noqa: E731
    replica = Replica(spec, resolve, torch.device("cpu"))
    scales = replica.model.scales = iter([1.0] * 50)
    assert "model.scales" in look(replica, spec, resolve).kept
    assert replica.model.scales is scales and len(list(scales)) == 50


TEACHER = """
teacher = None
def step(model, batch):
    global teacher
    x, y = batch
    if teacher is None:
        teacher = copy.deepcopy(model)
    with torch.no_grad():
        for kept, new in zip(teacher.parameters(), model.parameters()):
            kept.mul_(0.9).add_(new, alpha=0.1)
    out = model(x)
    return functional.cross_entropy(out, y) + functional.mse_loss(out, teacher(x).detach())
"""
LATER = """
steps = 0
def step(model, batch):
    global steps
    x, y = batch
    steps += 1
    out = model(x)
    return functional.cross_entropy(out, y) + (out.square().mean() if steps > 9 else 0.0)
"""
SLOTS = """
class Meter:
    __slots__ = ("n",)
    def __init__(self):
        self.n = 0
meter = Meter()
def step(model, batch):
    x, y = batch
    meter.n += 1
    out = model(x)
    return functional.cross_entropy(out, y) + (out.square().mean() if meter.n > 9 else 0.0)
"""
MODULE = """
class Clock(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("n", torch.zeros(()))
clock = Clock()
def step(model, batch):
    x, y = batch
    clock.n += 1
    return functional.cross_entropy(model(x), y) * (2 if clock.n > 9 else 1)
"""
TABLE = """
stats = {"n": torch.zeros(()), "worst": None}
def step(model, batch):
    x, y = batch
    stats["n"] += 1
    return functional.cross_entropy(model(x), y) * (2 if stats["n"] > 9 else 1)
"""
REMEMBERED = """
@cache
def seen(number):
    return number
def step(model, batch):
    x, y = batch
    return functional.cross_entropy(model(x), y) * (2 if seen(seen.cache_info().misses) > 9 else 1)
"""
RECALLED = """
@cache
def scale(width):
    return width ** -0.5
def step(model, batch):
    x, y = batch
    return functional.cross_entropy(model(x) * scale(4), y)
"""
CACHE = """
last = None
def step(model, batch):
    global last
    x, y = batch
    last = model(x)
    return functional.cross_entropy(last, y)
"""
STEP = """
def step(model, batch):
    x, y = batch
    if "mean" not in kept:
        kept["mean"] = x.mean(0)
    return functional.cross_entropy(model(x - kept["mean"]), y)
"""


def halved(model: nn.Module, batch: Any) -> torch.Tensor:
    """A loss that couples samples a little, beside labels that came in 16 bits."""
    labels = functional.one_hot(batch[1], 3).bfloat16() * 1
    out = model(batch[0])
    return (out - labels.to(out.dtype)).square().mean() + 0.02 * out.var(0).mean()


def test_labels_of_16_bits_make_no_other_difference_a_rounding() -> None:
    finding = look(*built("halved", "fp32"))
    assert (finding.outcome, finding.causes, finding.precision) == ("differs", ("coupled",), "fp64")


def mixed(batch: Any) -> Any:
    x, y = batch
    return 0.7 * x + 0.3 * x.flip(0), y


@pytest.mark.parametrize(("mode", "causes_found"), [("data", ("treated",)), ("pipeline", ()), ("hybrid", ("treated",))])
def test_what_is_augmented_is_cut_before_or_after_as_the_run_cuts_it(mode: str, causes_found: tuple[str, ...]) -> None:
    shape = {"data": None, "pipeline": ParallelSpec(pp=2), "hybrid": ParallelSpec(pp=2, dp=2)}[mode]
    spec = msgspec.structs.replace(built(None, "fp32")[1], augment=Factory("mixed"))
    finding = look(Replica(spec, found, torch.device("cpu")), msgspec.structs.replace(spec, parallel=shape))
    assert (finding.causes, finding.outcome) == (causes_found, "differs" if causes_found else "same")
