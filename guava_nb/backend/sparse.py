"""all_reduce of sparse tensors: everyone's indices and values, everywhere, then a local sum.

The numbers of entries differ between ranks and have to be known before anything can be received, so the call itself
waits; the work it returns is done.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C._distributed_c10d import Work

from guava_nb.backend.work import JointWork
from guava_nb.errors import CollectiveError

__all__ = ["all_reduce_sparse"]

#: Starts an all-gather: lists of outputs, inputs.
AllGather = Callable[[list[list[torch.Tensor]], list[torch.Tensor]], Work]


class _Done(JointWork):
    """Work that is over, with its outputs."""

    def __init__(self, outputs: list[torch.Tensor]) -> None:
        super().__init__(())
        self._outputs = outputs

    def result(self) -> list[torch.Tensor]:
        """The outputs."""
        return self._outputs

    def get_future(self) -> torch.futures.Future[Any]:
        """A future that is done."""
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._outputs)
        return future


def all_reduce_sparse(allgather: AllGather, tensor: torch.Tensor, reduction: str, size: int) -> Work:
    """Sum a sparse COO tensor over all ranks, in place.

    Args:
        allgather: of the group.
        tensor: of this rank; the sum afterwards.
        reduction: its name; only "sum" can be made.
        size: ranks of the group.

    Raises:
        CollectiveError: another reduction or layout, or shapes that differ between ranks.
    """
    if tensor.layout is not torch.sparse_coo or reduction != "sum":
        raise CollectiveError(f"all_reduce of a {tensor.layout} tensor: only sums of COO tensors can be made")
    own = tensor.detach().coalesce()
    shape = torch.tensor([own.sparse_dim(), *own.shape], dtype=torch.int64)
    shapes = _gather(allgather, shape, [shape.numel()] * size)
    if any(not torch.equal(other, shape) for other in shapes):
        raise CollectiveError(f"all_reduce: sparse tensors differ between ranks: {[s.tolist() for s in shapes]}")
    count = torch.tensor([own.indices().size(1)], dtype=torch.int64)
    counts = [int(one) for one in _gather(allgather, count, [1] * size)]
    entry = own.values().new_empty((1, *own.values().shape[1:])).numel()
    indices = _gather(allgather, own.indices().cpu().reshape(-1), [own.sparse_dim() * n for n in counts])
    values = _gather(allgather, own.values().cpu().reshape(-1), [entry * n for n in counts])
    dims = own.values().shape[1:]
    total = torch.sparse_coo_tensor(
        torch.cat([part.reshape(own.sparse_dim(), -1) for part in indices], dim=1),
        torch.cat([part.reshape(n, *dims) for part, n in zip(values, counts, strict=True)]),
        own.shape,
    ).coalesce()
    with torch.no_grad():
        tensor.copy_(total.to(tensor.device))
    return _Done([tensor])


def _gather(allgather: AllGather, tensor: torch.Tensor, counts: list[int]) -> list[torch.Tensor]:
    outputs = [tensor.new_empty(count) for count in counts]
    allgather([outputs], [tensor]).wait()
    return outputs
