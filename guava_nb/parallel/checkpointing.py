"""Activation checkpointing: forget a module's activations after forward, compute them again in backward.

Changes no number: torch's non-reentrant checkpoint restores the random state, so dropout draws the same masks, and the
order of sums stays. Buffers and plain attributes move once.
It replaces `forward` of the instance, so no parameter gets another name.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from guava_nb.parallel.blocks import matching

__all__ = ["checkpoint_activations"]

_MARK = "_guava_checkpointed"
#: A buffer's owner and name.
_Place = tuple[nn.Module, str]
_PLAIN = (bool, int, float, complex, str, type(None))
#: Values in a buffer that is copied before each forward, even if no forward seems to change it.
_FEW_VALUES = 256


def checkpoint_activations(model: nn.Module, patterns: Sequence[str], must_match: bool = True) -> list[str]:
    """Checkpoint the modules that match.

    Args:
        model: changed in place.
        patterns: shell patterns over module names; "*" alone is every repeated block.
        must_match: False for a stage, which need not hold what a pattern means.

    Returns:
        The names of the modules; one inside another that was chosen too is left to the outer one.

    Raises:
        ConfigError: a pattern matches nothing.
    """
    chosen = matching(model, patterns, "checkpoint_activations (--checkpoint-activations)", must_match)
    outer = {n: m for n, m in chosen.items() if not any(n.startswith(f"{other}.") for other in chosen)}
    for module in {id(module): module for module in outer.values()}.values():
        if _MARK not in module.__dict__:
            module.__dict__[_MARK] = True
            module.forward = _checkpointed(module.forward, module)
    return list(outer)


def _checkpointed(forward: Callable[..., Any], module: nn.Module) -> Callable[..., Any]:
    moving: set[_Place] = set(_places(module))  # all, until the first forward has shown which ones move

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(_once(forward, module, moving), *args, use_reentrant=False, **kwargs)

    return run


def _places(module: nn.Module) -> dict[_Place, Tensor]:
    """Return the buffers of all modules, each of its own shape, by the place where it stands."""
    return {(m, key): value for m in module.modules() for key, value in m._buffers.items() if value is not None}


def _attributes(module: nn.Module) -> dict[nn.Module, dict[str, Any]]:
    return {m: {key: value for key, value in vars(m).items() if isinstance(value, _PLAIN)} for m in module.modules()}


def _once(forward: Callable[..., Any], module: nn.Module, moving: set[_Place]) -> Callable[..., Any]:
    """Let buffers and plain attributes move in the first run only.

    The second one, in backward, finds and changes copies of what was there before.

    Args:
        moving: buffers that are copied however large they are; those that move are kept in it.
    """
    before: dict[_Place, Tensor] = {}
    attributes: dict[nn.Module, dict[str, Any]] = {}
    is_first = True

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_first
        if not is_first:
            with _holding(module, before, attributes):
                return forward(*args, **kwargs)
        is_first, held = False, _places(module)
        marks = {place: (id(value), value._version) for place, value in held.items()}
        copies = {
            place: value.clone() for place, value in held.items() if place in moving or value.numel() <= _FEW_VALUES
        }
        attributes.update(_attributes(module))
        outputs = forward(*args, **kwargs)
        moved = {place for place, value in _places(module).items() if marks.get(place) != (id(value), value._version)}
        before.update({place: one for place, one in copies.items() if place in moved or one.numel() <= _FEW_VALUES})
        moving.clear()
        moving.update(moved)
        return outputs

    return run


@contextlib.contextmanager
def _holding(
    module: nn.Module, before: Mapping[_Place, Tensor], attributes: Mapping[nn.Module, dict[str, Any]]
) -> Iterator[None]:
    """Put copies, each of its buffer's shape, in the places of buffers, and set attributes back, for the block.

    The buffers of now are left alone: autograd may have kept them for backward.

    Statistics of norms move without a new version, and are not read while they do: those of now will do.
    """
    now, attributes_now = _places(module), _attributes(module)
    try:
        for owner, values in attributes.items():
            vars(owner).update({key: value for key, value in values.items() if key in attributes_now.get(owner, ())})
        for (owner, key), value in now.items():
            place = owner, key
            if place in before or isinstance(owner, nn.modules.batchnorm._NormBase):
                owner._buffers[key] = before.get(place, value).clone()
        yield
    finally:
        for (owner, key), value in now.items():
            owner._buffers[key] = value
        for owner, values in attributes_now.items():
            vars(owner).update(values)
