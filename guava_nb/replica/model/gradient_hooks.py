"""The user's hooks on gradients of parameters: run once a step, on the gradient of the whole batch, as in a plain loop.

During backward a worker has the gradient of its share of a batch, or of one micro-batch, and hooks may do to a sum what they do
not do to its parts (clamping, signs, clipping). So they are taken off the parameters and called when the sum is there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from guava_nb.errors import ConfigError
from guava_nb.parallel.module_state import unheard
from guava_nb.parallel.tensor.without_randomness import WithoutRandomness
from guava_nb.parallel.unloaded import is_dtensor

__all__ = ["GradientHooks", "refusing_hooks"]

#: Sizes of the gradients on which hooks are tried: a clamp acts on large ones only.
_SIZES = (0.01, 1.0, 30.0)


@dataclass(frozen=True, slots=True)
class _Hooked:
    """Hooks of one parameter, in torch's own tables, so that a handle's `remove` still finds its hook.

    Attributes:
        parameter: whose gradient they see.
        before, after: hooks that take and may return a gradient; those that take the parameter, its gradient complete.
    """

    parameter: Tensor
    before: dict[int, Callable[[Tensor], Any]]
    after: dict[int, Callable[[Tensor], Any]]

    def call(self, parameter: Tensor, gradient: Tensor) -> None:
        """Take in one more gradient of `parameter`, of its shape, as the end of a backward does."""
        for hook in list(self.before.values()):
            changed = hook(gradient)
            gradient = gradient if changed is None else changed
        parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        for hook in list(self.after.values()):
            hook(parameter)

    def tried(self, gradients: Sequence[Tensor]) -> Tensor | None:
        """Return the gradient of a stand-in after these backwards, each of the parameter's shape.

        None: hooks raised, changed the values, or dropped it.
        """
        stand_in = nn.Parameter(self.parameter.detach().clone())
        try:
            with unheard():
                for gradient in gradients:
                    self.call(stand_in, gradient.clone())
        except Exception:  # the user's own
            return None
        return stand_in.grad if torch.equal(stand_in, self.parameter) else None


class GradientHooks:
    """Hooks that were taken off the parameters of a model."""

    def __init__(self, model: nn.Module) -> None:
        """Take them off, before anything else puts hooks there."""
        self._hooked: dict[str, _Hooked] = {}
        for name, parameter in model.named_parameters():
            tables = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
            if any(tables):
                self._hooked[name] = _Hooked(parameter, *(table or OrderedDict() for table in tables))
                _give(parameter, OrderedDict(), OrderedDict())

    def __len__(self) -> int:
        """How many parameters have hooks."""
        return len(self._hooked)

    @property
    def names(self) -> list[str]:
        """The parameters that have hooks."""
        return list(self._hooked)

    @torch.no_grad()
    def run(self) -> None:
        """Call the hooks of each parameter that has a gradient, the last parameter first, as backward would."""
        for one in reversed(self._hooked.values()):
            gradient, one.parameter.grad = one.parameter.grad, None
            if gradient is not None:
                one.call(one.parameter, gradient)

    def put_back(self) -> None:
        """Leave the parameters as they were found."""
        for one in self._hooked.values():
            _give(one.parameter, one.before, one.after)
        self._hooked = {}

    def move_to(self, named: Mapping[str, Tensor], clips: bool) -> None:
        """Run from now on on a rank's part of the model.

        Args:
            named: its parameters, of local shapes, by full name. For those that are cut, hooks that only look are not called.
            clips: gradients are clipped by their norm, which a group knows before hooks run.

        Raises:
            ConfigError: a hook changes a gradient of which each worker has a part, or that is clipped.
        """
        for name, one in list(self._hooked.items()):
            here = named.get(name)
            is_cut = here is not None and (is_dtensor(here) or here.shape != one.parameter.shape)
            if (is_cut or clips) and self._alters(one):
                raise ConfigError(
                    f"a hook changes the gradient of {name!r}, and "
                    + (
                        "each worker holds a part of that parameter in this mode: use data mode or zero_stage=1 (--zero 1)"
                        if is_cut
                        else "workers of a process group know the norm for max_grad_norm before hooks run: clip in the hook, or "
                        'use data mode with path="relay" (--path relay)'
                    )
                )
            if here is None or is_cut:
                del self._hooked[name]
            else:
                self._hooked[name] = replace(one, parameter=here)

    def check_accumulation(self, backwards: int) -> None:
        """Refuse hooks that give something else for a sum of gradients than a plain loop's backwards do, each with its hooks.

        Args:
            backwards: loader batches of the step.

        Raises:
            ConfigError: one does.
        """
        for name, one in self._hooked.items():
            for size in _SIZES if backwards > 1 else ():
                first, second = _drawn(one, size, 0), _drawn(one, size, 1)
                with WithoutRandomness(), torch.no_grad():
                    each, at_once = one.tried([first, second]), one.tried([first + second])
                if each is None or at_once is None or not torch.allclose(each, at_once, rtol=1e-4, atol=1e-6 * size):
                    raise ConfigError(
                        f"a hook on the gradient of {name!r} gives something else for the sum of {backwards} batches than for "
                        "one after the other, as a plain loop calls it, and here it is called once a step: use "
                        "accumulation_steps=1 (--accumulate 1) with larger batches"
                    )

    def _alters(self, one: _Hooked) -> bool:
        gradients = [_drawn(one, size) for size in _SIZES]
        with torch.no_grad():
            found = [one.tried([gradient]) for gradient in gradients]
        return not all(a is not None and torch.equal(a, b) for a, b in zip(found, gradients, strict=True))


@contextmanager
def refusing_hooks(model: nn.Module, optimizer: str) -> Iterator[None]:
    """Refuse an optimizer, made inside, that puts hooks on gradients: in a group each rank's would see its own part of them.

    Raises:
        ConfigError: it does.
    """
    before = _hooks_on(model)
    yield
    if hooked := [name for name, hooks in _hooks_on(model).items() if hooks != before.get(name)]:
        raise ConfigError(
            f"optimizer {optimizer!r} puts a hook on the gradient of {hooked[0]!r} when it is made, and in this mode each worker "
            "makes one of its part of the model: put the hook there in the model's factory, or use data mode with "
            'path="relay" (--path relay)'
        )


def _hooks_on(model: nn.Module) -> dict[str, list[int]]:
    tables = ((n, (p._backward_hooks, p._post_accumulate_grad_hooks)) for n, p in model.named_parameters())
    return {name: [key for table in both for key in table or ()] for name, both in tables}


def _drawn(one: _Hooked, size: float, seed: int = 0) -> Tensor:
    """Return a random gradient of a parameter's shape."""
    shape, dtype = one.parameter.shape, one.parameter.dtype
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    return size * drawn.to(one.parameter.device)


def _give(parameter: Tensor, before: dict[int, Any], after: dict[int, Any]) -> None:
    """Set torch's tables of hooks of a parameter of any shape; an empty one, since None takes no post-accumulate hook off."""
    parameter._backward_hooks = before
    parameter._post_accumulate_grad_hooks = after
