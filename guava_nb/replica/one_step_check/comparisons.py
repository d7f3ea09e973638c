"""Which whole numbers a loss tells apart in its targets. Knows torch's functions; knows no batch and no model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["Comparisons"]

_COMPARED = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})
_IGNORING = frozenset({"cross_entropy", "nll_loss", "cross_entropy_loss", "nll_loss_nd"})


class Comparisons(TorchFunctionMode):
    """Notes the whole numbers that tensors of whole numbers are compared with, and targets that are ignored.

    Args:
        found: takes them.
    """

    def __init__(self, found: set[int]) -> None:
        super().__init__()
        self._found = found

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        name, words = getattr(func, "__name__", "").strip("_"), kwargs or {}
        if name in _COMPARED and len(args) > 1 and isinstance(args[0], Tensor) and type(args[1]) is int:
            if not args[0].is_floating_point():
                self._found.add(args[1])
        elif name in _IGNORING:
            self._found.add(int(words.get("ignore_index", -100)))
        return func(*args, **words)
