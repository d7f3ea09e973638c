"""What passes between the parts of a model, found by running it here on a few rows: nothing is trained, no worker is asked."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from guava_nb.data.split import RowSplitter
from guava_nb.errors import ConfigError
from guava_nb.forecast.relay_bytes import Operation, Relayed
from guava_nb.forecast.run_facts import RunFacts
from guava_nb.parallel.pipeline.boundary_wire import showing_dependence
from guava_nb.parallel.pipeline.forward_only import is_trainable
from guava_nb.parallel.pipeline.stage_messages import slots_of, take_apart
from guava_nb.parallel.tensor.tensor_plan import Plan, split_modules
from guava_nb.protocol.messages import RunSpec
from guava_nb.replica.model.build import autocast_dtype
from guava_nb.replica.objective import build_objective
from guava_nb.replica.outputs import inputs_of
from guava_nb.replica.preprocess import Preprocessing
from guava_nb.wire_formats.registry import WIRE_FORMATS

__all__ = ["Passed", "passed_between", "passed_sums"]

_CPU = torch.device("cpu")
_FEW_ROWS = 2


def _few_rows(run: RunFacts) -> tuple[Any, int]:
    """Return a few rows of the first batch as a model here would see them, and how many they are.

    Raises:
        ConfigError: there is no batch to look at.
    """
    first = run.train.first
    if first is None:
        raise ConfigError(
            "the loader is an iterator that can be drawn once only, so what passes between the parts of the model cannot be "
            "looked at before the run: give a DataLoader or a list of batches for a forecast of this mode"
        )
    splitter = RowSplitter(run.plan.split_fn, run.plan.feed.reading)
    rows = first.rows if splitter.problem else min(_FEW_ROWS, first.rows)
    cut = splitter.split(first.batch, [(0, rows)], first.rows)[0]
    return Preprocessing(run.spec, run.resolve, _CPU).train(cut), rows


@contextlib.contextmanager
def _precision(spec: RunSpec) -> Iterator[None]:
    try:
        dtype = autocast_dtype(spec.precision, _CPU)
    except ConfigError:  # this precision goes on GPUs only
        dtype = torch.bfloat16
    with contextlib.nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype):
        yield


def passed_between(
    run: RunFacts, stages: Sequence[nn.Module]
) -> tuple[list[tuple[list[float], list[float]]], list[Operation]]:
    """Run the stages of a pipeline, which are copies, one after the other and look at what passes.

    Returns:
        For one row the bytes of each tensor that is sent forward and of each that comes back, after each stage but the last, as
        stages that know the shapes send them; and each tensor that is sent forward in a validation.
    """
    batch, rows = _few_rows(run)
    values: Any = (inputs_of(batch),)
    passing: list[tuple[list[float], list[float]]] = []
    tensors: list[Operation] = []
    trained, wire = False, WIRE_FORMATS[run.spec.wire]
    with _precision(run.spec), showing_dependence(nn.ModuleList(stages), wire):
        for stage in stages[:-1]:
            values = stage.eval()(*values)
            trained = trained or is_trainable(stage)
            boundary, told = take_apart(values, gradient=trained)
            sizes = [(slot.length * slot.torch_dtype.itemsize, slot.gradient) for slot in slots_of([boundary], wire)]
            passing.append(([size / rows for size, _ in sizes], [size / rows for size, has_back in sizes if has_back]))
            tensors += [(Relayed.sent, tensor.numel() * tensor.element_size() / rows) for tensor in told]
    return passing, tensors


@dataclass(slots=True)
class _CountingRanks:
    """One of several ranks that share layers; what it would exchange is counted, and made up."""

    rank: int
    size: int
    counted: list[Operation] = field(default_factory=list)

    def sum(self, tensor: Tensor) -> Tensor:
        half = tensor.dtype in (torch.float16, torch.bfloat16)
        self.counted.append((Relayed.all_reduce, tensor.numel() * (4 if half else tensor.element_size())))
        return tensor.clone()

    def collect(self, tensor: Tensor, lengths: Sequence[int]) -> list[Tensor]:
        whole = torch.nn.functional.pad(tensor, (0, max(lengths) - tensor.shape[-1]))
        self.counted.append((Relayed.all_gather, whole.numel() * whole.element_size()))
        return [whole.narrow(-1, 0, length) for length in lengths]

    def each(self, rows: int) -> tuple[Operation, ...]:
        """What was counted so far, for one row."""
        return tuple((does, nbytes / rows) for does, nbytes in self.counted)


@dataclass(frozen=True, slots=True)
class Passed:
    """What ranks that share layers exchange for one row.

    Attributes:
        trained: forward and backward.
        looked: forward alone.
        checked: forward with whole activations around each layer, as the first batch is looked at.
    """

    trained: tuple[Operation, ...] = ()
    looked: tuple[Operation, ...] = ()
    checked: tuple[Operation, ...] = ()


def passed_sums(run: RunFacts, plan: Plan) -> Passed:
    """Run a copy of the model, split for one rank, and count."""
    batch, rows = _few_rows(run)
    ranks, part = _CountingRanks(0, run.mesh.tensor), copy.deepcopy(run.model)
    regions = split_modules(part, plan, ranks)
    part.train()
    objective = build_objective(run.spec, run.resolve, _CPU)
    with _precision(run.spec):
        loss = objective(part, batch, rows)
    looked = ranks.each(rows)
    if loss.value.requires_grad:
        loss.value.float().backward()  # type: ignore[no-untyped-call]
    trained = ranks.each(rows)
    ranks.counted.clear()
    for region in regions:
        region.join()
    with torch.no_grad(), _precision(run.spec):
        objective(part, batch, rows)
    return Passed(trained, looked, ranks.each(rows))
