"""Whether what was shown of one module holds for another: what can be told apart without reading code.

Blocks of a model mostly differ in the values of their weights only, so one try serves them all. Anything else that
their forwards could look at must be the same: numbers and texts by value, buffers and other tensors by value, and
whatever has no value that can be compared, such as a function or an object of the user's, must be the same one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["module_fingerprint"]

#: Compared by value; `type` too, since 1, 1.0 and True are equal.
_VALUES = (int, float, str, bytes, bool, complex, type(None), torch.dtype, torch.device)
#: Of torch's own in every module; parameters, buffers and children are looked at by their names.
_TORCHS = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
_MOST_BYTES = 1 << 26


def module_fingerprint(module: nn.Module) -> Hashable:
    """Return a key that two living modules share only if they do the same, whatever the values of their weights."""
    first: dict[int, str] = {}
    return tuple(
        (name, id(type(part)), _attributes(part), _parameters(part, name, first), _buffers(part))
        for name, part in module.named_modules(remove_duplicate=False)
    )


def _attributes(part: nn.Module) -> Hashable:
    return tuple((key, _value(value)) for key, value in part.__dict__.items() if key not in _TORCHS)


def _parameters(part: nn.Module, prefix: str, first: dict[int, str]) -> Hashable:
    """Shapes, and which of them are one parameter."""
    return tuple(
        (name, None)
        if parameter is None
        else (
            name,
            first.setdefault(id(parameter), f"{prefix}.{name}"),
            tuple(parameter.shape),
            str(parameter.dtype),
            parameter.requires_grad,
        )
        for name, parameter in part._parameters.items()
    )


def _buffers(part: nn.Module) -> Hashable:
    return tuple((name, _value(buffer)) for name, buffer in part._buffers.items())


def _value(value: Any) -> Hashable:
    if type(value) in _VALUES:
        return type(value).__name__, repr(value)
    if type(value) in (list, tuple, torch.Size):
        return type(value).__name__, tuple(map(_value, value))
    if isinstance(value, dict):
        return id(type(value)), tuple((_value(key), _value(child)) for key, child in value.items())
    if type(value) in (set, frozenset):
        return type(value).__name__, frozenset(map(_value, value))
    if isinstance(value, Tensor) and value.layout == torch.strided and value.nbytes <= _MOST_BYTES:
        return str(value.dtype), tuple(value.shape), _digest(value)
    return "this one", id(value)


def _digest(tensor: Tensor) -> str:
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).hexdigest() if flat.numel() else ""
