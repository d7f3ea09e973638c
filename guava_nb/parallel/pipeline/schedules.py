"""Stages and schedules of torch.distributed.pipelining for batches of one shape.

Torch gets numbers of micro-batches instead of inputs and labels: what belongs to number k is looked up here, so a label
cannot meet another micro-batch's output, and batches may have any structure. The shapes between stages are given, so
that torch has no reason to ask for them with pickled objects.

Shapes: flat tensors between stages are [L], as `stage_messages` makes them; M micro-batches. GPipe: Huang et al. 2019,
arXiv:1811.06965. 1F1B and interleaved 1F1B: Narayanan et al. 2021, arXiv:2104.04473.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from guava_nb.errors import TrainingError
from guava_nb.parallel.pipeline.stage_messages import Boundary, Slot, pack, put_together, slots_of, take_apart, unpack
from guava_nb.wire_formats.wire_format import WireFormat

__all__ = ["Program", "Shapes"]


@dataclass(frozen=True, slots=True)
class Shapes:
    """What passes into and out of each local stage, for batches of one shape.

    Attributes:
        sizes: rows of each micro-batch; two values at most.
        wire: in which format what depends on parameters travels.
        arriving: stage to the records of what comes in, by rows of the micro-batch; the first stage has none.
        leaving: stage to the records of what goes out; the last stage has none.
    """

    sizes: tuple[int, ...]
    wire: WireFormat
    arriving: dict[int, dict[int, Boundary]] = field(default_factory=dict)
    leaving: dict[int, dict[int, Boundary]] = field(default_factory=dict)

    def note(self, stage: int, number: int, arrived: Boundary | None, left: Boundary | None) -> None:
        """Remember what a stage saw of a micro-batch."""
        if arrived is not None:
            self.arriving.setdefault(stage, {})[self.sizes[number]] = arrived
        if left is not None:
            self.leaving.setdefault(stage, {})[self.sizes[number]] = left


def _applied(function: type[torch.autograd.Function], *tensors: Tensor) -> Any:
    return function.apply(*tensors)  # type: ignore[no-untyped-call]


class _Joint(torch.autograd.Function):
    """Copies of tensors that are used together: once a gradient comes for one, all have one, zeros if need be.

    Torch before 2.13 fails where a received tensor gets no gradient. The copies let a stage begin with an in-place
    operation, which a received buffer does not allow.
    """

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return a copy of each tensor, of its own shape."""
        return tuple(tensor.clone() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        """Return each copy's gradient, of its shape; autograd fills in zeros where there is none."""
        return tuple(gradient.contiguous() for gradient in gradients)


class _Anchor(torch.autograd.Function):
    """A tensor that claims to depend on others as well, with gradients of zero."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, *others: Tensor) -> Tensor:
        """Return a copy of `tensor`; `others` have any shape."""
        ctx.save_for_backward(*others)
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        """Return the gradient as it is for the tensor, and zeros of their shapes for the others."""
        return (gradient, *(torch.zeros_like(other) for other in ctx.saved_tensors))


def _with_gradients(flats: Sequence[Tensor]) -> list[Tensor]:
    """Return received flat tensors, each `[L]`, those that want gradients joined."""
    wanting = [flat for flat in flats if flat.requires_grad]
    joined = iter(_applied(_Joint, *wanting)) if wanting else iter(())
    return [next(joined) if flat.requires_grad else flat for flat in flats]


class _Station(nn.Module):
    """A stage as torch sees it: flat tensors in, flat tensors out; the last one keeps its outputs for the loss."""

    def __init__(self, stage: nn.Module, index: int, total: int, shapes: Shapes, device: torch.device) -> None:
        super().__init__()
        self.stage = stage
        self._index, self._first, self._last = index, index == 0, index == total - 1
        self._shapes, self._device = shapes, device
        self.slots_in = () if self._first else slots_of(list(shapes.arriving[index].values()), shapes.wire)
        self.slots_out = () if self._last else slots_of(list(shapes.leaving[index].values()), shapes.wire)
        self._frozen_before = not any(slot.gradient for slot in self.slots_in)
        self.begin(())

    def begin(self, inputs: Sequence[Any]) -> None:
        """Forget the batch before and take the inputs of the next."""
        self._inputs = inputs
        self._number = 0
        self.outputs: dict[int, tuple[Any, list[Tensor]]] = {}
        self.failure: BaseException | None = None

    def forward(self, *arrived: Tensor) -> Any:
        # Torch's schedules run the micro-batches of a stage in their order; the numbers that it passes to the first
        # stage and to the loss are compared with this count.
        number, self._number = self._number, self._number + 1
        try:
            return self._forward(number, arrived)
        except Exception as error:
            # Torch wraps what a stage raises in a RuntimeError of its own; the caller wants the true one.
            self.failure = error
            raise

    def _forward(self, number: int, arrived: Sequence[Tensor]) -> Any:
        """Run one micro-batch.

        Args:
            number: of the micro-batch.
            arrived: flat tensors of the stage before, each `[L]`; of the first stage the micro-batch's number alone.

        Returns:
            Flat tensors, each `[L]`; of the last stage a 0, `[1]`, as its outputs stay here for the loss.
        """
        rows = self._shapes.sizes[number]
        if self._first:
            _check_number(int(arrived[0]), number)
            values: Any = (self._inputs[number],)
            flats: list[Tensor] = []
        else:
            flats = _with_gradients(arrived)
            record = self._shapes.arriving[self._index][rows]
            values = put_together(record, unpack(flats, record, self._shapes.wire), self._device)
        result = self.stage(*values)
        anchors = [flat for flat in flats if flat.requires_grad]
        if self._last:
            self.outputs[number] = (result, anchors)
            return torch.zeros(1, device=self._device)
        return tuple(self._pack(result, rows, anchors))

    def needs_anchor(self, results: Iterable[Tensor]) -> bool:
        """Whether what arrived takes no part in these results: torch before 2.13 sends a gradient back for it all the same."""
        return self._frozen_before or not any(result.requires_grad for result in results)

    def _pack(self, result: Any, rows: int, anchors: Sequence[Tensor]) -> list[Tensor]:
        """Return a stage's result as flat tensors, each `[L]`.

        Args:
            result: of the stage.
            rows: of the micro-batch.
            anchors: received tensors for which torch wants a gradient, though the result may not depend on them.

        Raises:
            TrainingError: another shape than for a micro-batch of as many rows before.
        """
        expected = self._shapes.leaving[self._index][rows]
        record, tensors = take_apart(result, gradient=False)
        if record.tree != expected.tree or [t.shape for t in record.tensors] != [t.shape for t in expected.tensors]:
            raise TrainingError(
                f"stage {self._index + 1} returned tensors of {[t.shape for t in record.tensors]} for a micro-batch of {rows} "
                f"rows, and {[t.shape for t in expected.tensors]} for another one of the same shape; what passes between "
                "stages may depend on the shapes of the inputs only"
            )
        flats = pack(tensors, expected, self.slots_out, self._device, self._shapes.wire)
        if anchors and self.needs_anchor(flats):
            wanted = next(
                (k for k, slot in enumerate(self.slots_out) if slot.gradient), 0 if self._frozen_before else None
            )
            if wanted is not None:
                flats[wanted] = _applied(_Anchor, flats[wanted], *anchors)
        return flats


def _check_number(told: int, counted: int) -> None:
    if told != counted:
        raise TrainingError(f"the schedule ran micro-batch {told} where {counted} was due; gradients were dropped")


class Program:
    """Runs batches of one shape forward and backward.

    Args:
        schedule: "gpipe", "1f1b" or "interleaved".
        stages: this rank's stages by their number.
        total: stages of the pipeline.
        shapes: what passes between them.
        group: the pipeline's ranks.
        device: where the stages are.
    """

    def __init__(
        self,
        schedule: str,
        stages: dict[int, nn.Module],
        total: int,
        shapes: Shapes,
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self._stations = {index: _Station(stage, index, total, shapes, device) for index, stage in stages.items()}
        self._count = len(shapes.sizes)
        self._last = self._stations.get(total - 1)
        self._loss: Callable[[int, Any], Tensor] | None = None
        torchs = [_torch_stage(station, index, total, group, device) for index, station in self._stations.items()]
        self._schedule = _torch_schedule(schedule, torchs, self._count, total, self._loss_of)

    def _loss_of(self, output: Tensor, number: Tensor) -> Tensor:
        """Return the scalar from which backward starts; `output` is what torch carries, `number` the micro-batch's, `[]`."""
        assert self._last is not None and self._loss is not None
        outputs, anchors = self._last.outputs.pop(int(number))
        loss = self._loss(int(number), outputs)
        if anchors and self._last.needs_anchor([loss]):
            loss = _applied(_Anchor, loss, *anchors)
        return loss

    def run(self, inputs: Sequence[Any], loss: Callable[[int, Any], Tensor]) -> None:
        """Run one batch; gradients are added to what is there.

        Args:
            inputs: of each micro-batch, on the rank with the first stage.
            loss: takes number and outputs of a micro-batch and returns the scalar that backward starts from, on the last rank.
        """
        self._loss = loss
        numbers = torch.arange(self._count)
        for station in self._stations.values():
            station.begin(inputs)
        args = (numbers,) if 0 in self._stations else ()
        target = numbers if self._last is not None else None
        try:
            self._schedule.step(*args, target=target)
        except RuntimeError as error:
            failure = next((s.failure for s in self._stations.values() if s.failure is not None), None)
            # What a backward raises has no place of its own, but torch names it as the cause of its text.
            failure = failure or error.__cause__
            if failure is None or failure is error:
                raise
            raise failure from None
        finally:
            self._loss = None
            for station in self._stations.values():
                station.begin(())


def _example(slot: Slot) -> Tensor:
    """Return a tensor without memory of the slot's form, `[L]`, from which torch makes its receive buffers."""
    return torch.empty(slot.length, dtype=slot.torch_dtype, device="meta", requires_grad=slot.gradient)


def _torch_stage(
    station: _Station, index: int, total: int, group: dist.ProcessGroup, device: torch.device
) -> PipelineStage:
    arriving = tuple(map(_example, station.slots_in)) or (torch.empty(1, dtype=torch.int64, device="meta"),)
    leaving = tuple(map(_example, station.slots_out)) or (torch.empty(1, device="meta"),)
    stage = PipelineStage(station, index, total, device, input_args=arriving, output_args=leaving, group=group)
    if group.size() == 1:
        # Torch before 2.13 tries each link first, the one to its own rank as well, which gloo does not have.
        cast(Any, stage)._get_init_p2p_neighbors_ops = list
    return stage


def _torch_schedule(
    name: str, stages: list[PipelineStage], count: int, total: int, loss: Callable[[Tensor, Tensor], Tensor]
) -> Any:
    """Return torch's schedule of that name; `count` micro-batches, `total` stages, of which `stages` are here."""
    if name == "interleaved" and len(stages) > 1:
        return ScheduleInterleaved1F1B(cast(Any, stages), count, loss_fn=loss, scale_grads=False)
    # 1F1B with fewer micro-batches than stages never gets to its steady state, and torch refuses it; it would do what
    # GPipe does.
    kind = Schedule1F1B if name == "1f1b" and count >= total else ScheduleGPipe
    return kind(stages[0], count, loss_fn=loss, scale_grads=False)
