"""What a check leaves as it was: the run's model, objects that a name stands for, compiled modules."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable, Iterator

import torch
from torch import nn

from guava_nb.spec.factories import Resolve

__all__ = ["copying", "set_aside", "uncompiled"]


@contextlib.contextmanager
def set_aside(model: nn.Module) -> Iterator[Callable[[], bool]]:
    """Give gradients and buffers back as they were; gives what tells whether the model was used inside."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    for parameter, _ in gradients:
        parameter.grad = None

    def is_touched() -> bool:
        return any(parameter.grad is not None for parameter, _ in gradients)

    try:
        yield is_touched
    finally:
        if is_touched():
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)
        for parameter, gradient in gradients:
            parameter.grad = gradient


def copying(resolve: Resolve) -> Callable[[str], object]:
    """Find objects as the run does, but modules as copies: a criterion that is a module changes its dtype in place."""

    def find(name: str) -> object:
        found = resolve(name)
        return copy.deepcopy(found) if isinstance(found, nn.Module) else found

    return find


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """Run compiled modules as they are written: compiling for a few samples would take minutes."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield
