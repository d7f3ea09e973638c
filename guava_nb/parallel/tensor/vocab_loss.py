"""Cross entropy on logits of which each rank has some classes.

Whole logits are rows x classes: far more than anything else a step would send. So a vocabulary's head returns logits
that are put together only if code looks at them. `cross_entropy` does not: it needs a maximum and two sums per row.
Whatever else is done to such logits, they are gathered first, which is always right.

Shapes: N rows (tokens), V all classes, v this rank's, so V is the sum of `lengths`. The stable sum of exponentials shifts each
row by its maximum over all ranks, as Megatron-LM's vocabulary-parallel cross entropy does (arXiv:1909.08053).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from guava_nb.nested import map_leaves
from guava_nb.parallel.tensor.tensor_ops import Ranks, gather

__all__ = ["SplitLogits", "split_cross_entropy", "whole_logits"]


class SplitLogits(Tensor):
    """Logits `[..., V]` of which this rank has `[..., v]`; looks like the whole tensor.

    Attributes:
        local: this rank's classes, `[..., v]`.
        lengths: every rank's number of classes.
        ranks: who shares them.
    """

    local: Tensor
    lengths: tuple[int, ...]
    ranks: Ranks
    _whole: Tensor | None

    @staticmethod
    def __new__(cls, local: Tensor, lengths: Sequence[int], ranks: Ranks) -> SplitLogits:
        """Wrap a part, `[..., v]`; the graph stays with it."""
        shape = (*local.shape[:-1], sum(lengths))
        made: SplitLogits = Tensor._make_wrapper_subclass(cls, shape, dtype=local.dtype, device=local.device)
        made.local, made.lengths, made.ranks, made._whole = local, tuple(lengths), ranks, None
        return made

    def gathered(self) -> Tensor:
        """Return the whole logits `[..., V]`; a second call sends nothing. All ranks must call it alike."""
        whole = self.__dict__["_whole"]
        if whole is None:
            whole = self.__dict__["_whole"] = gather(self.local, self.ranks, self.lengths)
        return whole  # type: ignore[no-any-return]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer what the part knows, run the rest on whole logits."""
        own = _OWN.get(func)
        if own is not None and isinstance(args[0], cls):
            answer = own(*args, **(kwargs or {}))
            if answer is not NotImplemented:
                return answer
        if func in _LOOKS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return func(*whole_logits(args), **whole_logits(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Run whatever comes past `__torch_function__` on whole logits."""
        return func(*whole_logits(args), **whole_logits(kwargs or {}))


def whole_logits(value: Any) -> Any:
    """Return a nested value with all split logits in it put together; all ranks must call it alike."""
    return map_leaves(value, SplitLogits.gathered, SplitLogits)


# ------------------------------------------------------------------------------------------- what a part can answer


def _reshaped(logits: SplitLogits, *shape: Any) -> Any:
    """Reshape the leading dims; NotImplemented where the classes would not stay the last dim as a whole."""
    sizes = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
    classes = logits.shape[-1]
    if not sizes or not all(isinstance(size, int) for size in sizes) or sizes[-1] not in (-1, classes):
        return NotImplemented
    if sizes[-1] == -1 and _product(sizes[:-1]) * classes != logits.numel():
        return NotImplemented
    return SplitLogits(logits.local.reshape(*sizes[:-1], logits.local.shape[-1]), logits.lengths, logits.ranks)


def _product(sizes: Sequence[int]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total


def _flattened(logits: SplitLogits, start_dim: int = 0, end_dim: int = -1) -> Any:
    """Flatten leading dims; NotImplemented where the classes would be among them."""
    last = end_dim % logits.local.dim()
    if last == logits.local.dim() - 1:
        return NotImplemented
    return SplitLogits(logits.local.flatten(start_dim, end_dim), logits.lengths, logits.ranks)


def _cast(name: str) -> Callable[..., Any]:
    """Return a method that does to this rank's classes what the tensor method of that name does."""

    def cast(logits: SplitLogits, *args: Any, **kwargs: Any) -> Any:
        return SplitLogits(getattr(logits.local, name)(*args, **kwargs), logits.lengths, logits.ranks)

    return cast


def _entropy(
    logits: SplitLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """Do torch's `cross_entropy` of logits `[N, V]` and targets `[N]`; NotImplemented where it needs whole logits."""
    fits = logits.local.dim() == 2 and target.dim() == 1 and not target.is_floating_point()
    if not fits or label_smoothing or size_average is not None or reduce is not None:
        return NotImplemented
    return split_cross_entropy(logits, target, weight, ignore_index, reduction)


_LOOKS = {
    Tensor.shape.__get__,  # type: ignore[attr-defined]
    Tensor.ndim.__get__,  # type: ignore[attr-defined]
    Tensor.dtype.__get__,  # type: ignore[attr-defined]
    Tensor.device.__get__,
    Tensor.layout.__get__,  # type: ignore[attr-defined]
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
    Tensor.__len__,
    Tensor.is_floating_point,
    Tensor.is_complex,
    torch.is_floating_point,
    torch.is_complex,
    torch.numel,
}
_OWN: dict[Any, Callable[..., Any]] = {
    functional.cross_entropy: _entropy,
    Tensor.view: _reshaped,
    Tensor.reshape: _reshaped,
    torch.reshape: _reshaped,
    Tensor.flatten: _flattened,
    torch.flatten: _flattened,
    Tensor.float: _cast("float"),
    Tensor.double: _cast("double"),
    Tensor.detach: _cast("detach"),
    Tensor.contiguous: _cast("contiguous"),
    Tensor.requires_grad.__get__: lambda logits: logits.__dict__["local"].requires_grad,  # type: ignore[attr-defined]
}


# ------------------------------------------------------------------------------------------------------ cross entropy


class _RowLosses(torch.autograd.Function):
    """Minus the logarithm of each row's probability of its target; the ranks exchange a maximum and two sums a row."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, target: Tensor, start: int, ranks: Ranks) -> Tensor:
        """Return the losses `[N]`.

        Args:
            local: this rank's logits, `[N, v]`, at least float32.
            target: classes, `[N]`, counted over all ranks.
            start: this rank's first class.
            ranks: who shares the classes.
        """
        rows, classes = local.shape
        highest = local.max(dim=1).values if classes else local.new_full((rows,), float("-inf"))
        highest_of_all = ranks.collect(highest.unsqueeze(1), [1] * ranks.size)
        top = torch.cat(highest_of_all, dim=1).max(dim=1).values
        powers = (local - top.unsqueeze(1)).exp()
        own = (target >= start) & (target < start + classes)
        index = (target - start).masked_fill(~own, 0).unsqueeze(1)
        picked = local.gather(1, index).squeeze(1) if classes else local.new_zeros(rows)
        # Shifted as the powers are, so that a row's true logit and its sum travel at one scale.
        picked = torch.where(own, picked - top, picked.new_zeros(()))
        total, shifted = ranks.sum(torch.stack([powers.sum(dim=1), picked])).unbind()
        ctx.save_for_backward(powers / total.unsqueeze(1), index, own)
        return total.log() - shifted

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        """Return the gradient `[N, v]` of `local`: probability less one at the target, by the row's gradient `[N]`."""
        shares, index, own = ctx.saved_tensors
        change = shares * gradient.unsqueeze(1)
        if shares.shape[1]:
            change.scatter_add_(1, index, (-gradient * own).unsqueeze(1))
        return change, None, None, None


def split_cross_entropy(
    logits: SplitLogits, target: Tensor, weight: Tensor | None = None, ignore_index: int = -100, reduction: str = "mean"
) -> Tensor:
    """Return what torch's cross_entropy gives on the whole logits.

    Args:
        logits: `[N, V]`.
        target: class of each row, `[N]`.
        weight: of each class, whole, `[V]`.
        ignore_index: target of rows that do not count.
        reduction: "mean", "sum" or "none".

    Returns:
        A scalar, or `[N]` with "none", in the dtype of the logits; float32 for halves under autocast.

    Raises:
        IndexError: a target is outside the classes (on the CPU, where looking costs nothing).
        ValueError: the reduction is unknown.
    """
    counts = target != ignore_index
    safe = target.masked_fill(~counts, 0)
    if target.device.type == "cpu" and len(safe) and not 0 <= int(safe.min()) <= int(safe.max()) < logits.shape[-1]:
        raise IndexError(f"target out of bounds: {int(safe.min())} to {int(safe.max())} of {logits.shape[-1]} classes")
    local, dtype = logits.local, logits.local.dtype
    half = dtype in (torch.float16, torch.bfloat16)
    start = sum(logits.lengths[: logits.ranks.rank])
    losses = _RowLosses.apply(local.float() if half else local, safe, start, logits.ranks)  # type: ignore[no-untyped-call]
    weights = counts.to(losses.dtype) if weight is None else weight.to(losses.dtype)[safe] * counts
    losses = torch.where(counts, losses * weights, losses.new_zeros(()))
    if half and not torch.is_autocast_enabled(local.device.type):
        losses, weights = losses.to(dtype), weights.to(dtype)
    if reduction == "none":
        return losses
    if reduction not in ("mean", "sum"):
        raise ValueError(f"{reduction} is not a valid value for reduction")
    return losses.sum() / weights.sum() if reduction == "mean" else losses.sum()
