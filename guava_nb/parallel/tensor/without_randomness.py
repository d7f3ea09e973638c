"""Running a module twice on the same numbers: what is random in it draws constants meanwhile, and nothing remains of it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from guava_nb.parallel.module_state import unchanged

__all__ = ["WithoutRandomness", "untouched"]

_DROPOUTS = {
    functional.dropout, functional.dropout1d, functional.dropout2d, functional.dropout3d,
    functional.alpha_dropout, functional.feature_alpha_dropout, torch.dropout, torch.dropout_, torch.alpha_dropout,
    torch.alpha_dropout_, torch.feature_dropout, torch.feature_dropout_, torch.feature_alpha_dropout,
    torch.feature_alpha_dropout_,
}  # fmt: skip
_WITH_DROPOUT = {functional.scaled_dot_product_attention, functional.multi_head_attention_forward}
_DRAWS = {
    torch.rand, torch.randn, torch.rand_like, torch.randn_like, torch.normal, torch.bernoulli, Tensor.bernoulli,
    Tensor.bernoulli_, Tensor.uniform_, Tensor.normal_, Tensor.exponential_, Tensor.log_normal_, Tensor.cauchy_,
}  # fmt: skip


class WithoutRandomness(TorchFunctionMode):
    """Nothing is dropped, and random floating-point numbers are all one constant.

    Masks on split activations differ from those on whole ones, rightly so, which would hide whether anything else
    does. What is random in another way, Python's own numbers for instance, stays random.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run a function of torch, or what stands for it here."""
        words = dict(kwargs or {})
        if func in _DROPOUTS:
            return args[0] if args else words["input"]
        if func in _WITH_DROPOUT:
            return _without_dropout(func, args, words)
        result = func(*args, **words)
        if func in _DRAWS and isinstance(result, Tensor) and result.is_floating_point():
            with torch.no_grad():
                result.fill_(0.5)
        return result


def _without_dropout(func: Callable[..., Any], args: Sequence[Any], words: dict[str, Any]) -> Any:
    if func is functional.multi_head_attention_forward:
        bound = inspect.signature(func).bind(*args, **words)
        bound.arguments["dropout_p"] = 0.0
        return func(*bound.args, **bound.kwargs)
    if len(args) > 4:
        return func(*args[:4], 0.0, *args[5:], **words)
    return func(*args, **{**words, "dropout_p": 0.0})


@contextmanager
def untouched(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Put back buffers, random state and plain attributes of a module, whatever runs inside."""
    attributes = [(part, dict(part.__dict__)) for part in module.modules()]
    with unchanged(module, device):
        try:
            yield
        finally:
            for part, values in attributes:
                part.__dict__.clear()
                part.__dict__.update(values)
