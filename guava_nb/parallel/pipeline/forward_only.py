"""Forward only, micro-batch after micro-batch: how a pipeline evaluates, and how its stages learn what will pass.

Every value travels with its record, so nothing needs to be known before. Point-to-point messages only, in one order:
for each micro-batch all stages in turn, which cannot block on a backend that does one transfer of a pair at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from guava_nb.errors import CollectiveError
from guava_nb.parallel.pipeline.stage_messages import Boundary, decode, encode, put_together, take_apart

__all__ = ["ForwardOnly", "is_trainable"]

#: Bytes of the first message; a longer record goes on in a second one.
_HEAD_BYTES = 512
_MOST_RECORD_BYTES = 1 << 24


def is_trainable(module: nn.Module) -> bool:
    """Whether a module has a parameter that is trained."""
    return any(parameter.requires_grad for parameter in module.parameters())


class ForwardOnly:
    """Brings values through the stages of one pipeline.

    Args:
        stages: this rank's stages by their number.
        total: stages of the pipeline; stage k lies on rank k % ranks of the group.
        group: the pipeline's ranks.
        device: where the stages are.
    """

    def __init__(
        self, stages: dict[int, nn.Module], total: int, group: dist.ProcessGroup, device: torch.device
    ) -> None:
        self._stages = stages
        self._total = total
        self._group = group
        self._device = device
        self._rank = dist.get_rank(group)
        self._ranks = dist.get_world_size(group)
        self._sent: list[tuple[dist.Work | None, Tensor]] = []

    def run(
        self,
        inputs: Sequence[Any],
        count: int,
        last: Callable[[int, Any], None],
        seen: Callable[[int, int, Boundary | None, Boundary | None], None] | None = None,
    ) -> None:
        """Run forward on all micro-batches.

        Args:
            inputs: of each micro-batch, on the rank with the first stage; others pass nothing.
            count: micro-batches.
            last: takes number and outputs of each micro-batch, on the rank with the last stage.
            seen: takes stage, micro-batch and the records of what came in and what went out (None: batch, outputs).
        """
        try:
            for number in range(count):
                self._run_one(number, inputs, last, seen)
            for work, _ in self._sent:
                if work is not None:
                    work.wait()
        finally:
            self._sent.clear()

    def _run_one(
        self, number: int, inputs: Sequence[Any], last: Callable[..., None], seen: Callable[..., None] | None
    ) -> None:
        handed: tuple[Boundary, list[Tensor]] | None = None
        for index, stage in sorted(self._stages.items()):
            arrived: Boundary | None = None
            if index == 0:
                values: Any = (inputs[number],)
            else:
                arrived, tensors = handed if handed is not None else self._receive(index - 1)
                values = put_together(arrived, tensors, self._device)
            result = stage(*values)
            left, handed = None, None
            if index == self._total - 1:
                last(number, result)
            else:
                trained = is_trainable(stage) or (
                    arrived is not None and any(spec.gradient for spec in arrived.tensors)
                )
                left, tensors = take_apart(result, gradient=trained)
                if (index + 1) % self._ranks == self._rank:
                    handed = (left, tensors)
                else:
                    self._send(left, tensors, index + 1)
            if seen is not None:
                seen(index, number, arrived, left)

    # ------------------------------------------------------------------------------------------------------- messages

    def _peer(self, stage: int) -> int:
        return dist.get_global_rank(self._group, stage % self._ranks)

    def _send(self, boundary: Boundary, tensors: Sequence[Tensor], stage: int) -> None:
        """Send a record and its tensors, of the shapes that it names, to the rank with that stage; `run` waits at its end."""
        record = encode(boundary)
        data = len(record).to_bytes(8, "little") + record
        self._post(_bytes_tensor(data[:_HEAD_BYTES].ljust(_HEAD_BYTES, b"\0")), stage)
        if len(data) > _HEAD_BYTES:
            self._post(_bytes_tensor(data[_HEAD_BYTES:]), stage)
        for tensor in tensors:
            if tensor.numel():
                self._post(_wire_form(tensor), stage)

    def _post(self, tensor: Tensor, stage: int) -> None:
        """Begin to send one tensor of any shape, and keep it until it has gone."""
        tensor = tensor.to(self._device)
        self._sent.append((dist.isend(tensor, self._peer(stage), group=self._group), tensor))

    def _receive(self, stage: int) -> tuple[Boundary, list[Tensor]]:
        """Take the record that the stage sent, and its tensors, each of the shape that the record names.

        Raises:
            CollectiveError: the record is longer than any may be, or is none.
        """
        head = self._take((_HEAD_BYTES,), torch.uint8, stage)
        data = bytes(head.cpu().tolist())
        length = int.from_bytes(data[:8], "little")
        if length > _MOST_RECORD_BYTES:
            raise CollectiveError(
                f"stage {stage + 1} announced a record of {length} bytes, at most {_MOST_RECORD_BYTES} are read"
            )
        if length + 8 > _HEAD_BYTES:
            data += bytes(self._take((length + 8 - _HEAD_BYTES,), torch.uint8, stage).cpu().tolist())
        boundary = decode(data[8 : 8 + length])
        tensors = [self._take(spec.shape, spec.torch_dtype, stage) for spec in boundary.tensors]
        if (
            torch.is_grad_enabled()
        ):  # see `showing_dependence`; a copy, because a stage may begin with an in-place operation
            tensors = [
                tensor.requires_grad_().clone() if spec.from_parameters else tensor
                for tensor, spec in zip(tensors, boundary.tensors, strict=True)
            ]
        return boundary, tensors

    def _take(self, shape: Sequence[int], dtype: torch.dtype, stage: int) -> Tensor:
        """Receive one tensor of this shape; an empty one does not travel."""
        tensor = torch.empty(tuple(shape), dtype=dtype, device=self._device)
        if tensor.numel():
            dist.recv(_wire_form(tensor), self._peer(stage), group=self._group)
        return tensor


def _bytes_tensor(data: bytes) -> Tensor:
    """Return a copy of bytes as a tensor, `[bytes]` uint8."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _wire_form(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor of a dtype that every backend sends, complex `[...]` as `[..., 2]`.

    Where it can be, it shares the memory.
    """
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
