"""What the check makes of augmented batches, of labels of 16 bits, and of buffers that begin with zeros."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import nn
from torch.nn import functional

from guava_nb.data.split import RowSplitter
from guava_nb.protocol.messages import Factory, Finding, ParallelSpec, RunSpec
from guava_nb.replica.one_step_check.whole_against_cut import compare
from guava_nb.replica.replica import Replica


class Net(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 3)


class Averaging(Net):
    """Moving averages: of counts, which is no sum over shares, and of a mean, which is one of theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("counts", torch.zeros(3))
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.counts.mul_(0.9).add_(0.1 * functional.one_hot(x[:, :3].argmax(1), 3).sum(0))
            self.mean.lerp_(x.mean(0), 0.1)
        return super().forward(x)


def halved(model: nn.Module, batch: Any) -> torch.Tensor:
    """A loss that couples samples a little, beside labels that came in 16 bits."""
    labels = functional.one_hot(batch[1], 3).bfloat16() * 1
    out = model(batch[0])
    return (out - labels.to(out.dtype)).square().mean() + 0.02 * out.var(0).mean()


class Held:
    """A teacher in an object of the user's."""

    def __init__(self) -> None:
        self.parts = {"net": Net()}


teacher, held = Net(), Held()
named: nn.Module | None = None


def taught(model: nn.Module, batch: Any) -> torch.Tensor:
    """Three ways to keep a teacher beside the model, each moved in each step."""
    global named
    if named is None:
        named = Net()
    x, wanted = batch[0], torch.zeros(())
    for one in (teacher, held.parts["net"], named):
        with torch.no_grad():
            for mine, its in zip(one.parameters(), model.parameters(), strict=True):
                mine.lerp_(its.to(mine.dtype), 0.1)
        wanted = wanted + one(x.to(one.weight.dtype)).detach()
    return (model(x) - wanted).square().mean()


def mixed(batch: Any) -> Any:
    x, y = batch
    return 0.7 * x + 0.3 * x.flip(0), y


def look(shape: ParallelSpec | None = None, step: str | None = None, model: str = "Net", **changes: Any) -> Finding:
    spec = RunSpec(
        model=Factory(model), criterion=None if step else Factory("CrossEntropyLoss"), step=Factory(step) if step else None,
        optimizer=Factory("AdamW"), scheduler=None, **changes,
    )  # fmt: skip
    resolve = globals().__getitem__
    generator = torch.Generator().manual_seed(1)
    batch = torch.randn(7, 6, generator=generator), torch.randint(0, 3, (7,), generator=generator)
    batches = [batch, *RowSplitter().split(batch, [(0, 3), (3, 7)])]
    replica = Replica(spec, resolve, torch.device("cpu"))
    return compare(replica, replace(spec, parallel=shape), resolve, batches, (7, 3, 4))


def test_labels_of_16_bits_make_no_other_difference_a_rounding() -> None:
    finding = look(step="halved")
    assert (finding.outcome, finding.causes, finding.precision) == ("differs", ("coupled",), "fp64")


@pytest.mark.parametrize(
    ("shape", "causes"),
    [(None, ("treated",)), (ParallelSpec(pp=2), ()), (ParallelSpec(pp=2, dp=2), ("treated",))],
    ids=["data", "pipeline", "hybrid"],
)
def test_what_is_augmented_is_cut_before_or_after_as_the_run_cuts_it(
    shape: ParallelSpec | None, causes: tuple[str, ...]
) -> None:
    finding = look(shape, augment=Factory("mixed"))
    assert (finding.causes, finding.outcome) == (causes, "differs" if causes else "same")


def test_a_rule_that_fits_a_buffer_of_zeros_alone_is_not_taken() -> None:
    finding = look(model="Averaging")
    assert (finding.outcome, finding.causes, finding.buffers, finding.fits) == ("differs", (), ("counts",), {})


@pytest.mark.parametrize("is_new", [True, False], ids=["made in the step", "there before"])
def test_a_teacher_beside_the_model_is_put_back(is_new: bool) -> None:
    global named
    named = None if is_new else Net()
    teachers = [teacher, held.parts["net"], *([] if named is None else [named])]
    before = [parameter.detach().clone() for one in teachers for parameter in one.parameters()]
    finding = look(step="taught")
    after = [parameter for one in teachers for parameter in one.parameters()]
    assert all(map(torch.equal, before, after)), "the run goes on with another teacher"
    assert (named is None) == is_new and finding.outcome in ("same", "differs")
