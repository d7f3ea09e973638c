"""Causes of a difference that are taken away for a while, to see whether it goes with them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

__all__ = ["WithoutFrequencies", "fixed_statistics"]


@contextlib.contextmanager
def fixed_statistics(norms: Sequence[_BatchNorm], some: Tensor) -> Iterator[bool]:
    """Let batch norms use running statistics, the first ones where they keep none; gives whether there are any.

    Args:
        norms: those that use a batch's.
        some: a tensor of any shape, of their device and dtype.
    """
    before = [(norm.training, norm.running_mean, norm.running_var) for norm in norms]
    for norm in norms:
        norm.training = False
        if norm.running_mean is None:
            norm.running_mean, norm.running_var = (some.new_full((norm.num_features,), one) for one in (0.0, 1.0))
    try:
        yield bool(norms)
    finally:
        for norm, kept in zip(norms, before, strict=True):
            norm.training, norm.running_mean, norm.running_var = kept


class WithoutFrequencies(TorchFunctionMode):
    """Embeddings divide no gradient by how often an index stands in the batch.

    Attributes:
        found: one would have.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        words = dict(kwargs or {})
        if words.get("scale_grad_by_freq"):
            self.found = True
            words["scale_grad_by_freq"] = False
        return func(*args, **words)
