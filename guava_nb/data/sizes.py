"""How many bytes a batch will take, told from its tensors, arrays and texts without packing it."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from guava_nb.nested import ARRAYS, leaves

__all__ = ["size_of"]


def size_of(value: Any) -> int:
    """Return about how many bytes a nested value has; numbers and structure count nothing.

    An estimate on the safe side: what is sent once although it is seen twice counts twice.
    """
    return sum(map(_leaf_bytes, leaves(value, (*ARRAYS, bytes, bytearray, str))))


def _leaf_bytes(leaf: Any) -> int:
    if isinstance(leaf, Tensor):
        return leaf.numel() * leaf.element_size()
    return int(leaf.nbytes) if isinstance(leaf, np.ndarray) else len(leaf)
