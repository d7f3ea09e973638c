"""The programs of a pipeline, one for each shape of batch, kept on all of its ranks alike.

Only the first rank sees a batch's inputs. It numbers the shapes that come and tells the others, in two integers ahead
of each batch, which one this is and whether to keep, build or first probe for it. So all ranks always do the same,
whatever each still has.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from guava_nb.errors import CollectiveError
from guava_nb.nested import ARRAYS, children
from guava_nb.parallel.module_state import unchanged
from guava_nb.parallel.pipeline.boundary_wire import showing_dependence
from guava_nb.parallel.pipeline.forward_only import ForwardOnly
from guava_nb.parallel.pipeline.schedules import Program, Shapes
from guava_nb.wire_formats.registry import WIRE_FORMATS

__all__ = ["ScheduleCache"]

#: Programs hold a buffer for every tensor and micro-batch that arrives, so few are kept; records of shapes are small.
_MOST_PROGRAMS = 4
_MOST_SHAPES = 256
_KEEP, _BUILD, _PROBE = 0, 1, 2


class ScheduleCache:
    """Makes and keeps the programs of one rank.

    Args:
        schedule: "gpipe", "1f1b" or "interleaved".
        stages: this rank's stages by their number.
        total: stages of the pipeline.
        group: the pipeline's ranks.
        device: where the stages are.
        wire: name of the format in which what depends on parameters travels in training.
    """

    def __init__(
        self, schedule: str, stages: dict[int, nn.Module], total: int, group: dist.ProcessGroup, device: torch.device,
        wire: str = "fp32",
    ) -> None:  # fmt: skip
        self._schedule, self._stages, self._total, self._wire = schedule, stages, total, WIRE_FORMATS[wire]
        self._group, self._device = group, device
        self._rank = dist.get_rank(group)
        self._model = nn.ModuleList(stages.values())
        self.forward_only = ForwardOnly(stages, total, group, device)
        self._programs: OrderedDict[int, Program] = OrderedDict()
        self._shapes: OrderedDict[int, Shapes] = OrderedDict()
        self._numbers: OrderedDict[tuple[Any, ...], int] = OrderedDict()
        self._next_number = 0

    def run(
        self, inputs: Any, parts: Sequence[Any], sizes: tuple[int, ...], loss: Callable[[int, Any], Tensor]
    ) -> None:
        """Run forward and backward on one batch.

        Args:
            inputs: of the batch, on the first rank.
            parts: the inputs of each micro-batch, on the first rank.
            sizes: rows of each micro-batch.
            loss: takes number and outputs of a micro-batch and returns the scalar that backward starts from, on the last rank.
        """
        key = (sizes, _signature(inputs), *_context(self._device, self._model))
        number, order = self._announce(key)
        program = self._program(number, order, sizes, parts)
        program.run(parts, loss)
        self._keep(key, number, program)

    def _announce(self, key: tuple[Any, ...]) -> tuple[int, int]:
        """Agree on the number of this batch's shape and on what to do about it: the first rank says, others listen."""
        number = order = 0
        if self._rank == 0:
            known = self._numbers.get(key)
            number = self._next_number if known is None else known
            order = _PROBE if known is None else _KEEP if known in self._programs else _BUILD
            self._next_number = max(self._next_number, number + 1)
        header = torch.empty(2, dtype=torch.int64, device=self._device)
        for place, value in enumerate((number, order)):
            header[place].fill_(value)  # on the device: a copy from pageable memory would wait for it
        dist.broadcast(header, dist.get_global_rank(self._group, 0), group=self._group)
        if self._rank > 0:  # the first rank need not wait for its device
            number, order = header.tolist()
        return number, order

    def _program(self, number: int, order: int, sizes: tuple[int, ...], parts: Sequence[Any]) -> Program:
        """Return what runs this shape, made anew where the first rank asks for it; `_keep` takes it back."""
        # A batch that fails leaves torch's stages in its middle, so what runs one is not kept until it has ended well.
        kept = self._programs.pop(number, None)
        if order == _KEEP and kept is not None:
            return kept
        shapes = self._probe(sizes, parts) if order == _PROBE else self._shapes.get(number)
        if shapes is None or order == _KEEP:
            raise CollectiveError(
                f"rank {self._rank} of the pipeline does not know batch shape {number}, which its first rank has used: a "
                "batch failed on some ranks only. Form the group again, or call forget() on all of its ranks"
            )
        self._shapes[number] = shapes
        return Program(self._schedule, self._stages, self._total, shapes, self._group, self._device)

    def _probe(self, sizes: tuple[int, ...], parts: Sequence[Any]) -> Shapes:
        """Send one micro-batch of each size through, forward only, to learn what passes between the stages."""
        numbers = [0] if sizes[0] == sizes[-1] else [0, len(sizes) - 1]
        shapes = Shapes(sizes, self._wire)
        with showing_dependence(self._model, self._wire), unchanged(self._model, self._device):
            self.forward_only.run(
                [copy.deepcopy(parts[number]) for number in numbers] if parts else [],  # a forward may write into them
                len(numbers),
                lambda number, outputs: None,
                lambda stage, number, arrived, left: shapes.note(stage, numbers[number], arrived, left),
            )
        return shapes

    def _keep(self, key: tuple[Any, ...], number: int, program: Program) -> None:
        # Only after a batch went through: then every rank knows the shape.
        self._numbers[key] = number
        self._numbers.move_to_end(key)
        self._programs[number] = program
        self._programs.move_to_end(number)
        self._shapes.move_to_end(number)
        while len(self._programs) > _MOST_PROGRAMS:
            self._programs.popitem(last=False)
        while len(self._shapes) > _MOST_SHAPES:
            gone, _ = self._shapes.popitem(last=False)
            self._programs.pop(gone, None)
            self._numbers = OrderedDict((k, n) for k, n in self._numbers.items() if n != gone)

    def forget(self) -> None:
        """Forget all shapes; after a batch that failed on some ranks, call it on all of them."""
        self._programs.clear()
        self._shapes.clear()
        self._numbers.clear()


def _signature(value: Any) -> tuple[Any, ...]:
    """Return what tells shapes apart: structure, and dtype and sizes of every tensor."""
    if isinstance(value, ARRAYS):
        return ((str(value.dtype), tuple(value.shape)),)
    inside = children(value)
    if inside is None:
        return (repr(value),)
    return (type(value).__name__, *((key, _signature(child)) for key, child in inside))


def _context(device: torch.device, model: nn.Module) -> tuple[Any, ...]:
    """Return what else decides which dtypes pass between the stages."""
    enabled = torch.is_autocast_enabled(device.type)
    return (enabled and str(torch.get_autocast_dtype(device.type)), model.training)
