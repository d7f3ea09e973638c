"""How many bytes a batch will take, told from its tensors, arrays and texts without packing it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

__all__ = ["size_of"]


def size_of(value: Any) -> int:
    """Return about how many bytes a nested value has; numbers and structure count nothing.

    An estimate on the safe side: what is sent once although it is seen twice counts twice.
    """
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, np.ndarray):
        return int(value.nbytes)
    if isinstance(value, bytes | bytearray | str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(size_of(item) for item in value.values())
    if isinstance(value, list | tuple):
        return sum(size_of(item) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return sum(size_of(getattr(value, field.name)) for field in dataclasses.fields(value))
    return 0
