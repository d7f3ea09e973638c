"""Steps in flight: turns loader batches into shards, keeps what may have to be sent again, sums what comes back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from guava_nb.data.feed import LoadedBatch
from guava_nb.data.split import RowSplitter, share_ranges
from guava_nb.data.tree import pack
from guava_nb.engine.step import ShardTask, StepMachine
from guava_nb.errors import ConfigError
from guava_nb.hub.reduction import BucketSum
from guava_nb.protocol.messages import Shard

__all__ = ["Flight", "plan_step"]

Buffers = Sequence[memoryview]


@dataclass(slots=True)
class Flight:
    """One step that has been issued and not yet committed.

    Attributes:
        members: ranks that take part: they get the means whether or not they have a shard.
        shards: each shard's message and payload, kept until the commit.
        batches: loader batches in this step.
    """

    machine: StepMachine
    epoch: int
    members: tuple[int, ...]
    shards: list[tuple[Shard, Buffers]]
    batches: int
    sums: dict[int, BucketSum] = field(default_factory=dict)

    def add(self, bucket: int, shard: int, tensor: torch.Tensor, present: bytes) -> None:
        """Add a contribution to its bucket."""
        if bucket not in self.sums:
            self.sums[bucket] = BucketSum(len(self.machine.tasks))
        self.sums[bucket].add(shard, tensor, present)

    def sample_ids(self) -> list[int]:
        """Ids of all samples of this step, in shard order."""
        return [i for task in self.machine.tasks for i in task.sample_ids]


def plan_step(
    run_id: str,
    generation: int,
    step: int,
    group: Sequence[LoadedBatch],
    team: Sequence[int],
    weights: Sequence[float],
    *,
    solo: bool,
    want_hash: bool,
    splitter: RowSplitter,
) -> tuple[list[ShardTask], list[tuple[Shard, Buffers]]]:
    """Share a group of batches among the team: the tasks, and each one's message with its payload.

    Workers whose share rounds to no sample get no shard: an empty shard would add nothing but a broken mean.

    Raises:
        ConfigError: a batch cannot be shared out, or the whole group has no samples.
    """
    pieces: list[list[Any]] = [[] for _ in team]
    ids: list[list[int]] = [[] for _ in team]
    rows = [0] * len(team)
    for batch in group:
        ranges = share_ranges(batch.rows, weights)
        kept = [(k, r) for k, r in enumerate(ranges) if r[1] > r[0]]
        parts = splitter.split(batch.batch, [r for _, r in kept], batch.rows)
        for (k, (first, last)), part in zip(kept, parts, strict=True):
            pieces[k].append(part)
            rows[k] += last - first
            if len(batch.sample_ids) == batch.rows:
                ids[k].extend(batch.sample_ids[first:last])
        if len(batch.sample_ids) != batch.rows and kept:
            # The collate function dropped or added rows: the ids belong to the batch as a whole.
            ids[kept[0][0]].extend(batch.sample_ids)
    busy = [k for k in range(len(team)) if rows[k]]
    if not busy:  # nobody would ever report on a step without shards
        raise ConfigError(
            f"batch {group[0].index} of the loader has no samples, so it has no mean to train on: leave such batches out"
        )
    tasks = [ShardTask(index, rows[k], team[k], tuple(ids[k])) for index, k in enumerate(busy)]
    messages: list[tuple[Shard, Buffers]] = []
    for index, k in enumerate(busy):
        tree, buffers = pack(pieces[k])
        span = (ids[k][0], ids[k][-1]) if ids[k] else None
        shard = Shard(
            run_id, generation, step, index, len(busy), rows[k], sum(rows), len(pieces[k]), tree, solo, want_hash, span
        )
        messages.append((shard, buffers))
    return tasks, messages
