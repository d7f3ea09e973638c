"""The four moves between whole and split activations, each with its gradient.

    enter    whole -> used by split layers    forward nothing           backward sum over the ranks
    total    partial sums -> whole            forward sum               backward nothing
    gather   split last dim -> whole          forward gather            backward own range
    scatter  whole -> split last dim          forward own range         backward gather

With them every activation is either whole and equal on all ranks, or split; and so is its gradient. DTensor has the same
moves, but takes lengths of a split dim to be equal when it meets a plain tensor; here each rank's range is known.
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
        """Return the sum over all ranks, in a tensor of its own."""

    def collect(self, tensor: Tensor, lengths: Sequence[int]) -> list[Tensor]:
        """Return every rank's tensor; they differ in the last dim only, whose lengths are `lengths`."""


class GroupRanks:
    """The ranks of a process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        """Take a group that this rank belongs to."""
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over all ranks; halves are added in float32, so that the number of ranks costs no digits."""
        half = tensor.dtype in (torch.float16, torch.bfloat16)
        summed = tensor.to(torch.float32 if half else tensor.dtype, copy=True).contiguous()
        dist.all_reduce(summed, group=self.group)
        return summed.to(tensor.dtype)

    def collect(self, tensor: Tensor, lengths: Sequence[int]) -> list[Tensor]:
        """Return every rank's tensor; shorter ones travel padded, as collectives want equal sizes."""
        longest = max(lengths)
        padded = torch.nn.functional.pad(tensor, (0, longest - tensor.shape[-1])).contiguous()
        parts = [torch.empty_like(padded) for _ in lengths]
        dist.all_gather(parts, padded, group=self.group)
        return [part.narrow(-1, 0, length) for part, length in zip(parts, lengths, strict=True)]


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks.sum(gradient), None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ranks: Ranks) -> Tensor:
        return ranks.sum(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ranks: Ranks, lengths: Sequence[int]) -> Tensor:
        ctx.start, ctx.length = sum(lengths[: ranks.rank]), lengths[ranks.rank]
        return torch.cat(ranks.collect(tensor, lengths), dim=-1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient.narrow(-1, ctx.start, ctx.length), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ranks: Ranks, lengths: Sequence[int]) -> Tensor:
        ctx.ranks, ctx.lengths = ranks, lengths
        return tensor.narrow(-1, sum(lengths[: ranks.rank]), lengths[ranks.rank]).clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return torch.cat(ctx.ranks.collect(gradient, ctx.lengths), dim=-1), None, None


def enter(tensor: Tensor, ranks: Ranks) -> Tensor:
    """Hand a whole activation to split layers."""
    return _Enter.apply(tensor, ranks)  # type: ignore[no-any-return, no-untyped-call]


def total(tensor: Tensor, ranks: Ranks) -> Tensor:
    """Add up the ranks' partial sums."""
    return _Total.apply(tensor, ranks)  # type: ignore[no-any-return, no-untyped-call]


def gather(tensor: Tensor, ranks: Ranks, lengths: Sequence[int]) -> Tensor:
    """Put the ranks' ranges of the last dim together."""
    return _Gather.apply(tensor, ranks, tuple(lengths))  # type: ignore[no-any-return, no-untyped-call]


def scatter(tensor: Tensor, ranks: Ranks, lengths: Sequence[int]) -> Tensor:
    """Take this rank's range of the last dim."""
    return _Scatter.apply(tensor, ranks, tuple(lengths))  # type: ignore[no-any-return, no-untyped-call]
