"""Wrappers that put a name of their own before a model's names: torch.compile, DataParallel, DistributedDataParallel.

Everything that leaves a process (states, checkpoints, the orchestrator's model) has the plain model's names, so a model is
unwrapped as soon as it is built. What torch.compile does stays: the plain module is called through the same compiler.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

__all__ = ["is_compiled", "plain_names", "unwrapped"]

Value = TypeVar("Value")

_NAMES = ("_orig_mod", "module")


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the plain model of a wrapped one; wrappers of its parts are taken out in place."""
    model = _inner(model)
    for module in list(model.modules()):
        for name, child in module._modules.items():
            if child is not None:
                module._modules[name] = _inner(child)
    return model


def is_compiled(model: nn.Module) -> bool:
    """Whether torch.compile was called for a model or a part of it."""
    return any(_is_optimized(module) or module._compiled_call_impl is not None for module in model.modules())


def _inner(module: nn.Module) -> nn.Module:
    compiler: Any = None
    while True:
        if _is_optimized(module):
            compiler, module = compiler or module.dynamo_ctx, module._modules["_orig_mod"]  # type: ignore[assignment]
        elif isinstance(module, DataParallel | DistributedDataParallel):
            module = module.module
        else:
            break
    if compiler is not None:
        # As `module.compile()` does it, with the backend and the options that were given to torch.compile.
        module._compiled_call_impl = compiler(_call_of(module))
    return module


def _call_of(module: nn.Module) -> Any:
    """What the compiler takes for a module's call: it skips frames of torch's own files, so such a module gets another."""
    if not type(module).__module__.startswith("torch."):
        return module._call_impl

    def call(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

    return call


def _is_optimized(module: nn.Module) -> bool:
    # By its name: importing torch._dynamo takes seconds, and where nothing is compiled it is not loaded.
    return type(module).__name__ == "OptimizedModule" and "_orig_mod" in module._modules


def plain_names(state: Mapping[str, Value], own: Iterable[str]) -> dict[str, Value]:
    """Return a state under a model's names, where wrappers put others into it (`_orig_mod.`, `module.`) or into the model.

    Args:
        state: by full name.
        own: the model's names. What fits none of them keeps its name.
    """
    names = set(own)
    by_plain = {_plain(name): name for name in names}
    if len(by_plain) < len(names):
        return dict(state)
    return {name if name in names else by_plain.get(_plain(name), name): value for name, value in state.items()}


def _plain(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _NAMES)
