"""What a loaded optimizer state lacks, which torch would only find in the first step, at a worker."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = ["unfit"]


def unfit(optimizer: Optimizer, saved: Any) -> str:
    """Return what the state of one of torch's optimizers lacks for a step, "" for nothing, or where that is not known.

    Args:
        saved: what it has loaded: torch turns all of it into floats without a word.
    """
    if not type(optimizer).__module__.startswith("torch.optim"):
        return ""
    for state in saved["state"].values():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.dim() and not (value.is_floating_point() or value.is_complex()):
                return f"{name!r} is a tensor of {value.dtype}"
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            found = optimizer.state.get(parameter)
            if not found:
                continue
            for name, value in _after_a_step(type(optimizer), group, parameter).items():
                if lacking := _lacking(found.get(name), value, parameter):
                    return f"{name!r} of a parameter of shape {tuple(parameter.shape)} {lacking}"
    return ""


def _after_a_step(kind: type[Optimizer], group: dict[str, Any], like: nn.Parameter) -> dict[str, Any]:
    """The state of a small parameter after a step; {} where it cannot be made."""
    small = nn.Parameter(torch.zeros([2] * like.dim(), dtype=like.dtype))
    small.grad = torch.zeros_like(small)
    try:
        made = kind([{**group, "params": [small]}])  # type: ignore[call-arg]
        made.step()
    except Exception:  # settings of a kind that is not known here
        return {}
    return dict(made.state[small])


def _lacking(found: Any, usual: Any, parameter: nn.Parameter) -> str:
    if not isinstance(usual, Tensor):
        return "is no number" if isinstance(usual, int | float) and not isinstance(found, int | float | Tensor) else ""
    if not isinstance(found, Tensor):
        return "is missing" if usual.dim() else ("" if isinstance(found, int | float) else "is no number")
    if usual.dim() and usual.shape == torch.Size([2] * parameter.dim()) and found.shape != parameter.shape:
        return f"has shape {tuple(found.shape)}"
    same = found.is_floating_point() == usual.is_floating_point() and (usual.dim() or found.numel() == 1)
    return "" if same else f"is a tensor of {found.dtype} of shape {tuple(found.shape)}"
