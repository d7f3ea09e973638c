"""What became of a model's buffers in one step, merged from what the shards did to them.

Knows changes and their shards' samples; `guava_nb.parallel.replicas.buffer_policy` has the rules.

Shapes: a shard's contribution is flat, [N]: the changes of the buffers that its presence bits name, one after another, each as
`buffer_policy.change_of` gives it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from guava_nb.errors import TrainingError
from guava_nb.parallel.replicas.buffer_policy import ChangeFacts, combined, facts_of, policy_of, way_of
from guava_nb.replica.buckets import Bucket, pack_present, present_at

__all__ = ["BufferMerge", "changes_in"]


def changes_in(bucket: Bucket, tensor: Tensor, present: bytes) -> dict[int, Tensor]:
    """Cut one shard's flat tensor, `[N]`, into its changes, views, by their places in the bucket.

    Args:
        bucket: the buffers.
        tensor: `[N]`.
        present: which of them changed, one bit each.

    Raises:
        TrainingError: it is not as large as its presence bits say.
    """
    chosen = [i for i, bit in enumerate(present_at(present, len(bucket.names))) if bit]
    sizes = [bucket.sizes[i] for i in chosen]
    if sum(sizes) != tensor.numel():
        names = ", ".join(bucket.names[i] for i in chosen)
        raise TrainingError(f"a worker sent {tensor.numel()} elements for the buffers {names}, which have {sum(sizes)}")
    return dict(zip(chosen, tensor.split(sizes), strict=True))  # type: ignore[no-untyped-call]


class BufferMerge:
    """Takes each shard's changes once, and gives one change for each buffer that moved anywhere.

    The same face as `guava_nb.hub.bucket_sum.BucketSum`.

    Attributes:
        unlike: after `result`, names of buffers that the shards changed differently, with no rule or choice for it.
    """

    def __init__(
        self,
        bucket: Bucket,
        rows: Sequence[int],
        policies: str,
        counted: dict[str, bool],
        forwards: Sequence[int] = (),
    ) -> None:
        """Expect one contribution from each shard.

        Args:
            bucket: the buffers.
            rows: samples of each shard.
            policies: the run's option.
            counted: which buffers count samples, as `way_of` found so far; added to.
            forwards: of each shard; () for one each.
        """
        self._bucket, self._rows, self._policies, self._counted = bucket, rows, policies, counted
        self._forwards = forwards or [1] * len(rows)
        self._changes: dict[int, dict[int, Tensor]] = {}
        self.unlike: tuple[str, ...] = ()

    def add(self, shard: int, tensor: Tensor, present: bytes) -> None:
        """Take one shard's changes, `[N]`.

        Args:
            shard: its number, from 0.
            tensor: must not be used by the caller afterwards.
            present: which buffers changed, one bit each.

        Raises:
            TrainingError: it is not as large as its presence bits say.
        """
        self._changes[shard] = changes_in(self._bucket, tensor, present)

    @property
    def complete(self) -> bool:
        """Whether every shard has been added."""
        return len(self._changes) == len(self._rows)

    def result(self, present_bytes: int) -> tuple[bytes, Tensor]:
        """Return which buffers moved in any shard, one bit each, and their changes, `[N]`; only when complete."""
        assert self.complete, "asked for the changes of an incomplete step"
        shards = [shard for shard, rows in enumerate(self._rows) if rows]
        moved = sorted(set().union(*(self._changes[shard] for shard in shards)))
        self.unlike = ()
        parts = [self._merged(i, shards) for i in moved]
        flat = torch.cat(parts) if parts else torch.empty(0, dtype=self._bucket.dtype)
        return pack_present([i in moved for i in range(len(self._bucket.names))]), flat

    def _merged(self, index: int, shards: Sequence[int]) -> Tensor:
        """Return one change of a buffer, flat, of those of the shards that had samples."""
        nothing = torch.zeros(self._bucket.sizes[index], dtype=self._bucket.dtype)
        changes = [self._changes[shard].get(index, nothing) for shard in shards]
        rows, forwards = [self._rows[shard] for shard in shards], [self._forwards[shard] for shard in shards]
        name = self._bucket.names[index]

        def alike(places: Sequence[int]) -> bool:
            return all(torch.equal(changes[places[0]], changes[place]) for place in places[1:])

        way, is_told = way_of(
            name, policy_of(self._policies, name), index in self._bucket.whole_numbers, alike,
            [ChangeFacts.of(facts_of(*one).tolist()) for one in zip(changes, rows, forwards, strict=True)], rows,
            self._counted,
        )  # fmt: skip
        if is_told:
            self.unlike = (*self.unlike, name)
        return combined(way, changes, rows, forwards)
