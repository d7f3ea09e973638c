"""A batch on its way into a model: on the right device, in the right precision.

Knows nested batches; knows nothing of models or losses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from guava_nb.nested import axes_of, cut_parts, map_leaves, sliced

__all__ = ["cut", "cut_at", "place"]


def cut(batch: Any, marks: bytes, rows: int, pieces: int) -> list[tuple[Any, int]]:
    """Cut a batch into at most `pieces` parts of about equal size; returns them with their samples.

    Args:
        batch: of `rows` samples.
        marks: which parts have an entry per sample, as `guava_nb.nested.marks_of` wrote them down.
    """
    edges = sorted({round(rows * k / pieces) for k in range(pieces + 1)})
    ranges = list(zip(edges, edges[1:], strict=False))
    return [(part, stop - start) for part, (start, stop) in zip(cut_at(batch, marks, ranges), ranges, strict=True)]


def cut_at(batch: Any, marks: bytes, ranges: Sequence[tuple[int, int]]) -> list[Any]:
    """Return the samples of each range (start, stop) of a batch; `marks` as for `cut`."""

    def entries(part: Any, axis: int) -> list[Any]:
        return [sliced(part, axis, *one) for one in ranges]

    return cut_parts(batch, axes_of(marks), entries, len(ranges))


def place(batch: Any, device: torch.device, double: bool = False) -> Any:
    """Return the batch with its tensors on `device`; on the CPU nothing is copied.

    Args:
        batch: any nesting of the containers of `guava_nb.nested` around tensors; anything else stays as it is.
        device: where the model is.
        double: also turn floating-point tensors into float64 (complex ones into complex128), as a float64 run needs.
    """
    if device.type == "cpu" and not double:
        return batch

    def moved(value: Any) -> Any:
        return value.to(device, _dtype(value.data, double), non_blocking=True)

    # A packed sequence is moved as a whole, because the lengths in it stay on the CPU.
    return map_leaves(batch, moved, (Tensor, PackedSequence))


def _dtype(value: Tensor, double: bool) -> torch.dtype:
    if double and value.is_complex():
        return torch.complex128
    return torch.float64 if double and value.is_floating_point() else value.dtype
