"""Batch statistics over the rows of all replicas, so that batch norm sees the global batch.

torch's SyncBatchNorm wants GPUs and NCCL or gloo, and takes its group when it is built. Here layers keep their class's
state and names, and only their forward changes. Replicas may have unlike numbers of rows, or none: means and squared
deviations of each are put together by the rule of Chan, Golub and LeVeque (1983), which loses no digits where a sum of
squares would.

Shapes: input [B, C, ...], C channels; R replicas. All arithmetic is float32 (float64 for float64 inputs).
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from guava_nb.errors import ConfigError, TrainingError

__all__ = ["SyncedNorms", "explaining_few_rows", "taking_one_row"]


class _SumOverGroup(torch.autograd.Function):
    """The sum over all ranks; so is its gradient, since every rank's loss depends on every rank's numbers."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Return the sum over all ranks, of the tensor's own shape."""
        ctx.group = group
        total = tensor.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Return the sum of all ranks' gradients, of the tensor's shape."""
        total = gradient.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _Synced(_BatchNorm):
    """What a batch norm becomes; `_group` and `_stand_in` are set from outside."""

    _group: dist.ProcessGroup
    _stand_in: bool

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalised input, `[B, C, ...]` in its own dtype; statistics are those of all replicas' rows."""
        if self.running_mean is not None and not self.training:
            return _BatchNorm.forward(self, input)
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        wide = input.double() if input.dtype == torch.float64 else input.float()
        count, mean, squares = self._statistics(wide)
        variance = squares / count
        if self.training and self.running_mean is not None and self.running_var is not None:
            self._move(mean.detach(), squares.detach() / (count - 1))
        shape = (1, -1, *[1] * (input.dim() - 2))
        normal = (wide - mean.reshape(shape)) * torch.rsqrt(variance + self.eps).reshape(shape)
        if self.affine:
            normal = normal * self.weight.reshape(shape) + self.bias.reshape(shape)
        return normal.to(input.dtype)

    def _statistics(self, x: Tensor) -> tuple[float, Tensor, Tensor]:
        """Return elements per channel, means and summed squared deviations, both `[C]`, over all replicas.

        Args:
            x: this replica's rows, `[B, C, ...]`; B may be 0.

        Raises:
            ValueError: in training all replicas together have one value per channel; in torch's words.
        """
        dims = [0, *range(2, x.dim())]
        count = x.numel() // x.shape[1]
        mean = x.sum(dims) / max(1, count)  # of no rows, which the layer gets where all are masked, 0 and not NaN
        shape = (1, -1, *[1] * (x.dim() - 2))
        squares = (x - mean.reshape(shape)).square().sum(dims)
        mine = torch.cat([mean, squares, mean.new_full((1,), float(count))])
        if self._stand_in:
            mine = mine * 0.0
        ranks, rank = dist.get_world_size(self._group), dist.get_rank(self._group)
        # Each rank fills a row of its own: one message instead of one for the means and one for the deviations from them.
        rows = nn.functional.pad(mine[None], (0, 0, rank, ranks - rank - 1))
        all_rows: Tensor = _SumOverGroup.apply(rows, self._group)  # type: ignore[no-untyped-call]
        means, deviations, counts = all_rows[:, : len(mean)], all_rows[:, len(mean) : -1], all_rows[:, -1:].detach()
        total = float(counts.sum())
        if total <= 1 and self.training:
            raise ValueError(f"expected more than 1 value per channel when training, got input size {list(x.shape)}")
        whole = (means * counts).sum(0) / total
        return total, whole, (deviations + counts * (means - whole).square()).sum(0)

    @torch.no_grad()
    def _move(self, mean: Tensor, variance: Tensor) -> None:
        """Move the running statistics as torch does: by momentum, or as the mean of all steps without one.

        Args:
            mean, variance: of all replicas' rows, `[C]`; the variance is the unbiased one.
        """
        assert self.running_mean is not None and self.running_var is not None
        factor = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            factor = 1.0 / float(self.num_batches_tracked) if factor is None else factor
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor or 0.0)
        self.running_var.lerp_(variance.to(self.running_var.dtype), factor or 0.0)


