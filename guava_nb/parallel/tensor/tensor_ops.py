"""The four moves between whole and split activations, each with its gradient.

    enter    whole -> used by split layers    forward nothing           backward sum over the ranks
    total    partial sums -> whole            forward sum               backward nothing
    gather   split last dim -> whole          forward gather            backward own range
    scatter  whole -> split last dim          forward own range         backward gather

With them every activation is either whole and equal on all ranks, or split; and so is its gradient. DTensor has the same
moves, but takes lengths of a split dim to be equal when it meets a plain tensor; here each rank's range is known.

Shapes: `...` any leading dims, usually [B, S]; F the whole last dim, f this rank's range of it. f may differ by rank, and the
ranges of all ranks, in rank order, make up F. Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053) calls `enter` f, `total` g.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["GroupRanks", "Ranks", "enter", "gather", "scatter", "total"]


class Ranks(Protocol):
    """Ranks that share each layer.

    Attributes:
        rank: this one's index.
        size: how many.
    """

    rank: int
    size: int

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over all ranks, of the tensor's own shape, in memory of its own."""

    def collect(self, tensor: Tensor, lengths: Sequence[int]) -> list[Tensor]:
        """Return every rank's `[..., lengths[r]]`, in rank order; they differ in the last dim only."""


class GroupRanks:
    """The ranks of a process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        """Take a group that this rank belongs to."""
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over all ranks, of the tensor's own shape and dtype, in memory of its own.

        Halves are added in float32, so that the number of ranks costs no digits.
        """
        half = tensor.dtype in (torch.float16, torch.bfloat16)
        summed = tensor.to(torch.float32 if half else tensor.dtype, copy=True).contiguous()
        dist.all_reduce(summed, group=self.group)
        return summed.to(tensor.dtype)

    def collect(self, tensor: Tensor, lengths: Sequence[int]) -> list[Tensor]:
        """Return every rank's `[..., lengths[r]]`; each travels padded to the longest, as collectives want equal sizes."""
        longest = max(lengths)
        padded = torch.nn.functional.pad(tensor, (0, longest - tensor.shape[-1])).contiguous()
        parts = [torch.empty_like(padded) for _ in lengths]
        dist.all_gather(parts, padded, group=self.group)
        return [part.narrow(-1, 0, length) for part, length in zip(parts, lengths, strict=True)]


class _Enter(torch.autograd.Function):
    """See `enter`; the gradient that comes back, `[..., F]`, is summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks.sum(gradient), None


class _Total(torch.autograd.Function):
    """See `total`; the gradient, `[..., F]`, is the same on all ranks and passes as it is."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ranks: Ranks) -> Tensor:
        return ranks.sum(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Gather(torch.autograd.Function):
    """See `gather`; of the gradient `[..., F]` this rank keeps its own range, `[..., f]`."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ranks: Ranks, lengths: Sequence[int]) -> Tensor:
        ctx.start, ctx.length = sum(lengths[: ranks.rank]), lengths[ranks.rank]
        return torch.cat(ranks.collect(tensor, lengths), dim=-1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient.narrow(-1, ctx.start, ctx.length), None, None


class _Scatter(torch.autograd.Function):
    """See `scatter`; the gradients `[..., f]` of all ranks are put together, `[..., F]`."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ranks: Ranks, lengths: Sequence[int]) -> Tensor:
        ctx.ranks, ctx.lengths = ranks, lengths
        return tensor.narrow(-1, sum(lengths[: ranks.rank]), lengths[ranks.rank]).clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return torch.cat(ctx.ranks.collect(gradient, ctx.lengths), dim=-1), None, None


def enter(tensor: Tensor, ranks: Ranks) -> Tensor:
    """Hand a whole activation `[..., F]` to split layers; returns a view of it."""
    return _Enter.apply(tensor, ranks)  # type: ignore[no-any-return, no-untyped-call]


def total(tensor: Tensor, ranks: Ranks) -> Tensor:
    """Add up the ranks' partial sums, each `[..., F]`, to the whole, `[..., F]`."""
    return _Total.apply(tensor, ranks)  # type: ignore[no-any-return, no-untyped-call]


def gather(tensor: Tensor, ranks: Ranks, lengths: Sequence[int]) -> Tensor:
    """Put the ranks' ranges together: `[..., f]` to `[..., F]`, where F is the sum of `lengths` (one a rank)."""
    return _Gather.apply(tensor, ranks, tuple(lengths))  # type: ignore[no-any-return, no-untyped-call]


def scatter(tensor: Tensor, ranks: Ranks, lengths: Sequence[int]) -> Tensor:
    """Take this rank's range: `[..., F]` to a copy `[..., f]`; `lengths` as in `gather`."""
    return _Scatter.apply(tensor, ranks, tuple(lengths))  # type: ignore[no-any-return, no-untyped-call]
