"""What two measurements of a batch, whole and in pieces, have unlike. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from guava_nb.replica.one_step_check.python_state import Kept

__all__ = [
    "CLEAN",
    "ROUGH",
    "Measured",
    "differ",
    "differences",
    "is_counted_unlike",
    "is_spanned",
    "is_sum",
    "is_unlike",
]

#: Relative differences that are taken for rounding. Where single precision gives more than `CLEAN`, double precision
#: decides; `ROUGH` is for models that cannot compute in it. Parts that a model computes in float32 by itself stay.
CLEAN = 1e-6
ROUGH = {"fp32": 1e-3, "bf16": 3e-2, "fp16": 3e-2, "fp64": CLEAN}


@dataclass(frozen=True, slots=True)
class Measured:
    """What a step of some pieces of a batch comes to.

    Attributes:
        loss, gradients, buffers: of the step; by name.
        left: after each piece, what is kept in Python.
        written: after each piece, the parameters that were written into.
        count: what the loss was divided by.
    """

    loss: float
    gradients: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    left: Sequence[Mapping[str, Kept]]
    written: Sequence[Mapping[str, Tensor]]
    count: float = 0.0

    @property
    def gradient_norm(self) -> float:
        """Of all gradients together."""
        return math.hypot(*(_norm(gradient) for gradient in self.gradients.values()))


def differences(a: Measured, b: Measured) -> tuple[float, float, str]:
    """Return the relative difference of the losses, that of the gradients, and the parameter that differs most.

    Gradients are compared with the norm of the whole gradient: the gradient of one parameter may be nothing but rounding.
    """
    by_loss = abs(a.loss - b.loss) / max(abs(a.loss), abs(b.loss), 1e-3)
    size = max(a.gradient_norm, b.gradient_norm, 1e-6)
    each = {name: _distance(a.gradients.get(name), b.gradients.get(name)) for name in {**a.gradients, **b.gradients}}
    worst = max(each, key=lambda name: (math.isnan(each[name]), each[name]), default="")
    by_gradient = math.hypot(*each.values()) / size
    return (math.inf if math.isnan(by_loss) else by_loss), (math.inf if math.isnan(by_gradient) else by_gradient), worst


def differ(a: Measured, b: Measured) -> bool:
    """Whether losses or gradients differ by more than rounding."""
    return max(differences(a, b)[:2]) > CLEAN


def _norm(value: Tensor) -> float:
    """Return the norm over all elements of a tensor of any shape."""
    return float(torch.linalg.vector_norm(value.reshape(-1)))


def _distance(a: Tensor | None, b: Tensor | None) -> float:
    """Return the norm of the difference of two tensors of one shape; a missing one counts as zeros."""
    if a is not None and b is not None:
        return _norm(a - b)
    return sum(_norm(one) for one in (a, b) if one is not None)


def is_unlike(a: Tensor, b: Tensor | None) -> bool:
    """Whether two tensors of any shape differ in it, or by more than rounding in their precision."""
    if b is None or a.shape != b.shape:
        return True
    if not (a.is_floating_point() or a.is_complex()):
        return not torch.equal(a, b)
    same = torch.isclose(a, b, rtol=ROUGH["fp32"] if a.dtype != torch.float64 else CLEAN, atol=1e-6, equal_nan=True)
    return not bool(same.all())


def is_spanned(one: Measured, parts: Sequence[Measured]) -> bool:
    """Whether the whole gradient is a weighted sum of those of the pieces: then only the weights are wrong."""
    names = list(one.gradients)
    if not names or sum(one.gradients[name].numel() for name in names) <= 2 * len(parts):
        return False

    def dot(a: Measured, b: Measured) -> float:
        pairs = ((a.gradients.get(name), b.gradients.get(name)) for name in names)
        return sum(float((x * y.conj()).real.sum()) if x.is_complex() else float((x * y).sum())
                   for x, y in pairs if x is not None and y is not None)  # fmt: skip

    products = torch.tensor([[dot(a, b) for b in parts] for a in parts], dtype=torch.float64)
    wanted = torch.tensor([dot(a, one) for a in parts], dtype=torch.float64)
    if not (products.isfinite().all() and wanted.isfinite().all()):  # lstsq takes no NaN
        return False
    weights = torch.linalg.lstsq(products, wanted, driver="gelsd").solution
    explained = float(weights @ products @ weights)
    total = dot(one, one)
    return abs(total - explained) <= 1e-9 * total


def is_counted_unlike(one: Measured, parts: Sequence[Measured]) -> bool:
    """Whether the sums of the losses agree, and the counts do not: one may be clamped."""
    total, counted = sum(part.loss * part.count for part in parts), sum(part.count for part in parts)
    is_same_sum = math.isclose(one.loss * one.count, total, rel_tol=1e-9, abs_tol=1e-12)
    return is_same_sum and not math.isclose(one.count, counted, rel_tol=1e-9)


def is_sum(one: Measured, parts: Sequence[Measured]) -> bool:
    """Whether loss and gradient of the whole are the sums of those of the pieces, not their means."""
    names = {name for part in parts for name in part.gradients}
    added = {name: sum(part.gradients[name] for part in parts if name in part.gradients) for name in names}
    return not differ(one, Measured(sum(part.loss for part in parts), added, {}, (), ()))  # type: ignore[arg-type]
