"""A batch on its way into a model: on the right device, in the right precision, with its rows counted.

Knows nested batches; knows nothing of models or losses.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from guava_nb.data.split import num_rows, split_rows

__all__ = ["count_rows", "cut", "mapped", "place"]


def cut(batch: Any, pieces: int) -> list[Any]:
    """Cut a batch into at most `pieces` parts of about equal size, by the rule of `guava_nb.data.split`."""
    rows = num_rows(batch)
    edges = sorted({round(rows * k / pieces) for k in range(pieces + 1)})
    return list(split_rows(batch, list(zip(edges, edges[1:], strict=False))))


def place(batch: Any, device: torch.device, double: bool = False) -> Any:
    """Return the batch with its tensors on `device`; on the CPU nothing is copied.

    Args:
        batch: any nesting of dict, list, tuple, namedtuple and dataclass around tensors; anything else stays as it is.
        device: where the model is.
        double: also turn floating-point tensors into float64 (complex ones into complex128), as a float64 run needs.
    """
    if device.type == "cpu" and not double:
        return batch
    return mapped(batch, lambda value: value.to(device=device, dtype=_dtype(value, double), non_blocking=True))


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a nested value with each tensor in it changed; everything else stays as it is."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        items = {key: mapped(item, change) for key, item in value.items()}
        return items if type(value) is dict else _like_mapping(value, items)
    if isinstance(value, tuple):
        parts = [mapped(item, change) for item in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, list):
        return [mapped(item, change) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _mapped_dataclass(value, change)
    return value


def _dtype(value: Tensor, double: bool) -> torch.dtype:
    if double and value.is_complex():
        return torch.complex128
    return torch.float64 if double and value.is_floating_point() else value.dtype


def _like_mapping(value: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """Keep the class of an unusual mapping (OrderedDict, a tokenizer's batch) where it can be filled in place."""
    clone = copy.copy(value)
    try:
        clone.update(items)  # type: ignore[attr-defined]
    except (AttributeError, TypeError):
        return items
    return clone


def _mapped_dataclass(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    clone = copy.copy(value)
    for field in dataclasses.fields(value):
        # A frozen dataclass refuses setattr; the clone is ours alone, so this is still its construction.
        object.__setattr__(clone, field.name, mapped(getattr(value, field.name), change))
    return clone


def count_rows(batch: Any) -> int | None:
    """Return the samples in a batch: the first axis of the first tensor or array in it; None when there is none."""
    if isinstance(batch, Tensor | np.ndarray):
        return int(batch.shape[0]) if batch.ndim else None
    if isinstance(batch, Mapping):
        children = list(batch.values())
    elif isinstance(batch, list | tuple):
        children = list(batch)
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        children = [getattr(batch, field.name) for field in dataclasses.fields(batch)]
    else:
        return None
    return next((rows for rows in map(count_rows, children) if rows is not None), None)