class SyncedNorms:
    """The batch norms of one module, made to share their statistics; the module is changed in place.

    Args:
        model: whole or split along other axes than the data.
        group: of the replicas.

    Raises:
        ConfigError: a batch norm has a forward of its own, which cannot be made to share.
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup) -> None:
        self._norms: list[_Synced] = []
        for name, module in model.named_modules():
            if not isinstance(module, _BatchNorm):
                continue
            if type(module).forward not in (_BatchNorm.forward, nn.SyncBatchNorm.forward):
                raise ConfigError(
                    f"sync_batchnorm cannot change {name!r}: {type(module).__name__} has a forward of its own; leave "
                    "sync_batchnorm off, or use a batch norm of torch there"
                )
            kind = type(module)
            module.__class__ = type(f"Synced{kind.__name__}", (_Synced, kind), {})
            assert isinstance(module, _Synced)
            module._group, module._stand_in = group, False
            self._norms.append(module)

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._norms)

    @contextmanager
    def standing_in(self) -> Iterator[None]:
        """What runs in the block counts nothing: its rows only keep the others from waiting."""
        for norm in self._norms:
            norm._stand_in = True
        try:
            yield
        finally:
            for norm in self._norms:
                norm._stand_in = False


@contextmanager
def taking_one_row(model: nn.Module) -> Iterator[None]:
    """Let batch norms take the one row of a stand-in, of which nothing counts: in training they want two values a channel.

    Those that share their statistics see the rows of all replicas, and stay as they are.
    """
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and not isinstance(m, _Synced)]
    training = [norm for norm in norms if norm.training]
    bare = [norm for norm in norms if norm.running_mean is None]  # these go by the batch in evaluation mode, too
    like = next(model.parameters(), torch.empty(0))
    for norm in training:
        norm.training = False
    for norm in bare:
        norm.running_mean = torch.zeros(norm.num_features, dtype=like.dtype, device=like.device)
        norm.running_var = torch.ones_like(norm.running_mean)
    try:
        yield
    finally:
        for norm in training:
            norm.training = True
        for norm in bare:
            norm.running_mean = norm.running_var = None


_SYNCED = "use sync_batchnorm where the mode has it (statistics over all workers' rows), "
_FEW = (
    "{}, and training needs 2: a worker's share of the batch, or a micro-batch, is that small, the last batch of an epoch above "
    "all; {}drop_last=True in the DataLoader, larger batches, or fewer workers or micro-batches"
)


def _too_few_rows(error: ValueError, models: Sequence[nn.Module]) -> TrainingError | None:
    """Return what to say instead where a norm of theirs got one value per channel; None: the error is another one."""
    if "more than 1 value per channel" not in str(error):
        return None
    named = [entry for model in models for entry in model.named_modules()]
    norms = {id(module): (name, module) for name, module in named if isinstance(module, _NormBase)}
    for frame, _ in traceback.walk_tb(error.__traceback__):
        name, norm = norms.get(id(frame.f_locals.get("self")), ("", None))
        # The functions of torch that raise know no layer; the frame of the layer that called them does.
        if norm is not None and "input" in frame.f_locals:
            size = list(frame.f_locals["input"].shape)
            what = f"{name!r} ({type(norm).__name__}) got one value per channel, of an input of {size}"
            return TrainingError(_FEW.format(what, "" if isinstance(norm, _Synced) else _SYNCED))
    # A function of torch without a layer, such as torch.nn.functional.batch_norm.
    return TrainingError(_FEW.format("a function that normalises over the batch got one value per channel", ""))


@contextmanager
def explaining_few_rows(*models: nn.Module) -> Iterator[None]:
    """Say which norm got too few rows, and what to do, where torch says neither.

    Raises:
        TrainingError: instead of torch's ValueError.
    """
    try:
        yield
    except ValueError as error:
        explained = _too_few_rows(error, models)
        if explained is None:
            raise
        raise explained from error
