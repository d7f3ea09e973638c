"""Running a module for a while in another mode, or without leaving a trace; moving values to a device."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from guava_nb.errors import TrainingError
from guava_nb.nested import map_leaves
from guava_nb.random_streams import streams_kept

__all__ = ["back_to", "evaluating", "kept_buffers", "late_gradient", "to_device", "unchanged", "unheard"]

_unheard: dict[int, int] = {}  # by thread: how many blocks it is in
_unheard_lock = threading.Lock()


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
        back_to(modes)


def back_to(modes: Mapping[nn.Module, bool]) -> None:
    """Give every module its mode back after `model.eval()`; a `train` of a module's own may do more, so it is called too."""
    for module in modes:
        if modes[module] and type(module).train is not nn.Module.train:
            module.train()
    # One by one: train() would wake layers that the user keeps in evaluation mode.
    for module, training in modes.items():
        module.training = training


@contextmanager
def kept_buffers(model: nn.Module) -> Iterator[None]:
    """Undo what the body does to buffers: a stand-in's rows must leave no trace in batch statistics."""
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)


@contextmanager
def unchanged(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Leave buffers, random state and streams of the user's own as they were, whatever runs inside."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), streams_kept(model), kept_buffers(model):
        yield


class _Filter:
    """A text stream that drops what threads in `unheard` write; all else is the stream's own."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        return len(text) if threading.get_ident() in _unheard else int(self.stream.write(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def unheard() -> Iterator[None]:
    """Drop what this thread prints: code of the user's that is tried on stand-ins would be taken for the run itself."""
    me = threading.get_ident()
    with _unheard_lock:
        if not _unheard:
            sys.stdout = _Filter(sys.stdout)
        _unheard[me] = _unheard.get(me, 0) + 1
    try:
        yield
    finally:
        with _unheard_lock:
            _unheard[me] -= 1
            if not _unheard[me]:
                del _unheard[me]
            if not _unheard and isinstance(sys.stdout, _Filter):
                sys.stdout = sys.stdout.stream


def late_gradient(name: str) -> TrainingError:
    """Return the error on a parameter that takes a gradient and took none when the run began."""
    return TrainingError(
        f"parameter {name!r} began to take a gradient during the run, and several workers exchange the gradients of "
        "those only that took one when it began. Unfreeze it between two runs: let one end before, set requires_grad in "
        "the factory (or on the registered instance), and start training again, which goes on from the weights; or train "
        "with one worker"
    )
