"""Sums of gradient buckets, in shard order.

Floating-point addition is not associative: adding in the order of arrival would give other bits in every run. So a
contribution that comes early waits until all shards before it have been added. Knows tensors; knows nothing of sessions.

Shapes: a bucket is flat, [N], and so is each contribution; a sparse one is a COO tensor [N] whose places are ascending.
"""

from __future__ import annotations

import numpy as np
import torch

from guava_nb.errors import TrainingError

__all__ = ["BucketSum", "is_finite", "square_sum"]


#: Added by NumPy: torch's operators wake a thread for every core, which then spin for longer than a bucket's addition takes.
#: On 16 cores that cost ten times the processor time, and the cores that the sessions' encryption needs.
_NUMPY = frozenset({torch.float32, torch.float64, torch.complex64, torch.complex128})
#: Elements that are squared and added in their own type; beyond, float64.
_ROW = 4096


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether every element is finite; any shape, dense or sparse."""
    if tensor.is_sparse:
        tensor = tensor.values()
    if tensor.numel() == 0 or not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    array = _real_array(tensor)
    if array is None:
        return bool(torch.isfinite(tensor).all())
    with np.errstate(invalid="ignore"):
        return bool(np.isfinite(array.max()) and np.isfinite(array.min()))  # both are NaN where any element is


def square_sum(tensor: torch.Tensor) -> float:
    """Return the sum of the squares of all elements' sizes, as Python's float; any dense shape."""
    array = _real_array(tensor)
    if array is None:
        return float(torch.linalg.vector_norm(tensor)) ** 2
    whole = array.size - array.size % _ROW
    rows, rest = array[:whole].reshape(-1, _ROW), array[whole:]
    with np.errstate(over="ignore", invalid="ignore"):
        return float(np.einsum("ij,ij->i", rows, rows).sum(dtype=np.float64) + np.einsum("i,i->", rest, rest))


def _real_array(tensor: torch.Tensor) -> np.ndarray | None:
    """Return the elements as a row of real numbers, `[numel]` (complex ones `[2 numel]`), in the tensor's own memory.

    None where NumPy has no such type or memory.
    """
    if tensor.dtype not in _NUMPY or tensor.is_sparse or tensor.device.type != "cpu" or not tensor.is_contiguous():
        return None
    flat = tensor.detach().reshape(-1)
    return (torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat).numpy()


class BucketSum:
    """One bucket of one step: takes each shard's contribution once, adds them in shard order.

    The first contribution's memory becomes the accumulator, so nothing is copied. Half-precision types arrive as
    float32 (see `guava_nb.replica.buckets`); float64 stays float64. A contribution may be a sparse tensor.
    """

    __slots__ = ("_next", "_of_senders", "_present", "_senders", "_total", "_waiting", "num_shards")

    def __init__(self, num_shards: int, of_senders: bool = False) -> None:
        """Expect one contribution from each of `num_shards` shards.

        `of_senders`: the result is of each element the mean of the contributions in which it is not 0.
        """
        self.num_shards, self._of_senders = num_shards, of_senders
        self._senders: torch.Tensor | None = None
        self._next = 0
        self._total: torch.Tensor | None = None
        self._present = 0
        self._waiting: dict[int, torch.Tensor] = {}

    def add(self, shard: int, tensor: torch.Tensor, present: bytes) -> None:
        """Take one shard's contribution, `[N]`.

        Args:
            shard: its number, from 0.
            tensor: must not be used by the caller afterwards.
            present: which parameters it has, one bit each.

        Raises:
            TrainingError: an earlier shard sent another number of elements.
        """
        self._present |= int.from_bytes(present, "little")
        self._waiting[shard] = tensor
        while self._next in self._waiting:
            self._accumulate(self._waiting.pop(self._next))
            self._next += 1

    def _accumulate(self, tensor: torch.Tensor) -> None:
        """Add the contribution `[N]` of the next shard in order."""
        if self._of_senders:
            senders = tensor.bool().to(torch.int32)  # 1 where it is not 0
            self._senders = senders.to_dense() if self._senders is None else self._senders.add_(senders)
        if self._total is None:
            self._total = tensor.to_dense()
        elif self._total.shape != tensor.shape:
            raise TrainingError(
                f"shards of one step sent {self._total.numel()} and {tensor.numel()} elements for the same bucket: a buffer of "
                "the model changed in the forward of some shards only; change it in every forward, or outside of it"
            )
        elif tensor.is_sparse:
            self._total.numpy()[tensor.indices()[0].numpy()] += tensor.values().numpy()  # each place stands there once
        elif (total := _real_array(self._total)) is not None and (part := _real_array(tensor)) is not None:
            with np.errstate(over="ignore", invalid="ignore"):
                np.add(total, part, out=total)
        else:
            self._total.add_(tensor)

    @property
    def complete(self) -> bool:
        """Whether every shard has been added."""
        return self._next == self.num_shards

    def result(self, present_bytes: int) -> tuple[bytes, torch.Tensor]:
        """Return the union of the presence bits, `present_bytes` long, and the sum or mean, `[N]`; only when complete.

        A sum is the accumulator's own memory, which is the first shard's.
        """
        assert self._total is not None and self.complete, "asked for the sum of an incomplete bucket"
        mean = self._total if self._senders is None else self._total / self._senders.clamp(min=1)
        return self._present.to_bytes(present_bytes, "little"), mean
