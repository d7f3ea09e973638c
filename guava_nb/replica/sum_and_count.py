"""Reads in the graph of a loss whether it is the sum that its count says.

Knows the nodes that torch's autograd keeps; asks no device for a number.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from guava_nb.errors import ConfigError

__all__ = ["refuse_no_sum"]

#: How torch's losses write down reduction="mean" in the graph.
_MEAN = 1
#: What stands under a mean of values that were weighed or chosen: with the mean of the weights it may make a sum and its count.
_WEIGHS = ("MulBackward0", "DivBackward0", "WhereBackward0", "MaskedFillBackward0", "MaskedFillBackward1")


def refuse_no_sum(role: str, loss: Tensor, count: Any, rows: int) -> None:
    """Refuse (mean, count) and (loss, another loss): one worker alone would train on the quotient, and nothing would show it.

    Args:
        role: what returned the two, for the error.
        loss, count: as returned, one element each.
        rows: of the batch.

    Raises:
        ConfigError: what computed them says that they are no sum and no count.
    """
    why = ""
    if isinstance(count, Tensor) and count.requires_grad:
        why = "the second one has a gradient, so it is no count"
    elif rows > 1 and (factors := _factors_of_means(loss.grad_fn)) is not None:
        why = _why_no_sum(factors, count) or _why_no_count(loss.grad_fn, factors, count)
    elif _is_divided_by(loss.grad_fn, count):
        why = "the first one was divided by the second one already"
    if why:
        raise ConfigError(
            f"the {role} function returned two values, which are read as (sum of losses, count), and {why}: return the mean loss "
            'alone, or the sum (reduction="sum") and what it is to be divided by'
        )


def _why_no_sum(factors: list[tuple[Any, ...]], count: Any) -> str:
    """Say why means that were multiplied so are no sum of as many losses as the count says; "" where they may be one."""
    values = [one for chain in factors for one in chain]
    if _is_on_gpu(count, *values):
        return "" if values else "the first one is a mean already"
    number = float(count)
    for chain in factors:
        numbers = [float(one) for one in chain]
        product = math.prod(numbers)
        if abs(product) >= number * (1 - 1e-6) or any(math.isclose(one, number, rel_tol=1e-6) for one in numbers):
            return ""  # made a sum by hand
    by = f", times {math.prod(map(float, factors[0])):.4g}" if len(factors) == 1 and values else ""
    return f"the first one is a mean already{by}" if number > 1 else ""


def _why_no_count(node: Any, factors: list[tuple[Any, ...]], count: Any) -> str:
    """Say why what stands beside plain means counts nothing, such as an accuracy; "" where it may count."""
    values = [one for chain in factors for one in chain]
    if _is_on_gpu(count, *values) or (number := float(count)) >= 1 or _weighs_samples(node):
        return ""
    products = [math.prod(map(float, chain)) for chain in factors]
    if any(math.isclose(one, number, rel_tol=1e-6, abs_tol=1e-12) for one in (*products, *map(float, values))):
        return ""
    return f"the first one is a mean already, and the second one, {number:.4g}, is no number of samples"


def _weighs_samples(node: Any) -> bool:
    """Whether one of the means that a loss is made of was taken of values that something weighed or chose."""
    made = [one for one, _ in node.next_functions if one is not None]
    if node.name().startswith("MeanBackward"):
        return any(one.name() in _WEIGHS for one in made)
    return not hasattr(node, "_saved_reduction") and any(map(_weighs_samples, made))


def _factors_of_means(node: Any) -> list[tuple[Any, ...]] | None:
    """What each mean was multiplied by, where a loss is a mean, or a sum of means; None where it is something else."""
    if node is None:
        return None
    name = node.name()
    if name in ("AddBackward0", "SubBackward0"):
        parts = [one for made, _ in node.next_functions if (one := _factors_of_means(made)) is not None]
        return [chain for one in parts for chain in one] if len(parts) == len(node.next_functions) else None
    if name in ("MulBackward0", "DivBackward0"):
        return _multiplied(node, name)
    if name == "NegBackward0":
        return _factors_of_means(node.next_functions[0][0])
    if name.startswith("MeanBackward"):  # of sums over the samples it is no mean over them
        return None if any(map(_sums_samples, (made for made, _ in node.next_functions))) else [()]
    return [()] if getattr(node, "_saved_reduction", None) == _MEAN else None


def _sums_samples(node: Any) -> bool:
    """Whether a sum over the first axis, or over all of them, made something."""
    if node is None or not node.name().startswith("SumBackward"):
        return False
    axes, first = getattr(node, "_saved_dim", (0,)), 2**64 - len(node._saved_self_sym_sizes)  # -1 is saved as 2**64 - 1
    return not axes or 0 in axes or first in axes


def _is_divided_by(node: Any, count: Any) -> bool:
    """Whether the last thing that made a loss was a division by its count."""
    divisor = node._saved_other if node is not None and node.name() == "DivBackward0" else None
    if not isinstance(divisor, Tensor) or divisor.numel() != 1 or _is_on_gpu(count, divisor):
        return False
    return float(count) > 1 and math.isclose(_number(divisor), float(count), rel_tol=1e-6)


def _is_on_gpu(*values: Any) -> bool:
    """Whether one's number would have to be waited for."""
    return any(isinstance(one, Tensor) and one.is_cuda for one in values)


def _multiplied(node: Any, name: str) -> list[tuple[Any, ...]] | None:
    saved = [node._saved_other, getattr(node, "_saved_self", None)]
    sides = node.next_functions if name == "MulBackward0" else node.next_functions[:1]
    for (made, _), factor in zip(sides, saved, strict=False):
        inner = _factors_of_means(made)
        if inner is not None and isinstance(factor, Tensor) and factor.numel() == 1:
            value = factor.detach() if factor.is_cuda else _number(factor)
            if name == "DivBackward0":
                value = 1 / value if isinstance(value, Tensor) or value else math.inf
            return [(*chain, value) for chain in inner]
    return None


def _number(value: Any) -> float:
    """The number in a tensor of one element.

    A Python number that a loss was multiplied by is saved as a tensor on which operations fail while a dispatch mode of torch
    looks on, as in the one-step check. Reading it as a list is no operation.
    """
    plain: Any = value.tolist() if isinstance(value, Tensor) and not value.ndim else value
    return float(plain)
