"""Buffers that training moves, such as batch statistics, made equal on all replicas after every step.

The same rule as in the star exchange: floating-point buffers are averaged over the replicas by rows; integer ones count one
step. What did not move on any replica stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

__all__ = ["BufferAverage", "kept_buffers"]


@contextmanager
def kept_buffers(model: nn.Module) -> Iterator[None]:
    """Undo what the body does to buffers: a stand-in's rows must leave no trace in batch statistics."""
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)


class BufferAverage:
    """Averages moved buffers over a group; one small message a step tells which moved, none without buffers."""

    def __init__(self, model: nn.Module, group: dist.ProcessGroup) -> None:
        """Observer at the buffers of a model whose replicas are the ranks of `group`."""
        self._model = model
        self._group = group
        self._before: list[Tensor] = []
        self.mark()

    def mark(self) -> None:
        """Buffers as they are now are equal everywhere: at the start, after loading, after a step."""
        # Copies, because torch's batch norm moves its statistics without a new version of the tensor.
        self._before = [buffer.detach().clone() for buffer in self._model.buffers()]

    @torch.no_grad()
    def finish(self, rows: int) -> None:
        """Make the buffers equal; this replica saw `rows` samples since the last step."""
        buffers = list(self._model.buffers())
        if not buffers:
            return
        moved = [(now != before).any() for now, before in zip(buffers, self._before, strict=True)]
        facts = torch.stack([*moved, moved[0].new_ones(())]).to(torch.float64)
        facts[-1] = rows
        dist.all_reduce(facts, group=self._group)
        *anywhere, all_rows = facts.tolist()
        chosen = [buffer for buffer, count in zip(buffers, anywhere, strict=True) if count]
        self._average([b for b in chosen if b.is_floating_point() or b.is_complex()], rows / max(1.0, all_rows))
        self._latest([b for b in chosen if not (b.is_floating_point() or b.is_complex())])
        self.mark()

    def _average(self, buffers: list[Tensor], share: float) -> None:
        for dtype in sorted({b.dtype for b in buffers}, key=str):
            members = [b for b in buffers if b.dtype == dtype]
            wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
            flat = torch.cat([b.reshape(-1).to(wide) for b in members])
            # A replica without rows may hold anything, even NaN; zero times NaN is no zero.
            flat = flat * share if share else torch.zeros_like(flat)
            dist.all_reduce(flat, group=self._group)
            _spread(flat, members)

    def _latest(self, buffers: list[Tensor]) -> None:
        # A replica that got no rows counted no step, so the furthest count is everybody's.
        if buffers:
            flat = torch.cat([b.reshape(-1).to(torch.int64) for b in buffers])
            dist.all_reduce(flat, op=dist.ReduceOp.MAX, group=self._group)
            _spread(flat, buffers)


def _spread(flat: Tensor, into: list[Tensor]) -> None:
    parts = flat.split([b.numel() for b in into])  # type: ignore[no-untyped-call]
    for buffer, part in zip(into, parts, strict=True):
        buffer.copy_(part.view(buffer.shape))
