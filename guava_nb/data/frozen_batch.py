"""A batch that does not change any more: loaders of the user's own may fill the same memory again and again."""

from __future__ import annotations

from typing import Any

import torch

from guava_nb.nested import ARRAYS, children, map_leaves, rebuild

__all__ = ["snapshot"]


def snapshot(batch: Any) -> Any:
    """Copy the containers, tensors and arrays of a batch; what travels in no batch stays as it is.

    A tensor that occurs twice is one tensor in the copy, too.
    """
    seen: dict[int, Any] = {}

    def copied(value: Any) -> Any:
        if id(value) not in seen:
            if isinstance(value, torch.Tensor):
                seen[id(value)] = value.detach().clone() if value.layout is torch.strided else value
            elif objects := children(value):  # an array of objects
                seen[id(value)] = rebuild(value, [map_leaves(child, copied, ARRAYS) for _, child in objects])
            else:
                seen[id(value)] = value.copy()
        return seen[id(value)]

    return map_leaves(batch, copied, ARRAYS)
