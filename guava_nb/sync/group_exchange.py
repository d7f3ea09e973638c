"""The `group` exchange: every rank of a process group gets its share, the group sums by itself, the hub takes the vote.

The same face as `StarExchange`. A step is committed when all ranks have reported; a lost rank ends the step for everyone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import msgspec

from guava_nb.cluster.job import Job
from guava_nb.config.mesh import Mesh
from guava_nb.data.loader_feed import LoadedBatch
from guava_nb.data.split import RowSplitter, share_ranges
from guava_nb.errors import ConfigError
from guava_nb.replica.preprocess import pair_of
from guava_nb.row_cache.writer import OutgoingBatch, RowWriter, taken_apart
from guava_nb.sync.exchange import OnApplied, OnCommit, Replicas, StepExchange
from guava_nb.sync.send_credit import SendCredit
from guava_nb.sync.step_in_flight import (
    PlannedShards,
    Share,
    StepHead,
    StepInFlight,
    add_to_shares,
    marks_for,
    no_samples,
)
from guava_nb.sync.step_machine import Halt, ShardTask, StepMachine, has_finite_loss

__all__ = ["GroupExchange", "micro_batch_marks", "parts_for", "shares_of", "tasks_of"]


_BETWEEN_STAGES = (
    "Activations and their gradients pass from stage to stage as {0} (wire, --wire), each message rounded for itself. Masks, "
    "whole numbers, sums over replicas, validation and prediction stay exact"
)


class Group(Replicas, Protocol):
    """As much of the parts of one model as their exchange needs; see `GroupReplicaSet`."""

    team: tuple[int, ...]
    generation: int
    votes: bool

    @property
    def mesh(self) -> Mesh:
        """Sizes of the group that stands."""


class GroupExchange(StepExchange[Group]):
    """Parts of one model: every rank gets its share, they sum among themselves and vote here. See `StepExchange`."""

    _looked = False  # at how many rows a pipeline gets

    def __init__(
        self, job: Job, replicas: Group, on_commit: OnCommit, on_applied: OnApplied, credit: SendCredit
    ) -> None:
        """Say how what passes between stages travels, where it is rounded.

        Args:
            job, replicas, on_commit, on_applied, credit: see `StepExchange`.
        """
        super().__init__(job, replicas, on_commit, on_applied, credit)
        if replicas.spec.wire != "fp32":
            job.cluster.notice(_BETWEEN_STAGES.format(replicas.spec.wire))

    def _plan(
        self, batches: Sequence[LoadedBatch], team: tuple[int, ...], weights: Sequence[float], splitter: RowSplitter
    ) -> tuple[StepMachine, PlannedShards]:
        members, mesh, spec = self._replicas.team, self._replicas.mesh, self._replicas.spec
        assert spec.parallel is not None
        if splitter.problem and mesh.stages > 1 and spec.parallel.micro_batches > 1 and not spec.wants_whole_batches:
            raise ConfigError(splitter.problem)
        weights = [weights[team.index(rank)] for rank in members]  # a replica takes the share of its first rank
        shares = shares_of(batches, mesh, weights[:: mesh.stages * mesh.tensor], splitter)
        self._tell_few_rows(max(rows for share in shares for rows in share.rows))
        generation, policies = self._replicas.generation, self._replicas.found_policies
        head = replace(self._head(generation), solo=self._replicas.votes, buffers=policies)
        tasks, shards = tasks_of(head, mesh, members, shares, spec.wants_whole_batches, self._writer, splitter)
        scaled = spec.precision == "fp16"
        machine = StepMachine(
            head.step, head.generation, tasks, (), scaled, max_grad_norm=spec.max_grad_norm, mesh=mesh, voted=head.solo
        )
        return machine, shards

    def _tell_few_rows(self, most: int) -> None:
        """Say once that batches are smaller than the pipeline's parts; a last batch of an epoch is no reason to."""
        assert self._replicas.spec.parallel is not None
        wanted = self._replicas.spec.parallel.micro_batches
        if not self._looked and most < wanted:
            self._job.cluster.notice(
                f"micro_batches (--micro-batches) is {wanted}, but a pipeline gets {most} rows of a batch, so it cuts them into "
                f"{most} parts: larger batches would keep its stages busier, fewer micro-batches change nothing"
            )
        self._looked = True

    def parts(self, weights: Sequence[float]) -> list[float]:
        """Return which part of a step's bytes each member of a team with these weights is sent."""
        mesh = self._replicas.mesh
        ranks = mesh.stages * mesh.tensor  # that share one replica's part: counted as if each got all of it
        total = sum(weights[::ranks]) or 1.0
        return [weights[rank - rank % ranks] / total for rank in range(len(weights))]

    def _rows_of(self, in_flight: StepInFlight, shard: int) -> int:
        return sum(in_flight.shards[shard][0].part_rows)

    def _samples_of(self, in_flight: StepInFlight, shard: int) -> tuple[Sequence[int], int]:
        if not has_finite_loss(in_flight.machine.report(shard)) and in_flight.machine.tasks[shard].sample_ids:
            return super()._samples_of(in_flight, shard)
        return in_flight.sample_ids(), in_flight.machine.rows  # the ranks sum among themselves before they report

    def _origin(self, in_flight: StepInFlight, halt: Halt) -> str:
        name, mesh = self._job.cluster.name, self._replicas.mesh
        alike = " and ".join(name(rank) for rank in (halt.rank, *halt.others))
        if not has_finite_loss(in_flight.machine.report(halt.shard)):
            before = (
                [task.owner for task in in_flight.machine.tasks[: halt.shard]][1 - mesh.stages :]
                if mesh.stages > 1
                else []
            )
            earlier = (
                f", or on a stage before it ({', '.join(map(name, before))})" if before and mesh.tensor == 1 else ""
            )
            return f"on {alike}{earlier}"
        if halt.others:
            return (
                f"on {alike} alike (what they computed was summed before, so which of them had it first cannot be told)"
            )
        return f"on {alike}"


