"""Causes of a difference that are taken away for a while, to see whether it goes with them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from guava_nb.nested import map_leaves
from guava_nb.replica.one_step_check.differences import CLEAN, Measured

__all__ = ["WithoutFrequencies", "fixed_statistics", "is_repeated"]


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


def is_repeated(one: Measured, parts: Sequence[Measured], measure: Callable[[], Measured], model: nn.Module) -> bool:
    """Whether a term that is no sum over samples, such as a penalty on weights, makes the difference: each piece has it.

    Args:
        one, parts: the whole batch, and each piece alone.
        measure: measures the whole batch once more.
        model: that is measured.
    """
    try:
        with _forwards_cut_off(model):
            term = measure()
    except Exception:  # all of the loss goes through a forward
        return False
    return any(_adds_up(one, parts, term, by_count) for by_count in (True, False))


@contextlib.contextmanager
def _forwards_cut_off(model: nn.Module) -> Iterator[None]:
    """Let no gradient go back through a module: what is left of a loss's gradient is that of terms beside them."""
    inner = {one for name, one in model.named_modules() if "parametrizations" in name.split(".")}
    with contextlib.ExitStack() as hooks:
        for module in set(model.modules()) - inner:
            hook = module.register_forward_hook(lambda module, args, outputs: map_leaves(outputs, Tensor.detach))
            hooks.callback(hook.remove)
        yield


def _adds_up(one: Measured, parts: Sequence[Measured], term: Measured, by_count: bool) -> bool:
    """Whether the pieces' gradients come to the whole one and the term's, once more for each piece but the first."""
    more, square, size = len(parts) - 1, 0.0, 0.0
    for name in {*one.gradients, *term.gradients, *(name for part in parts for name in part.gradients)}:
        whole, left, *pieces = (
            made.gradients[name] * (made.count if by_count else 1) if name in made.gradients else torch.zeros(())
            for made in (one, term, *parts)
        )
        square += float(torch.linalg.vector_norm(sum(pieces) - whole - more * left)) ** 2
        size += float(torch.linalg.vector_norm(whole)) ** 2
    return bool(term.gradients) and square <= CLEAN**2 * size
