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

    Args:
        named: this rank's parameters, by full name.
        layouts: what is here of each.
        dp, tp: this rank's places on the axes of replicas and of split layers.

    Returns:
        A float64 scalar, `[]`, on the parameters' device.
    """
    counted = [
        local_part(parameter.grad)
        for name, parameter in named.items()
        if parameter.grad is not None and layouts[name].counted(dp, tp)
    ]
    found = [torch.view_as_real(one) if one.is_complex() else one for one in counted if one.numel()]
    if not found:
        return torch.zeros((), dtype=torch.float64)
    # In float64, as a sum of squares of large gradients overflows in less.
    return torch.stack(torch._foreach_norm(found, 2, dtype=torch.float64)).square().sum()


@torch.no_grad()
def scale_gradients(named: Mapping[str, nn.Parameter], factor: float) -> None:
    """Multiply every gradient in place."""
    gradients = [local_part(parameter.grad) for parameter in named.values() if parameter.grad is not None]
    if gradients and factor != 1.0:
        torch._foreach_mul_(gradients, factor)


def nonfinite(named: Mapping[str, nn.Parameter]) -> str:
    """Return the first full name whose local gradient is not finite, "" when all are."""
    for name, parameter in named.items():
        if parameter.grad is not None and not bool(torch.isfinite(local_part(parameter.grad)).all()):
            return name
    return ""
