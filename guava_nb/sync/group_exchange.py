"""The `group` exchange: every rank of a process group gets its share, the group sums by itself, the hub takes the vote.

The same face as `StarExchange`. A step is committed when all ranks have reported; a lost rank ends the step for everyone.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import Any

from guava_nb.cluster.job import Job
from guava_nb.config.mesh import Mesh
from guava_nb.data.loader_feed import LoadedBatch
from guava_nb.data.split import RowSplitter, share_ranges
from guava_nb.errors import ConfigError, NotFinite
from guava_nb.protocol.messages import CommitStep, Committed, Message, Ready, Shard
from guava_nb.replica.preprocess import pair_of
from guava_nb.row_cache.writer import OutgoingBatch, RowWriter, taken_apart
from guava_nb.sync.exchange import OnApplied, OnCommit, StepExchange
from guava_nb.sync.send_credit import Credit
from guava_nb.sync.sharded_replica_set import ShardedReplicaSet
from guava_nb.sync.step_in_flight import NO_BATCH, StepInFlight
from guava_nb.sync.step_machine import Decided, Halt, ShardTask, StepMachine

__all__ = ["GroupExchange", "parts_for", "shares_of", "tasks_of"]


class GroupExchange(StepExchange):
    """Parts of one model: every rank gets its share, they sum among themselves and vote here. See `StepExchange`."""

    def __init__(
        self, job: Job, replica_set: ShardedReplicaSet, on_commit: OnCommit, on_applied: OnApplied, credit: Credit
    ) -> None:
        """Handle the exchange's messages in that job."""
        super().__init__(job, replica_set, on_commit, on_applied, credit)
        self._replica_set = replica_set
        self._looked = False
        job.on(Ready, self._on_ready)
        job.on(Committed, self._on_committed)

    def issue(
        self,
        epoch: int,
        group: Sequence[LoadedBatch],
        team: tuple[int, ...],
        weights: Sequence[float],
        splitter: RowSplitter,
    ) -> StepInFlight:
        """Share a group of batches among the replicas and send every rank its part.

        Args:
            team: all members, in any order.
            weights: theirs; a replica takes the share of its first rank.
        """
        replica_set, mesh, spec = self._replica_set, self._replica_set.mesh, self._replica_set.spec
        weights = [weights[team.index(rank)] for rank in replica_set.team]
        team = replica_set.team
        step = self.next_step
        every = spec.hash_every_steps
        want_hash = bool(every) and (step + 1) % every == 0
        shares = shares_of(group, mesh, weights[:: mesh.stages * mesh.tensor], splitter)
        self._tell_few_rows(max(rows for share in shares for rows in share.rows))
        treated = spec.wants_whole_batches
        tasks, shards = tasks_of(
            replica_set.run_id,
            replica_set.generation,
            step,
            mesh,
            team,
            shares,
            want_hash,
            treated,
            self._writer,
            splitter,
        )
        machine = StepMachine(
            step, replica_set.generation, tasks, (), spec.precision == "fp16", max_grad_norm=spec.max_grad_norm
        )
        in_flight = self.in_flight[step] = StepInFlight(machine, epoch, team, shards, len(group))
        self.next_step += 1
        for task in tasks:
            self._send_shard(in_flight, task.index, task.owner)
        return in_flight

    def _tell_few_rows(self, most: int) -> None:
        """Say once that batches are smaller than the pipeline's parts; a last batch of an epoch is no reason to."""
        assert self._replica_set.spec.parallel is not None
        wanted = self._replica_set.spec.parallel.micro_batches
        if not self._looked and most < wanted:
            self._job.cluster.notice(
                f"micro_batches (--micro-batches) is {wanted}, but a pipeline gets {most} rows of a batch, so it cuts them into "
                f"{most} parts: larger batches would keep its stages busier, fewer micro-batches change nothing"
            )
        self._looked = True

    def parts(self, weights: Sequence[float]) -> list[float]:
        """Return which part of a step's bytes each member of a team with these weights is sent."""
        mesh = self._replica_set.mesh
        ranks = mesh.stages * mesh.tensor  # that share one replica's part: counted as if each got all of it
        total = sum(weights[::ranks]) or 1.0
        return [weights[rank - rank % ranks] / total for rank in range(len(weights))]

    def adopt(self, available: Collection[int]) -> None:
        """Nothing: what a lost rank had to do nobody else can do."""

    def give_up(self, but_solo: bool = False) -> None:
        """Forget all steps in flight."""
        self.in_flight = {}
        self.next_step = self._replica_set.step + 1
        self._credit.clear()

    # -------------------------------------------------------------------------------------------------------- messages

    def _on_ready(self, rank: int, message: Message, payload: memoryview) -> None:
        assert isinstance(message, Ready)
        message = self._sound(rank, message)
        self._note_times(rank, message)
        in_flight = self.in_flight.get(message.step)
        if message.run_id != self._replica_set.run_id or in_flight is None:
            return
        self._note_work(rank, sum(in_flight.shards[message.shard][0].part_rows), message.tokens)
        self._credit.worked(message.step, message.shard)
        for instruction in in_flight.machine.on_ready(rank, message):
            match instruction:
                case Halt():
                    raise self._not_finite(in_flight, rank, message.culprit)
                case Decided(commit, loss_sum, count):
                    machine = in_flight.machine
                    order = CommitStep(self._replica_set.run_id, machine.generation, machine.step, commit)
                    self._job.cluster.send_all(in_flight.members, order)
                    del self.in_flight[machine.step]
                    self._replica_set.step = machine.step
                    self._credit.committed(time.monotonic())
                    self._on_commit(in_flight, commit, loss_sum, count)

    def _on_committed(self, rank: int, message: Message, payload: memoryview) -> None:
        assert isinstance(message, Committed)
        if message.run_id == self._replica_set.run_id:
            self._on_applied(rank, message)

    def _not_finite(self, in_flight: StepInFlight, rank: int, culprit: str) -> NotFinite:
        ids = in_flight.sample_ids()
        where = f"the gradient of {culprit}" if culprit else "the loss"
        span = f"samples {ids[0]} to {ids[-1]}" if ids else "its samples"
        return NotFinite(
            f"NaN or Inf in {where} on {self._job.cluster.name(rank)} at step {in_flight.machine.step + 1} ({span}, "
            f"{in_flight.machine.rows} rows). The step was not applied anywhere. Look at these samples, lower the learning rate, "
            "or clip with max_grad_norm"
        )


