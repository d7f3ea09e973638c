"""Layers of which each rank holds a part. They take the place of torch's and keep the names of their parameters.

A layer says in `layouts` which part of the full tensor each of its parameters is. Parameters are plain tensors, so any
optimizer, `foreach` and `fused` ones too, and FSDP2 work on them as they are.

Shapes: `...` any leading dims, usually [B, S]; I inputs and O outputs of the whole layer, i and o this rank's of them; V the
vocabulary, v this rank's rows of it; H the embedding's width. Weights are stored as torch's are: a Linear's is [O, I].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from guava_nb.parallel.state.shard_layout import Layout, even_bounds
from guava_nb.parallel.tensor.tensor_ops import Ranks, enter, gather, scatter, total
from guava_nb.parallel.tensor.tensor_random import SplitRandomness
from guava_nb.parallel.tensor.vocab_loss import SplitLogits

__all__ = ["ColumnLinear", "RowLinear", "VocabEmbedding", "part_of", "ranges_of"]

#: [start, end) ranges of one dim for every rank.
Ranges = Sequence[Sequence[tuple[int, int]]]


def ranges_of(length: int, ranks: int, unit: int = 1, repeats: int = 1) -> list[list[tuple[int, int]]]:
    """Cut a dim for every rank.

    Args:
        length: of the dim.
        ranks: how many parts.
        unit: elements that must stay together, such as a head's.
        repeats: equal sections that are each cut alike, such as query, key and value in one weight.
    """
    section = length // repeats
    cuts = [even_bounds(section // unit, ranks, rank) for rank in range(ranks)]
    return [[(s * section + a * unit, s * section + b * unit) for s in range(repeats)] for a, b in cuts]


def part_of(parameter: Tensor, layout: Layout) -> nn.Parameter:
    """Return a copy of this rank's part of a whole parameter; `layout` says which box of the full shape that is."""
    return nn.Parameter(layout.cut(parameter.detach()), requires_grad=parameter.requires_grad)


def _order(ranges: Ranges) -> Tensor | None:
    """Return where each element of the ranks' parts, one after the other, lies in the whole, `[O]` or `[I]`.

    None: each lies in its own place.
    """
    order = torch.cat([torch.arange(start, end) for own in ranges for start, end in own])
    return None if torch.equal(order, torch.arange(len(order))) else order


def _lengths(ranges: Ranges) -> list[int]:
    return [sum(end - start for start, end in own) for own in ranges]


class ColumnLinear(nn.Module):
    """A Linear of which each rank has some outputs: weight `[o, I]`, bias `[o]`.

    With `gathers` its output is whole again on every rank. With `gathers_late` it becomes whole when
    code looks at it, which a loss over a vocabulary need not do.

    Args:
        linear: the whole layer; its tensors are not kept.
        ranks: who shares it.
        ranges: of the outputs, for every rank.
        gathers: the output is whole on every rank.
    """

    def __init__(self, linear: nn.Linear, ranks: Ranks, ranges: Ranges, gathers: bool) -> None:
        super().__init__()
        self.ranks = ranks
        self.gathers = gathers
        self.gathers_late = False
        self.randomness: SplitRandomness | None = None
        self.lengths, self.order = _lengths(ranges), _order(ranges)
        self.in_features = linear.in_features
        own = ranges[ranks.rank]
        self.layouts = {"weight": Layout.ranges(tuple(linear.weight.shape), 0, own)}
        self.weight = part_of(linear.weight, self.layouts["weight"])
        self.bias: nn.Parameter | None = None
        if linear.bias is not None:
            self.layouts["bias"] = Layout.ranges(tuple(linear.bias.shape), 0, own)
            self.bias = part_of(linear.bias, self.layouts["bias"])

    def forward(self, input: Tensor) -> Tensor:
        """Return `[..., o]` of `[..., I]`; with `gathers` `[..., O]`."""
        output = functional.linear(enter(input, self.ranks), self.weight, self.bias)
        if self.randomness is not None and self.training:
            self.randomness.enter(id(self), input.device)
        if self.gathers_late:
            return SplitLogits(output, self.lengths, self.ranks)
        if not self.gathers:
            return output
        whole = gather(output, self.ranks, self.lengths)
        return whole if self.order is None else whole.index_select(-1, self.order.argsort().to(whole.device))

    @property
    def out_features(self) -> int:
        """Width of what comes out, which a user's forward may reckon with."""
        return sum(self.lengths) if self.gathers or self.gathers_late else self.lengths[self.ranks.rank]


