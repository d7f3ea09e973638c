"""Steps in flight: turns loader batches into shards, keeps what may have to be sent again, sums what comes back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from guava_nb.data.loader_feed import LoadedBatch
from guava_nb.data.rows import Rows
from guava_nb.data.split import RowSplitter, share_ranges
from guava_nb.errors import ConfigError
from guava_nb.hub.bucket_sum import BucketSum
from guava_nb.protocol.messages import Shard, Tree
from guava_nb.row_cache.policy import deal
from guava_nb.row_cache.writer import OutgoingBatch, RowSlice, RowWriter
from guava_nb.sync.step_machine import ShardTask, StepMachine

__all__ = ["NO_BATCH", "StepInFlight", "plan_step"]

#: Stands in a record until it is known who gets it.
NO_BATCH = Tree(b"")


@dataclass(slots=True)
class StepInFlight:
    """One step that has been issued and not yet committed.

    Attributes:
        members: ranks that take part: they get the means whether or not they have a shard.
        shards: each shard's record, still without its batch, and what it holds; kept until the commit.
        batches: loader batches in this step.
    """

    machine: StepMachine
    epoch: int
    members: tuple[int, ...]
    shards: list[tuple[Shard, OutgoingBatch]]
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
    writer: RowWriter,
) -> tuple[list[ShardTask], list[tuple[Shard, OutgoingBatch]]]:
    """Share a group of batches among the team: the tasks, and each one's record with what it holds.

    Workers whose share rounds to no sample get no shard: an empty shard would add nothing but a broken mean. Where workers
    keep rows, a share is still of the same size, but made of rows that its worker holds as far as possible.

    Raises:
        ConfigError: a batch cannot be shared out, or the whole group has no samples.
    """
    pieces: list[list[Any]] = [[] for _ in team]
    ids: list[list[int]] = [[] for _ in team]
    rows = [0] * len(team)
    for batch in group:
        shares = _share(batch, team, weights, splitter, writer)
        for k, part, indices in shares:
            pieces[k].append(part)
            rows[k] += len(indices)
            if len(batch.sample_ids) == batch.rows:
                ids[k].extend(batch.sample_ids[i] for i in indices)
        if len(batch.sample_ids) != batch.rows and shares:
            # The collate function dropped or added rows: the ids belong to the batch as a whole.
            ids[shares[0][0]].extend(batch.sample_ids)
    busy = [k for k in range(len(team)) if rows[k]]
    if not busy:  # nobody would ever report on a step without shards
        raise ConfigError(
            f"batch {group[0].index} of the loader has no samples, so it has no mean to train on: leave such batches out"
        )
    tasks = [ShardTask(index, rows[k], team[k], tuple(ids[k])) for index, k in enumerate(busy)]
    messages: list[tuple[Shard, OutgoingBatch]] = []
    for index, k in enumerate(busy):
        shard = Shard(
            run_id=run_id,
            generation=generation,
            step=step,
            shard=index,
            rows=rows[k],
            global_rows=sum(rows),
            batch=NO_BATCH,
            solo=solo,
            want_hash=want_hash,
            source=group[0].source,
        )
        messages.append((shard, OutgoingBatch(pieces[k])))
    return tasks, messages


def _share(
    batch: LoadedBatch, team: Sequence[int], weights: Sequence[float], splitter: RowSplitter, writer: RowWriter
) -> list[tuple[int, Any, Sequence[int]]]:
    """Share one batch: place in the team, part, and its rows, of every share that is not empty."""
    ranges = share_ranges(batch.rows, weights)
    apart = batch.batch if batch.source else writer.apart(batch.batch, batch.rows, splitter, batch.sample_ids)
    if isinstance(apart, Rows):
        dealt = deal(writer.holders(apart, team), [last - first for first, last in ranges])
        return [(k, RowSlice(apart, rows), rows) for k, rows in enumerate(dealt) if rows]
    kept = [(k, r) for k, r in enumerate(ranges) if r[1] > r[0]]
    cutter = RowSplitter() if batch.source else splitter  # ids are cut like any tensor
    parts = cutter.split(batch.batch, [r for _, r in kept], batch.rows)
    return [(k, part, range(*r)) for (k, r), part in zip(kept, parts, strict=True)]