# ----------------------------------------------------------------------------------------------------------- who gets what


class _Share:
    """What one replica does of a step: the pieces of every loader batch, their rows and ids."""

    def __init__(self) -> None:
        self.pieces: list[Any] = []
        self.rows: list[int] = []
        self.ids: list[int] = []


def shares_of(
    group: Sequence[LoadedBatch], mesh: Mesh, weights: Sequence[float], splitter: RowSplitter
) -> list[_Share]:
    """Share loader batches among the replicas of a mesh.

    A replica whose share rounds to no sample gets one row as a stand-in, marked with 0 rows: it has to take part in the
    group's operations all the same.

    Raises:
        ConfigError: a batch cannot be shared out, or the whole group has no samples.
    """
    shares = [_Share() for _ in range(mesh.data)]
    for batch in (batch for batch in group if batch.rows):
        ranges = share_ranges(batch.rows, weights)
        taken = [r if r[1] > r[0] else (0, 1) for r in ranges]
        parts = splitter.split(batch.batch, taken, batch.rows)
        for share, (first, last), part in zip(shares, ranges, parts, strict=True):
            share.pieces.append(part)
            share.rows.append(last - first)
            if len(batch.sample_ids) == batch.rows:
                share.ids.extend(batch.sample_ids[first:last])
        if len(batch.sample_ids) != batch.rows:
            # The collate function dropped or added rows: the ids belong to the batch as a whole.
            shares[0].ids.extend(batch.sample_ids)
    if not any(sum(share.rows) for share in shares):
        raise ConfigError(
            f"batch {group[0].index} of the loader has no samples, so it has no mean to train on: leave such batches out"
        )
    return shares


def parts_for(mesh: Mesh, stage: int, pieces: Sequence[Any], treated: bool = False) -> list[Any]:
    """Return what a stage needs of a replica's pieces: all without stages, else inputs first, targets last.

    Args:
        treated: a function of the user's shall see whole batches there, so both ends get all and the stages between nothing.

    Raises:
        ConfigError: a pipeline's batch is not of the form (inputs, targets).
    """
    if mesh.stages == 1:
        return list(pieces)
    if treated:
        return [piece if stage in (0, mesh.stages - 1) else None for piece in pieces]
    pairs = [pair_of(piece) for piece in pieces]
    return [(x if stage == 0 else None, y if stage == mesh.stages - 1 else None) for x, y in pairs]


def tasks_of(
    run_id: str,
    generation: int,
    step: int,
    mesh: Mesh,
    team: Sequence[int],
    shares: Sequence[_Share],
    want_hash: bool,
    treated: bool,
    writer: RowWriter,
    splitter: RowSplitter,
) -> tuple[list[ShardTask], list[tuple[Shard, OutgoingBatch]]]:
    """One task and one record per rank of the group; the rows count where the loss is reported."""
    global_rows = sum(sum(share.rows) for share in shares)
    tasks: list[ShardTask] = []
    messages: list[tuple[Shard, OutgoingBatch]] = []
    for rank, owner in enumerate(team):
        share, stage, tensor = shares[rank // (mesh.stages * mesh.tensor)], mesh.stage_of(rank), rank % mesh.tensor
        reports = stage == mesh.stages - 1 and tensor == 0
        if tensor == 0:  # the ranks that share layers share one batch
            parts = zip(parts_for(mesh, stage, share.pieces, treated), share.rows, strict=True)
            outgoing = OutgoingBatch([taken_apart(writer, part, max(1, count), splitter) for part, count in parts])
        rows = sum(share.rows) if reports else 0
        tasks.append(ShardTask(rank, rows, owner, tuple(share.ids) if reports else ()))
        shard = Shard(
            run_id=run_id,
            generation=generation,
            step=step,
            shard=rank,
            rows=rows,
            global_rows=global_rows,
            batch=NO_BATCH,
            solo=False,
            want_hash=want_hash,
            part_rows=tuple(share.rows),
        )
        messages.append((shard, outgoing))
    return tasks, messages