class RowLinear(nn.Module):
    """A Linear of which each rank has some inputs: weight `[O, i]`; its output is whole.

    With `scatters` its input is whole, too.

    Args:
        linear: the whole layer; its bias is kept.
        ranks: who shares it.
        ranges: of the inputs, for every rank.
        scatters: the input is whole.
    """

    def __init__(self, linear: nn.Linear, ranks: Ranks, ranges: Ranges, scatters: bool) -> None:
        super().__init__()
        self.ranks = ranks
        self.scatters = scatters
        self.randomness: SplitRandomness | None = None
        self.lengths, self.order = _lengths(ranges), _order(ranges)
        self.out_features = linear.out_features
        self.layouts = {"weight": Layout.ranges(tuple(linear.weight.shape), 1, ranges[ranks.rank])}
        self.weight = part_of(linear.weight, self.layouts["weight"])
        self.bias = linear.bias

    def forward(self, input: Tensor) -> Tensor:
        """Return `[..., O]`, the sum over all inputs, of `[..., i]`, or of `[..., I]` with `scatters`.

        The bias is added once, after the sum.
        """
        if self.randomness is not None and self.training:
            self.randomness.leave(input.device)
        if self.scatters:
            if self.order is not None:
                input = input.index_select(-1, self.order.to(input.device))
            input = scatter(input, self.ranks, self.lengths)
        output = total(functional.linear(input, self.weight), self.ranks)
        return output if self.bias is None else output + self.bias

    @property
    def in_features(self) -> int:
        """Width of what goes in."""
        return sum(self.lengths) if self.scatters else self.lengths[self.ranks.rank]


class VocabEmbedding(nn.Module):
    """An Embedding of which each rank has some rows, `[v, H]`: rows of others count as zero, and the ranks add up.

    Args:
        embedding: the whole one.
        ranks: who shares it.
        ranges: of the rows, one for every rank.
    """

    def __init__(self, embedding: nn.Embedding, ranks: Ranks, ranges: Ranges) -> None:
        super().__init__()
        self.ranks = ranks
        self.num_embeddings, self.embedding_dim = embedding.num_embeddings, embedding.embedding_dim
        self.padding_idx = embedding.padding_idx
        ((self.start, self.end),) = ranges[ranks.rank]
        self.layouts = {"weight": Layout.ranges(tuple(embedding.weight.shape), 0, ranges[ranks.rank])}
        self.weight = part_of(embedding.weight, self.layouts["weight"])

    def forward(self, input: Tensor) -> Tensor:
        """Return the rows of the indices: `[...]` whole numbers to `[..., H]`.

        Raises:
            IndexError: an index is outside the whole vocabulary (looked at on the CPU only).
        """
        # A rank that ignored an index no rank has would make it a row of zeros; on CUDA looking would stop the stream.
        if input.device.type == "cpu" and input.numel():
            low, high = int(input.min()), int(input.max())
            if low < 0 or high >= self.num_embeddings:
                raise IndexError(f"index out of range: {low} to {high} of an embedding of {self.num_embeddings} rows")
        elsewhere = (input < self.start) | (input >= self.end)
        local = (input - self.start).masked_fill(elsewhere, 0)
        rows = functional.embedding(local, self.weight, self._own_padding())
        return total(rows.masked_fill(elsewhere.unsqueeze(-1), 0), self.ranks)

    def _own_padding(self) -> int | None:
        if self.padding_idx is None or not self.start <= self.padding_idx < self.end:
            return None
        return self.padding_idx - self.start
