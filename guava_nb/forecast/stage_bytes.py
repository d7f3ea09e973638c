"""What passes between the parts of a model, found by running it here on a few rows: nothing is trained, nobody is asked."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from guava_nb.data.split import RowSplitter
from guava_nb.errors import ConfigError
from guava_nb.forecast.star_bytes import Sizes
from guava_nb.forecast.state_bytes import Asked
from guava_nb.parallel.pipeline.forward_only import is_trainable
from guava_nb.parallel.pipeline.stage_messages import slots_of, take_apart
from guava_nb.parallel.pipeline.stages import Split
from guava_nb.parallel.tensor.tensor_plan import Plan, split_modules
from guava_nb.protocol.messages import RunSpec
from guava_nb.replica.build import autocast_dtype
from guava_nb.replica.objective import build_objective
from guava_nb.replica.outputs import inputs_of
from guava_nb.replica.preprocess import Preprocessing

__all__ = ["Boundaries", "Few", "Passed", "PassedSums", "boundaries", "passed_sums"]

_CPU = torch.device("cpu")
Resolve = Callable[[str], Any]


@dataclass(frozen=True, slots=True)
class Few:
    """A few rows of the first batch as a model here would see them."""

    spec: RunSpec
    batch: Any
    rows: int

    @classmethod
    def of(cls, asked: Asked, sizes: Sizes, resolve: Resolve, rows: int) -> Few:
        """Cut and treat them.

        Raises:
            ConfigError: there is no batch to look at.
        """
        if not sizes.groups:
            raise ConfigError(
                "the loader is an iterator that can be drawn once only, so what passes between the parts of the model cannot be "
                "looked at before the run: give a DataLoader or a list of batches for a forecast of this mode"
            )
        first = sizes.groups[0][0]
        cut = RowSplitter(asked.plan.split_fn).split(first.batch, [(0, min(rows, first.rows))], first.rows)[0]
        return cls(asked.spec, Preprocessing(asked.spec, resolve, _CPU).train(cut), min(rows, first.rows))


@contextlib.contextmanager
def _precision(spec: RunSpec) -> Iterator[None]:
    try:
        dtype = autocast_dtype(spec.precision, _CPU)
    except ConfigError:  # this precision goes on GPUs only
        dtype = torch.bfloat16
    with contextlib.nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype):
        yield


# ------------------------------------------------------------------------------------------------------------ pipelines


@dataclass(frozen=True, slots=True)
class Boundaries:
    """What leaves each stage but the last for so many rows: bytes that go on, and those whose gradients come back."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    tensors: tuple[tuple[int, ...], ...]  # bytes of each tensor as it is
    rows: int


@torch.no_grad()
def boundaries(split: Split, few: Few) -> Boundaries:
    """Run the stages one after the other and look at what passes."""
    values: Any = (inputs_of(few.batch),)
    forward, backward, kinds = [], [], []
    trained = False
    modules = [copy.deepcopy(module).eval() for module in split.modules]
    with _precision(few.spec):
        for module in modules[:-1]:
            values = module(*values)
            trained = trained or is_trainable(module)
            boundary, tensors = take_apart(values, gradient=trained)
            slots = slots_of([boundary])
            sizes = [slot.length * slot.torch_dtype.itemsize for slot in slots]
            forward.append(sum(sizes))
            backward.append(sum(size for size, slot in zip(sizes, slots, strict=True) if slot.gradient))
            kinds.append(tuple(tensor.numel() * tensor.element_size() for tensor in tensors))
    return Boundaries(tuple(forward), tuple(backward), tuple(kinds), few.rows)


# --------------------------------------------------------------------------------------------------------- shared layers


@dataclass(slots=True)
class _CountingRanks:
    """One of several ranks that share layers; what it would exchange is counted, and made up."""

    rank: int
    size: int
    sums: list[int] = field(default_factory=list)
    gathers: list[int] = field(default_factory=list)

    def sum(self, tensor: Tensor) -> Tensor:
        half = tensor.dtype in (torch.float16, torch.bfloat16)
        self.sums.append(tensor.numel() * (4 if half else tensor.element_size()))
        return tensor.clone()

    def collect(self, tensor: Tensor, lengths: Sequence[int]) -> list[Tensor]:
        whole = torch.nn.functional.pad(tensor, (0, max(lengths) - tensor.shape[-1]))
        self.gathers.append(whole.numel() * whole.element_size())
        return [whole.narrow(-1, 0, length) for length in lengths]

    def counted(self) -> Passed:
        return Passed(tuple(self.sums), tuple(self.gathers))


@dataclass(frozen=True, slots=True)
class Passed:
    """What one rank exchanges: bytes of each sum, and of each tensor that is gathered."""

    sums: tuple[int, ...]
    gathers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PassedSums:
    """What ranks that share layers exchange for so many rows.

    Attributes:
        trained: forward and backward.
        looked: forward alone.
        checked: forward with whole activations around each layer, as the first batch is looked at.
    """

    trained: Passed
    looked: Passed
    checked: Passed
    rows: int


def passed_sums(model: nn.Module, plan: Plan, ranks: int, few: Few, resolve: Resolve) -> PassedSums:
    """Run a copy of the model, split for one rank, and count."""
    counting = _CountingRanks(0, ranks)
    part = copy.deepcopy(model)
    regions = split_modules(part, plan, counting)
    part.train()
    objective = build_objective(few.spec, resolve, _CPU)
    with _precision(few.spec):
        loss = objective(part, few.batch, few.rows)
    looked = counting.counted()
    if loss.value.requires_grad:
        loss.value.float().backward()  # type: ignore[no-untyped-call]
    trained = counting.counted()
    counting.sums.clear()
    counting.gathers.clear()
    for region in regions:
        region.join()
    with torch.no_grad(), _precision(few.spec):
        objective(part, few.batch, few.rows)
    return PassedSums(trained, looked, counting.counted(), few.rows)
