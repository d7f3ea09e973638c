"""The squared norm of the full gradient, as shares that add up over all ranks."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from guava_nb.parallel.state.full_state import local_part
from guava_nb.parallel.state.shard_layout import Layout

__all__ = ["nonfinite", "gradient_square", "scale_gradients"]


def gradient_square(
    named: Mapping[str, nn.Parameter], layouts: Mapping[str, Layout], dp: int = 0, tp: int = 0
) -> Tensor:
    """Return this rank's share of the squared L2 norm of the full gradient.

    Every element counts on exactly one rank: copies on the first of those that hold them, shards where they lie.
    Padding never counts, since a local part has none.

    Returns:
        A float64 scalar on the parameters' device.
    """
    shares = [
        local_part(parameter.grad).double().square().sum()
        if not parameter.grad.is_complex()
        else torch.view_as_real(local_part(parameter.grad)).double().square().sum()
        for name, parameter in named.items()
        if parameter.grad is not None and layouts[name].counted(dp, tp)
    ]
    return torch.stack(shares).sum() if shares else torch.zeros((), dtype=torch.float64)


@torch.no_grad()
def scale_gradients(named: Mapping[str, nn.Parameter], factor: float) -> None:
    """Multiply every gradient in place."""
    if factor != 1.0:
        for parameter in named.values():
            if parameter.grad is not None:
                local_part(parameter.grad).mul_(factor)


def nonfinite(named: Mapping[str, nn.Parameter]) -> str:
    """Return the first full name whose local gradient is not finite, "" when all are."""
    for name, parameter in named.items():
        if parameter.grad is not None and not bool(torch.isfinite(local_part(parameter.grad)).all()):
            return name
    return ""
