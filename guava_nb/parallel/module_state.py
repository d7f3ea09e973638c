"""Running a module for a while in another mode, or without leaving a trace; moving values to a device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from guava_nb.nested import map_leaves

__all__ = ["evaluating", "to_device", "unchanged"]


def to_device(value: Any, device: torch.device) -> Any:
    """Return a nested value with its tensors on a device."""
    # A packed sequence is moved as a whole, because the lengths in it stay on the CPU.
    return map_leaves(value, lambda part: part.to(device), (Tensor, PackedSequence))


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Run in evaluation mode; every module gets its own mode back."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


@contextmanager
def unchanged(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Leave buffers and random state as they were, whatever runs inside."""
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, value in before:
                    buffer.copy_(value)
