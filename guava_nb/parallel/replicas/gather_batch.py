"""What the replicas computed of their samples, put together to the whole batch: for losses that couple samples.

A user's loss or model calls `gather_batch`. Who runs it says before, with `gathering`, what that means at the moment: nothing
to gather, a gather over the replicas, or a refusal. All gradients of a step are summed over the replicas, each weighted by
its samples; so it is right both when every replica computes the loss of the whole batch, and when each computes that of its
own samples against the whole batch.

Shapes: b samples of this replica, B of the batch, the sum over the replicas; `...` all other dims, alike everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from guava_nb.errors import ConfigError, TrainingError

__all__ = ["Gather", "end_gathers", "gather_batch", "gather_over", "gathering", "refusing"]

_NO_MORE = -1

#: Gives the rows of all replicas for those of this one.
Gather = Callable[[Tensor], Tensor]

# Not one per thread: with activation checkpointing a forward is done again on a thread of autograd's.
_current: Gather | None = None


def gather_batch(tensor: Tensor) -> Tensor:
    """Return the rows of all workers' samples, in the order of the batch; gradients flow back to the workers' rows.

    For losses that compare the samples of a batch (InfoNCE, NT-Xent, CLIP, Barlow Twins, Dice over a batch). The same line
    does nothing with one worker, and in plain PyTorch:

        z1, z2 = gather_batch(model(x1)), gather_batch(model(x2))
        return info_nce(z1, z2)                                     # of the whole batch, on every worker

    Every worker must call it equally often and in the same order, so not under a condition that depends on the samples; a
    run in which they do not ends with a sentence.

    Args:
        tensor: [samples of this worker, ...]; of views that were put together by torch.cat, gather each by itself.

    Returns:
        [samples of the batch, ...].

    Raises:
        ConfigError: the tensor has no axis of samples, or this run cannot gather; the sentence says what can.
    """
    if tensor.ndim == 0:
        raise ConfigError(
            "gather_batch was given a single number: it takes a tensor with the samples on the first axis"
        )
    return tensor if _current is None else _current(tensor)


@contextmanager
def gathering(way: Gather | None) -> Iterator[None]:
    """Let `gather_batch` do this inside; None lets it return what it is given."""
    global _current
    before, _current = _current, way
    try:
        yield
    finally:
        _current = before


def refusing(why: str) -> Gather:
    """Return what refuses to gather, with a sentence."""

    def refuse(tensor: Tensor) -> Tensor:
        raise ConfigError(f"gather_batch: {why}")

    return refuse


def gather_over(group: dist.ProcessGroup, stand_in: bool) -> Gather:
    """Return what gathers over the replicas of a group, `[b, ...]` to `[B, ...]`; a stand-in takes part and adds no rows."""
    return lambda tensor: _Gathered.apply(tensor[:0] if stand_in else tensor, group)  # type: ignore[no-untyped-call]


def end_gathers(group: dist.ProcessGroup, device: torch.device) -> None:
    """A forward is over. Without this word, a replica that gathers once more would wait for this one without an end.

    Raises:
        TrainingError: another replica gathers.
    """
    _rows_of_all(group, device, _NO_MORE)


def _rows_of_all(group: dist.ProcessGroup, device: torch.device, rows: int) -> list[int]:
    """Return how many rows each replica has; `rows` of this one.

    Raises:
        TrainingError: some replicas gather, and others have said that their forward is over.
    """
    counts = torch.empty(dist.get_world_size(group), dtype=torch.int64, device=device)
    dist.all_gather_into_tensor(counts, counts.new_tensor([rows]), group=group)
    found: list[int] = counts.tolist()
    if 0 < found.count(_NO_MORE) < len(found):
        raise TrainingError(
            f"{len(found) - found.count(_NO_MORE)} of {len(found)} workers called gather_batch once more than the others in a "
            "forward: each must call it equally often, so not under a condition that depends on the samples or on chance. The "
            "step counts nowhere. Call it in each forward, and put the condition after it, on what it returned"
        )
    return found


class _Gathered(torch.autograd.Function):
    """Rows of all ranks; backward sums what all ranks found out about them, and keeps this rank's."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Return the rows of all replicas, `[B, ...]`, of this one's, `[b, ...]`, in rank order."""
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        rows = _rows_of_all(group, tensor.device, len(tensor))
        ctx.group, ctx.first, ctx.rows = group, sum(rows[:rank]), rows[rank]
        # Collectives want equal shapes: replicas with fewer rows fill up.
        sent = tensor.new_zeros(max(rows), *tensor.shape[1:])
        sent[: len(tensor)] = tensor
        sent = sent.view(torch.uint8) if tensor.dtype == torch.bool else sent
        came = sent.new_empty(ranks, *sent.shape)
        dist.all_gather_into_tensor(came.flatten(0, 1), sent, group=group)
        came = came.view(torch.bool) if tensor.dtype == torch.bool else came
        return torch.cat([part[:count] for part, count in zip(came, rows, strict=True)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of this replica's rows, `[b, ...]`: the sum of what all ranks found, each `[B, ...]`."""
        wide = torch.float32 if gradient.dtype in (torch.float16, torch.bfloat16) else gradient.dtype
        total = gradient.to(wide, copy=True).contiguous()
        dist.all_reduce(total, group=ctx.group)
        return total[ctx.first : ctx.first + ctx.rows].to(gradient.dtype), None