# ----------------------------------------------------------------------------------------------------------- who gets what


def shares_of(
    batches: Sequence[LoadedBatch], mesh: Mesh, weights: Sequence[float], splitter: RowSplitter
) -> list[Share]:
    """Share loader batches among the replicas of a mesh.

    A replica whose share rounds to no sample gets one row as a stand-in, marked with 0 rows: it has to take part in the
    group's operations all the same.

    Args:
        batches: of the loader.
        mesh: of the group.
        weights: of each replica: in proportion to these it gets samples.
        splitter: cuts the batches.

    Raises:
        ConfigError: a batch cannot be shared out, or all of them have no samples.
    """
    shares = [Share() for _ in range(mesh.data)]
    for batch in (batch for batch in batches if batch.rows):
        ranges = share_ranges(batch.rows, weights)
        taken = [r if r[1] > r[0] else (0, 1) for r in ranges]
        parts = splitter.split(batch.batch, taken, batch.rows)
        add_to_shares(shares, batch, [(k, part, range(*ranges[k])) for k, part in enumerate(parts)])
    if not any(sum(share.rows) for share in shares):
        raise no_samples(batches)
    return shares


def parts_for(mesh: Mesh, stage: int, pieces: Sequence[Any], wants_whole: bool = False) -> list[Any]:
    """Return what a stage needs of a replica's pieces: all without stages, else inputs first, targets last.

    Args:
        mesh: of the group.
        stage: whose part it is.
        pieces: of loader batches, one replica's.
        wants_whole: a function of the user's shall see whole batches there, so both ends get all and the stages between nothing.

    Raises:
        ConfigError: a pipeline's batch is not of the form (inputs, targets).
    """
    if mesh.stages == 1:
        return list(pieces)
    if wants_whole:
        return [piece if stage in (0, mesh.stages - 1) else None for piece in pieces]
    pairs = [pair_of(piece) for piece in pieces]
    return [(x if stage == 0 else None, y if stage == mesh.stages - 1 else None) for x, y in pairs]


def tasks_of(
    head: StepHead,
    mesh: Mesh,
    team: Sequence[int],
    shares: Sequence[Share],
    wants_whole: bool,
    writer: RowWriter,
    splitter: RowSplitter,
) -> tuple[list[ShardTask], PlannedShards]:
    """Return one task and one record per rank of the group; the rows count where the loss is reported.

    Args:
        head: of the step.
        mesh: of the group.
        team: the workers, in the order of the group's ranks.
        shares: of the replicas, as `shares_of` gives them.
        wants_whole: a function of the user's sees whole batches on the first and the last stage.
        writer: keeps rows apart where workers hold some.
        splitter: cuts the batches.
    """
    global_rows = sum(sum(share.rows) for share in shares)
    tasks: list[ShardTask] = []
    shards: PlannedShards = []
    for rank, owner in enumerate(team):
        share, stage, tensor = shares[rank // (mesh.stages * mesh.tensor)], mesh.stage_of(rank), rank % mesh.tensor
        reports = stage == mesh.stages - 1 and tensor == 0
        if tensor == 0:  # the ranks that share layers share one batch
            pieces, counts = parts_for(mesh, stage, share.pieces, wants_whole), [max(1, count) for count in share.rows]
            axes = micro_batch_marks(mesh, splitter, pieces, counts, wants_whole)
            parts = zip(pieces, counts, strict=True)
            outgoing = OutgoingBatch([taken_apart(writer, part, count, splitter) for part, count in parts])
        task = ShardTask(rank, sum(share.rows) if reports else 0, owner, tuple(share.ids) if reports else ())
        tasks.append(task)
        shard = head.shard(task, global_rows)
        shards.append((msgspec.structs.replace(shard, part_rows=tuple(share.rows), axes=axes), outgoing))
    return tasks, shards


def micro_batch_marks(
    mesh: Mesh, splitter: RowSplitter, pieces: Sequence[Any], rows: Sequence[int], wants_whole: bool
) -> tuple[bytes, ...]:
    """Return how a stage cuts its pieces into micro-batches; () where it reads them itself, or cuts nothing.

    It reads what a function of the user's made there, and what a split function cut, by a rule that only that knows.

    Args:
        mesh: of the group.
        splitter: that cut the pieces.
        pieces, rows: of one stage, and the samples of each.
        wants_whole: as in `tasks_of`.
    """
    return () if mesh.stages == 1 or wants_whole else marks_for(splitter, pieces, rows)
