"""Steps in flight: turns loader batches into shards, keeps what may have to be sent again, sums what comes back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace

from guava_nb.data.loader_feed import LoadedBatch
from guava_nb.data.rows import Rows
from guava_nb.data.split import RowSplitter, share_ranges
from guava_nb.errors import ConfigError
from guava_nb.hub.bucket_sum import BucketSum
from guava_nb.protocol.messages import BatchShard, Tree
from guava_nb.replica.buffer_merge import BufferMerge
from guava_nb.row_cache.policy import deal
from guava_nb.row_cache.writer import OutgoingBatch, RowSlice, RowWriter
from guava_nb.sync.parameter_hashes import OwnChanges
from guava_nb.sync.step_machine import ShardTask, StepMachine

__all__ = [
    "NO_BATCH",
    "PlannedShards",
    "Share",
    "StepHead",
    "StepInFlight",
    "add_to_shares",
    "deal_batches",
    "marks_for",
    "no_samples",
    "plan_step",
]

#: Stands in a record until its receiver is known.
NO_BATCH = Tree(b"")


#: Each shard's record, still without its batch, and what it holds.
PlannedShards = list[tuple[BatchShard, OutgoingBatch]]


@dataclass(slots=True)
class StepInFlight:
    """One step that has been issued and not yet committed.

    Attributes:
        members: ranks that take part: they get the sums whether or not they have a shard.
        shards: in summation order; kept until the commit, since they may have to be sent again.
        batches: loader batches in this step.
        messages: of buckets whose messages go on to the others as they came: the sender, its presence bits and the message, by
            shard.
        senders: of buckets of which a message leaves something out: by shard the worker whose message counts.
        changes: what the workers' own code changed of the parameters.
        square: squared norm of the summed gradients so far; None: not known.
        frozen: by stage, the first worker that told which parameters take no gradient any more, and these.
    """

    machine: StepMachine
    epoch: int
    members: tuple[int, ...]
    shards: PlannedShards
    batches: int
    sums: dict[int, BucketSum | BufferMerge] = field(default_factory=dict)
    messages: dict[int, dict[int, tuple[int, bytes, memoryview]]] = field(default_factory=dict)
    senders: dict[int, dict[int, int]] = field(default_factory=dict)
    changes: OwnChanges = field(default_factory=OwnChanges)
    frozen: dict[str, tuple[int, frozenset[str]]] = field(default_factory=dict)
    square: float | None = None

    def add(self, bucket: int, shard: int, tensor: torch.Tensor, present: bytes, of_senders: bool = False) -> None:
        """Add a contribution to its bucket.

        Args:
            bucket: its number.
            shard: of the step.
            tensor: `[numel]`, dense or sparse; must not be used by the caller afterwards.
            present: presence bits.
            of_senders: as of `BucketSum`.
        """
        if bucket not in self.sums:
            self.sums[bucket] = BucketSum(len(self.machine.tasks), of_senders)
        self.sums[bucket].add(shard, tensor, present)

    def void(self) -> dict[int, tuple[tuple[int, int], ...]]:
        """Return by worker the bucket and the shard of each message that it may have sent and that does not count."""
        found: dict[int, tuple[tuple[int, int], ...]] = {}
        for bucket, senders in sorted(self.senders.items()):
            for shard, sender in sorted(senders.items()):
                task = self.machine.tasks[shard]
                for rank in {task.owner, *task.earlier} - {sender}:
                    found[rank] = (*found.get(rank, ()), (bucket, shard))
        return found

    def sample_ids(self) -> list[int]:
        """Ids of all samples of this step, in shard order."""
        return [i for task in self.machine.tasks for i in task.sample_ids]


@dataclass(frozen=True, slots=True)
class StepHead:
    """Which step it is, before its shards are known.

    Attributes:
        run_id: of the run.
        generation: the membership in which this attempt begins.
        step: number of the optimizer step.
        want_hash: workers report a hash of their parameters after it.
        solo: of the only worker, or of a group that votes: see `BatchShard`.
        batches_per_step: in a round of local steps the loader batches of each; 0: all batches are one step.
        deals: a round's steps are cut into local batches of one size, of which a faster worker takes more.
        buffers: as of `BatchShard`.
    """

    run_id: str
    generation: int
    step: int
    want_hash: bool = False
    solo: bool = False
    batches_per_step: int = 0
    deals: bool = False
    buffers: str = ""

    def num_steps(self, num_batches: int) -> int:
        """Return how many optimizer steps these batches are."""
        return -(-num_batches // self.batches_per_step) if self.batches_per_step else 1

    def shard(self, task: ShardTask, global_rows: int, source: int = 0) -> BatchShard:
        """Return a shard's record, still without its batch.

        Args:
            task: whose it is.
            global_rows: samples of the whole step.
            source: number of the loader batch that it is of.
        """
        return BatchShard(
            run_id=self.run_id, generation=self.generation, step=self.step, shard=task.index, rows=task.rows,
            global_rows=global_rows, batch=NO_BATCH, solo=self.solo, want_hash=self.want_hash, source=source,
            buffers=self.buffers,
        )  # fmt: skip


@dataclass(slots=True)
class Share:
    """What one worker, or one replica of a group, does of a step: pieces of loader batches, their numbers, rows, and all ids."""

    pieces: list[Any] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)


def add_to_shares(
    shares: Sequence[Share],
    batch: LoadedBatch,
    pieces: Sequence[tuple[int, Any, Sequence[int]]],
    owners: Sequence[int] | None = None,
    number: int = 0,
) -> None:
    """Add pieces of a loader batch to the shares.

    Args:
        shares: what is added to.
        batch: of which the pieces are.
        pieces: each with its place, content and rows.
        owners: whose share a place goes to; None: each place is a share.
        number: of the first place.
    """
    has_ids = len(batch.sample_ids) == batch.rows
    for place, piece, rows in pieces:
        share = shares[place if owners is None else owners[place]]
        share.pieces.append(piece)
        share.numbers.append(number if owners is None else number + place)
        share.rows.append(len(rows))
        if has_ids:
            share.ids.extend(batch.sample_ids[i] for i in rows)
    if pieces and not has_ids:
        # The collate function dropped or added rows: the ids belong to the batch as a whole.
        first = pieces[0][0]
        shares[first if owners is None else owners[first]].ids.extend(batch.sample_ids)


def deal_batches(weights: Sequence[float], num_steps: int) -> list[tuple[int, ...]]:
    """Deal the local batches of a round, as many in each step as there are workers, in proportion to the weights.

    Each worker gets one at least, and its batches lie as evenly over the steps as they can, because the schedule moves with
    these. Equal weights give each worker one in each step.

    Returns:
        For each step the place of the worker that takes each of its local batches.
    """
    count = len(weights) * num_steps
    total = sum(weights)
    parts = np.array([max(weight / total, 1 / count) for weight in weights])
    parts /= sum(parts)
    # Each local batch goes to the worker that is furthest behind its part so far.
    taken = np.zeros(len(weights))
    owners = []
    for number in range(1, count + 1):
        place = int((parts * number - taken).argmax())
        taken[place] += 1
        owners.append(place)
    return [tuple(owners[at : at + len(weights)]) for at in range(0, count, len(weights))]


def plan_step(
    head: StepHead,
    batches: Sequence[LoadedBatch],
    team: Sequence[int],
    weights: Sequence[float],
    splitter: RowSplitter,
    writer: RowWriter,
) -> tuple[list[ShardTask], PlannedShards]:
    """Share batches among the team: the tasks, and each one's record with what it holds.

    Workers whose share rounds to no sample get no shard: an empty shard would add nothing but a broken mean. Where workers
    keep rows, a share is still of the same size, but made of rows that its worker holds as far as possible.

    Args:
        head: of the step.
        batches: of the loader.
        team: ranks that take part.
        weights: of each of the team: in proportion to these it gets samples.
        splitter: cuts the batches.
        writer: knows which worker holds which rows.

    Raises:
        ConfigError: a batch cannot be shared out, or all of them have no samples.
    """
    deals = head.deals and all(weight > 0 for weight in weights)
    shares, each = [Share() for _ in team], len(team) if deals else 1
    dealt = deal_batches(weights, head.num_steps(len(batches))) if deals else []
    for index, batch in enumerate(batches):
        step = index // (head.batches_per_step or len(batches))
        if dealt:
            owners = [team[place] for place in dealt[step]]
            pieces = _pieces_of(batch, owners, [1.0] * each, splitter, writer)
            add_to_shares(shares, batch, pieces, dealt[step], step * each)
        else:
            add_to_shares(shares, batch, _pieces_of(batch, team, weights, splitter, writer), number=step)
    busy = [place for place, share in enumerate(shares) if share.pieces]
    if not busy:  # a step without shards would never be reported
        raise no_samples(batches)
    global_rows = sum(sum(share.rows) for share in shares)
    tasks: list[ShardTask] = []
    shards: PlannedShards = []
    for index, place in enumerate(busy):
        share = shares[place]
        tasks.append(ShardTask(index, sum(share.rows), team[place], tuple(share.ids)))
        shard = head.shard(tasks[-1], global_rows, batches[0].source)
        several = tuple(share.rows) if len(share.rows) > 1 else ()
        axes = () if batches[0].source else marks_for(splitter, share.pieces, share.rows)
        shard = replace(shard, part_rows=several, axes=axes, num_steps=head.num_steps(len(batches)))
        if head.batches_per_step:
            shard = replace(shard, part_steps=tuple(share.numbers), local_batches=each)
        shards.append((shard, OutgoingBatch(share.pieces)))
    return tasks, shards


def marks_for(splitter: RowSplitter, pieces: Sequence[Any], rows: Sequence[int]) -> tuple[bytes, ...]:
    """Return how a worker may cut pieces with these samples further; () where it must not.

    Args:
        splitter: that cut the pieces.
        pieces: of one shard.
        rows: samples of each.
    """
    marks = tuple(
        piece.rows.marks if isinstance(piece, RowSlice) else splitter.marks(piece, count)
        for piece, count in zip(pieces, rows, strict=True)
    )
    return marks if all(marks) else ()


def no_samples(batches: Sequence[LoadedBatch]) -> ConfigError:
    """Return the error on batches of an optimizer step that have no sample."""
    return ConfigError(
        f"batch {batches[0].index} of the loader has no samples, so it has no mean to train on: leave such batches out"
    )


def _pieces_of(
    batch: LoadedBatch, team: Sequence[int], weights: Sequence[float], splitter: RowSplitter, writer: RowWriter
) -> list[tuple[int, Any, Sequence[int]]]:
    """Share one batch: place in the team, part, and its rows, of every share that is not empty."""
    ranges = share_ranges(batch.rows, weights)
    if not batch.source and splitter.problem and sum(last > first for first, last in ranges) > 1:
        raise ConfigError(splitter.problem)
    apart = batch.batch if batch.source else writer.apart(batch.batch, batch.rows, splitter, batch.sample_ids)
    if isinstance(apart, Rows):
        dealt = deal(writer.holders(apart, team), [last - first for first, last in ranges])
        return [(k, RowSlice(apart, rows), rows) for k, rows in enumerate(dealt) if rows]
    kept = [(k, r) for k, r in enumerate(ranges) if r[1] > r[0]]  # a share that rounds to no sample gets no shard
    cutter = RowSplitter() if batch.source else splitter  # ids are cut like any tensor
    parts = cutter.split(batch.batch, [r for _, r in kept], batch.rows)
    return [(k, part, range(*r)) for (k, r), part in zip(kept, parts, strict=True)]
