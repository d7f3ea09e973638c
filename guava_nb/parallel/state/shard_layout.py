"""Which part of a full tensor lies on this rank.

Pure arithmetic on shapes. A local tensor is cut into boxes, each of which is a box of the full tensor as well: a fused
query-key-value weight of which every rank has some heads is three boxes, which no single placement can say.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

__all__ = ["Box", "Layout", "chunk_bounds", "even_bounds"]


def even_bounds(length: int, parts: int, index: int) -> tuple[int, int]:
    """Return [start, end) of a part; lengths differ by one at most, the longer ones come first.

    Args:
        length: of the dim.
        parts: into how many it is cut.
        index: of the part.
    """
    base, longer = divmod(length, parts)
    start = index * base + min(index, longer)
    return start, start + base + (index < longer)


def chunk_bounds(length: int, parts: int, index: int) -> tuple[int, int]:
    """Return [start, end) of a part as torch.chunk cuts, which is how FSDP2 shards: the last parts may be empty.

    Args:
        length, parts, index: as for `even_bounds`.
    """
    size = -(-length // parts)
    return min(index * size, length), min((index + 1) * size, length)


@dataclass(frozen=True, slots=True)
class Box:
    """A box of elements: its sizes, where it begins in the local and where in the full tensor."""

    shape: tuple[int, ...]
    local: tuple[int, ...]
    full: tuple[int, ...]

    def of_local(self, tensor: Tensor) -> Tensor:
        """Return the view of this box, `[*shape]`, in a tensor of the local shape."""
        return _view(tensor, self.local, self.shape)

    def of_full(self, tensor: Tensor) -> Tensor:
        """Return the view of this box, `[*shape]`, in a tensor of the full shape."""
        return _view(tensor, self.full, self.shape)


def _view(tensor: Tensor, offsets: Sequence[int], shape: Sequence[int]) -> Tensor:
    """Return the view `[*shape]` of a tensor that begins at these offsets, one a dim."""
    for dim, (start, length) in enumerate(zip(offsets, shape, strict=True)):
        tensor = tensor.narrow(dim, start, length)
    return tensor


@dataclass(frozen=True, slots=True)
class Layout:
    """One tensor's part on this rank.

    Attributes:
        full: shape of the full tensor.
        local: shape of the part here.
        boxes: what is here.
        tensor_copies: all ranks that share the layer hold the same.
        data_copies: all replicas hold the same.
    """

    full: tuple[int, ...]
    local: tuple[int, ...]
    boxes: tuple[Box, ...]
    tensor_copies: bool = True
    data_copies: bool = True

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Layout:
        """Everything is here."""
        sizes, zeros = tuple(shape), (0,) * len(shape)
        return cls(sizes, sizes, (Box(sizes, zeros, zeros),))

    @classmethod
    def ranges(cls, shape: Sequence[int], dim: int, ranges: Sequence[tuple[int, int]]) -> Layout:
        """The ranges [start, end) of one dimension are here, one after the other; other ranks have the rest.

        Args:
            shape: of the full tensor.
            dim: that is cut.
            ranges: what is here, in the order in which it lies here.
        """
        boxes, at = [], 0
        for start, end in ranges:
            sizes, local, full = list(shape), [0] * len(shape), [0] * len(shape)
            sizes[dim], local[dim], full[dim] = end - start, at, start
            boxes.append(Box(tuple(sizes), tuple(local), tuple(full)))
            at += end - start
        here = list(shape)
        here[dim] = at
        return cls(tuple(shape), tuple(here), tuple(boxes), tensor_copies=False)

    def rows(self, start: int, end: int) -> Layout:
        """Only the rows [start, end) of the local tensor are here; other replicas have the rest."""
        boxes = [self._clip(box, start, end) for box in self.boxes]
        kept = tuple(box for box in boxes if box.shape[0] > 0)
        return replace(self, local=(end - start, *self.local[1:]), boxes=kept, data_copies=False)

    @staticmethod
    def _clip(box: Box, start: int, end: int) -> Box:
        first = max(box.local[0], start)
        length = max(0, min(box.local[0] + box.shape[0], end) - first)
        return Box(
            (length, *box.shape[1:]),
            (first - start, *box.local[1:]),
            (box.full[0] + first - box.local[0], *box.full[1:]),
        )

    def counted(self, dp: int, tp: int) -> bool:
        """Whether this rank speaks for its part, so that every element is counted by exactly one rank."""
        return (tp == 0 or not self.tensor_copies) and (dp == 0 or not self.data_copies)

    def cut(self, full: Tensor) -> Tensor:
        """Return the part of a full tensor, `[*self.full]`, that belongs here, `[*self.local]`, in memory of its own."""
        local = full.new_empty(self.local)
        for box in self.boxes:
            box.of_local(local).copy_(box.of_full(full))
        return local

    @property
    def numel(self) -> int:
        """Elements of the full tensor."""
        return math.prod(self.full)
