"""A forward without chance: dropout lets everything through, and other draws of torch give one constant.

Knows torch's functions that draw random numbers; knows nothing of models. A batch and its pieces draw different random
numbers, so they can be compared only where nothing depends on what is drawn. The functions are replaced where they are
called, so modules, functions and attention of torch are all covered, whatever a model's author wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

__all__ = ["QuietRandomness", "silence_modules"]

_DROPOUTS = frozenset({
    "dropout", "dropout_", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "alpha_dropout_", "feature_dropout",
    "feature_dropout_", "feature_alpha_dropout", "feature_alpha_dropout_", "native_dropout",
})  # fmt: skip
#: What a draw becomes: the middle of what is usual. A mask of Bernoulli keeps everything.
_CONSTANTS: Mapping[str, float] = {
    "randn": 0.0, "randn_like": 0.0, "normal": 0.0, "normal_": 0.0, "rand": 0.5, "rand_like": 0.5, "uniform_": 0.5, "bernoulli": 1.0,
    "bernoulli_": 1.0, "exponential_": 1.0,
}  # fmt: skip


class QuietRandomness(TorchFunctionMode):
    """Inside, torch's usual random functions give constants, and dropout does nothing.

    Attributes:
        seen: names of the functions that would have drawn numbers, dropout of rate 0 left out.
    """

    def __init__(self) -> None:
        """Have seen nothing."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: set[str] = set()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Do what was called, without chance."""
        name, given = getattr(func, "__name__", ""), dict(kwargs or {})
        if name in _DROPOUTS:
            return self._let_through(func, args, given)
        if name == "scaled_dot_product_attention":
            return func(*self._without_rate(args, 4), **self._without_rate_named(given))
        if name in _CONSTANTS:
            self.seen.add(name.rstrip("_"))
            return _filled(func(*args, **given), _CONSTANTS[name])
        if name in ("randint", "randint_like"):
            self.seen.add(name)
            return _filled(func(*args, **given), _lowest(name, args, given))
        if name == "randperm":
            self.seen.add(name)
            drawn = func(*args, **given)
            return torch.arange(len(drawn), dtype=drawn.dtype, device=drawn.device)
        return func(*args, **given)

    def _let_through(self, func: Callable[..., Any], args: tuple[Any, ...], given: Mapping[str, Any]) -> Any:
        values = [*args, *given.values()]
        rates = [value for value in values if isinstance(value, float)]
        if True in values[1:] and any(rates):
            self.seen.add("dropout")
        inputs = args[0] if args else given["input"]
        if getattr(func, "__name__", "") == "native_dropout":
            return inputs, torch.ones_like(inputs, dtype=torch.bool)
        return inputs

    def _without_rate(self, args: tuple[Any, ...], place: int) -> tuple[Any, ...]:
        if len(args) <= place:
            return args
        self._note(args[place])
        return (*args[:place], 0.0, *args[place + 1 :])

    def _without_rate_named(self, given: dict[str, Any]) -> dict[str, Any]:
        if "dropout_p" in given:
            self._note(given["dropout_p"])
            given["dropout_p"] = 0.0
        return given

    def _note(self, rate: float) -> None:
        if rate:
            self.seen.add("dropout")


def silence_modules(modules: Iterable[nn.Module]) -> bool:
    """Set the dropout of recurrent layers and of attention to 0, which torch applies below its functions.

    Returns:
        Whether one had any.
    """
    found = False
    for module in modules:
        if isinstance(module, nn.RNNBase | nn.MultiheadAttention) and module.dropout:
            module.dropout, found = 0.0, True
    return found


def _filled(drawn: Any, constant: float) -> Any:
    if isinstance(drawn, Tensor):
        with torch.no_grad():
            drawn.fill_(constant)
    return drawn


def _lowest(name: str, args: tuple[Any, ...], given: Mapping[str, Any]) -> int:
    """Return the lower bound of whole numbers that are drawn: the first of two whole numbers before the shape."""
    bounds = args[1:] if name == "randint_like" else args
    two = len(bounds) > 1 and all(isinstance(bound, int) for bound in bounds[:2])
    return int(given.get("low", bounds[0] if two else 0))
