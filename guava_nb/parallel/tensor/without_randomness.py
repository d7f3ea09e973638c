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
    torch._standard_gamma, torch._sample_dirichlet,  # of torch.distributions: Beta, Gamma, Dirichlet
}  # fmt: skip
_WHOLE_DRAWS = {torch.randint, torch.randint_like}
_COUNTS = {Tensor.random_, Tensor.geometric_, torch.poisson, torch.binomial}
_PLACES = {torch.multinomial, Tensor.multinomial}
#: By name, functions that add products up: in which order, and so with which rounding, depends on the size of a batch.
_CONTRACTIONS = {
    "linear", "bilinear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "tensordot", "scaled_dot_product_attention",
    "multi_head_attention_forward", *(f"conv{kind}{n}d" for kind in ("", "_transpose") for n in (1, 2, 3)),
}  # fmt: skip


class WithoutRandomness(TorchFunctionMode):
    """Nothing is dropped, and random floating-point numbers are all one constant.

    Masks on split activations differ from those on whole ones, rightly so, which would hide whether anything else
    does. What is random in another way, Python's own numbers for instance, stays random.

    Attributes:
        drawn: what would have been random, by the names of torch's functions.
        has_halves: what is learned from was rounded to 16 bits, as under autocast, or a frozen layer added up in them.
    """

    def __init__(self) -> None:
        """Nothing was drawn yet."""
        super().__init__()
        self.drawn: set[str] = set()
        self.has_halves = False

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
            if any(value is not False and value for value in [*args[1:], *words.values()] if isinstance(value, float)):
                self.drawn.add("dropout")
            return args[0] if args else words["input"]
        if func in _WITH_DROPOUT:
            return self._without_dropout(func, args, words)
        if func is functional.gumbel_softmax:  # written in Python: what it draws inside is not seen
            self.drawn.add("gumbel_softmax")
            return _softmax(*args, **words)
        if func is functional.rrelu and _rrelu_trains(*args, **words):
            self.drawn.add("rrelu")
            return functional.rrelu(
                *args[:3], **{key: words[key] for key in ("lower", "upper", "input") if key in words}
            )
        result = func(*args, **words)
        if isinstance(result, Tensor) and result.dtype in (torch.bfloat16, torch.float16):
            # Data of 16 bits, labels say, round nothing: each sample of it is what it is, whole or cut.
            self.has_halves |= result.requires_grad or getattr(func, "__name__", "").strip("_") in _CONTRACTIONS
        if func in _DRAWS and isinstance(result, Tensor) and result.is_floating_point():
            self._fill(func, result, 0.5)
        elif func in _WHOLE_DRAWS:
            self._fill(func, result, _lowest(args[1:] if func is torch.randint_like else args, words))
        elif func in _COUNTS:
            self._fill(func, result, 1)
        elif func in _PLACES:
            self._fill(func, result, 0)
        elif func is torch.randperm:
            self.drawn.add("randperm")
            return torch.arange(len(result), dtype=result.dtype, device=result.device)
        return result

    def _fill(self, func: Callable[..., Any], result: Tensor, constant: float) -> None:
        """Note what was drawn, and put a constant into all of the result, of any shape, in place."""
        self.drawn.add(func.__name__.strip("_"))
        with torch.no_grad():
            result.fill_(constant)

    def _without_dropout(self, func: Callable[..., Any], args: Sequence[Any], words: dict[str, Any]) -> Any:
        if func is functional.multi_head_attention_forward:
            bound = inspect.signature(func).bind(*args, **words)
            rate, bound.arguments["dropout_p"] = bound.arguments["dropout_p"], 0.0
            args, words = bound.args, bound.kwargs
        elif len(args) > 4:
            rate, args = args[4], (*args[:4], 0.0, *args[5:])
        else:
            rate, words = words.get("dropout_p", 0.0), {**words, "dropout_p": 0.0}
        self.drawn.update(["dropout"] if rate else [])
        return func(*args, **words)


def _rrelu_trains(
    input: Tensor, lower: float = 0.0, upper: float = 0.0, training: bool = False, inplace: bool = False
) -> bool:
    """Whether `rrelu` with these arguments, torch's, draws random slopes."""
    return training


def _softmax(logits: Tensor, tau: float = 1.0, hard: bool = False, eps: float = 1e-10, dim: int = -1) -> Tensor:
    """What `gumbel_softmax` is without noise, of the shape of the logits."""
    soft = (logits / tau).softmax(dim)
    if not hard:
        return soft
    chosen = torch.zeros_like(soft).scatter_(dim, soft.argmax(dim, keepdim=True), 1.0)
    return chosen - soft.detach() + soft


def _lowest(bounds: Sequence[Any], words: Mapping[str, Any]) -> int:
    """Return the lower bound of whole numbers that are drawn: the first of two before the shape, else 0."""
    two = len(bounds) > 1 and all(isinstance(bound, int) for bound in bounds[:2])
    return int(words.get("low", bounds[0] if two else 0))


@contextmanager
def untouched(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Put back buffers, random state, own streams and plain attributes, whatever runs inside; in training, parameters too."""
    attributes = [(part, dict(part.__dict__)) for part in module.modules()]
    # In the first batch of a training there is room for a copy: gradients and the optimizer's state come later.
    parameters = [(p, p.detach().clone()) for p in module.parameters() if p.requires_grad and module.training]
    with unchanged(module, device):
        try:
            yield
        finally:
            for part, values in attributes:
                part.__dict__.clear()
                part.__dict__.update(values)
            with (
                torch.no_grad(),
                torch._C.DisableTorchFunction(),
            ):  # a mode that watches the user's code does not see this
                for parameter, value in parameters:
                    if not torch.equal(parameter, value):
                        parameter.copy_(value)
