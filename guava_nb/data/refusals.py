"""Why a value cannot travel, and what its owner can do: sentences only."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

__all__ = ["Refused", "hint"]


class Refused(Exception):  # noqa: N818  it never leaves this room: `pack` makes a ConfigError of it
    """A value that cannot travel, and the way to it from the root.

    Attributes:
        reason: a clause that says what to do.
        trail: subscripts from the root to the value.
    """

    def __init__(self, value: Any, reason: str) -> None:
        super().__init__(reason)
        cls = type(value)
        self.type_name = cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
        self.reason = reason
        self.trail = ""

    def inside(self, subscript: str) -> Refused:
        """The same refusal seen from the container that holds it."""
        self.trail = subscript + self.trail
        return self

    def sentence(self, name: str) -> str:
        """The whole message, with `name` for the root."""
        return f"{name}{self.trail} is a {self.type_name}, which cannot travel to a worker: {self.reason}"


def hint(value: Any) -> str:
    """What to do about a value of a kind that does not travel."""
    for kinds, advice in _ADVICE:
        if isinstance(value, kinds):
            return advice
    if type(value).__module__.partition(".")[0] == "PIL":
        return "turn images into tensors in the dataset's transform"
    if type(value).__module__.partition(".")[0] == "torch_geometric":
        return (
            "the graphs of a batch are joined, and what joins them names places in the whole batch: let the data set and "
            "collate_fn give a list of dicts, one per graph, and join them on the worker, in step"
        )
    if callable(value):
        return "code does not travel inside a batch; define it in a %%guava_share cell"
    return "turn it into tensors, numbers, strings, lists or dicts in collate_fn, or make its class a dataclass"


_ADVICE: tuple[tuple[Any, str], ...] = (
    (enum.Enum, "send its .value in collate_fn"),
    (torch.Tensor, "send value.as_subclass(torch.Tensor), or value.full_tensor() of a distributed one"),
    (np.ndarray, "send numpy.asarray(value); a masked or structured array as a dict of plain ones"),
    (torch.Generator, "random state does not travel inside a batch; send a seed"),
    (Mapping, "send dict(value) from collate_fn"),
    (tuple, "send tuple(value) from collate_fn"),
    ((list, set, frozenset, str, bytes, int, float), "send the plain value instead of the subclass"),
)
