"""Activation checkpointing: forget a module's activations after forward, compute them again in backward.

Changes no number: torch's non-reentrant checkpoint restores the random state, so dropout draws the same masks, and the
order of sums stays. It replaces `forward` of the instance, so no parameter gets another name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from guava_nb.parallel.blocks import matching

__all__ = ["checkpoint_activations"]

_MARK = "_guava_checkpointed"


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
    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        steady = _batch_statistics(module) if module.training else []
        if not steady:
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)
        return checkpoint(_once(forward, steady), *args, use_reentrant=False, **kwargs)

    return run


def _batch_statistics(module: nn.Module) -> list[nn.Module]:
    norms = (nn.modules.batchnorm._NormBase,)
    return [m for m in module.modules() if isinstance(m, norms) and m.track_running_stats]


def _once(forward: Callable[..., Any], norms: list[nn.Module]) -> Callable[..., Any]:
    """Let batch statistics move in the first run only: the second one, in backward, would count a batch twice."""
    runs = 0

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal runs
        runs += 1
        if runs == 1:
            return forward(*args, **kwargs)
        kept = [(buffer, buffer.clone()) for norm in norms for buffer in norm.buffers(recurse=False)]
        try:
            return forward(*args, **kwargs)
        finally:
            with torch.no_grad():
                for buffer, value in kept:
                    buffer.copy_(value)

    return run
