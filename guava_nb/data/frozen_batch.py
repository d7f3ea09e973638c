"""A batch that nobody changes any more: loaders of the user's own may fill the same memory again and again."""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict
from typing import Any

import numpy as np
import torch

from guava_nb.data.classes import is_dataclass_type, is_namedtuple_type

__all__ = ["snapshot"]


def snapshot(value: Any, seen: dict[int, Any] | None = None) -> Any:
    """Copy the tensors and arrays of a batch; what travels in no batch stays as it is.

    A tensor that occurs twice is one tensor in the copy, too.
    """
    seen = {} if seen is None else seen
    if id(value) in seen:
        return seen[id(value)]
    cls = type(value)
    made: Any = value
    if isinstance(value, torch.Tensor):
        made = value.detach().clone() if value.layout is torch.strided else value
    elif isinstance(value, np.ndarray):
        made = value.copy()
    elif cls in (dict, OrderedDict):
        made = cls((key, snapshot(item, seen)) for key, item in value.items())
    elif cls in (list, tuple):
        made = cls(snapshot(item, seen) for item in value)
    elif is_namedtuple_type(cls):
        made = cls._make(snapshot(item, seen) for item in value)
    elif is_dataclass_type(cls):
        made = copy.copy(value)
        for field in dataclasses.fields(value):
            if hasattr(value, field.name):
                object.__setattr__(made, field.name, snapshot(getattr(value, field.name), seen))
    seen[id(value)] = made
    return made
