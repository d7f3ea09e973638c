"""What a run consists of whose model is spread over a process group, by way of the relay.

Pipelines: the model is cut as its workers will cut it, and what passes between the stages is looked at with a few rows.
Shared layers: the split model is run here by one rank that counts what it would exchange. ZeRO: from sizes alone.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from torch import nn

from guava_nb.cluster.traffic import NOTHING, Gauge, Traffic
from guava_nb.config.mesh import Mesh
from guava_nb.data.split import RowSplitter
from guava_nb.forecast.forecast import Feeding, Parts
from guava_nb.forecast.relay_bytes import Relayed
from guava_nb.forecast.stage_bytes import Boundaries, Few, Passed, PassedSums, boundaries, passed_sums
from guava_nb.forecast.star_bytes import Sizes, Weighed, epochs_of, moving_elements, weigh, writer_for
from guava_nb.forecast.state_bytes import STEP, Asked, coming_state, starting, trained_state
from guava_nb.parallel.pipeline.microbatches import count_micro_batches, micro_batch_sizes
from guava_nb.parallel.pipeline.stages import split_model
from guava_nb.parallel.replicas.zero23_fsdp import gathered_in
from guava_nb.parallel.tensor.plan_search import make_plan
from guava_nb.parallel.tensor.tensor_plan import Plan
from guava_nb.protocol.messages import (
    Commit,
    CommitStep,
    Committed,
    Evaluated,
    FormGroup,
    GroupFormed,
    ParallelSpec,
    Ready,
    StoreAsk,
    StoreReply,
    Tree,
)
from guava_nb.row_cache.writer import OutgoingBatch, taken_apart
from guava_nb.sync.group_exchange import shares_of, tasks_of

__all__ = ["group_parts"]

_GROUP = "run-1/1/"
#: Questions to the shared keys for each worker while a group is formed, about.
_STORE_ASKS = 6
_HEAD_BYTES = 512  # of the record that goes ahead of a value, where none is agreed on
_FEW_ROWS = 2
Resolve = Callable[[str], Any]


def group_parts(asked: Asked, resolve: Resolve, sizes: Sizes, val_sizes: Sizes | None) -> Parts:
    """Return what a run consists of."""
    shape, plan = asked.spec.parallel, asked.plan
    assert shape is not None
    mesh = Mesh(asked.workers // (shape.pp * shape.tp), shape.pp, shape.tp)
    gauge = Gauge.of(asked.spec)
    spread = _Spread.of(asked, sizes, resolve, shape, mesh, gauge)
    rows = sizes.batch_rows / mesh.data
    after = trained_state(asked.replica_set, resolve)
    elastic = shape.mode == "data" and not shape.zero_stage and shape.pp * shape.tp == 1
    pieces = 1 if elastic else asked.workers
    train = _training(asked, sizes, mesh, gauge)
    return Parts(
        start=(starting(gauge, asked, after) + _forming(gauge, asked)) * asked.workers + spread.first(rows),
        step=_voting(gauge, asked) * asked.workers + spread.step(),
        train=_with(train, spread.batch(rows)),
        accumulation=plan.accumulation_steps,
        epochs=epochs_of(asked),
        validation=None if val_sizes is None else _validation(asked, val_sizes, mesh, gauge, spread),
        val_interval=plan.val_interval,
        state=coming_state(gauge, asked, after) + gauge.acks(pieces, pieces),
        state_every=tuple(every for every in (plan.snapshot_every_steps, plan.save_every_steps) if every),
        each_epoch=plan.snapshot_every_steps is None and (not elastic or asked.workers == 1),
    )


def _with(feeding: Feeding, exchanged: Traffic) -> Feeding:
    """The batches of a loader, with what workers exchange for each."""
    return replace(feeding, batch=feeding.batch + exchanged, held=feeding.held + exchanged)


def _forming(gauge: Gauge, asked: Asked) -> Traffic:
    """What it takes that a worker finds its place in a group."""
    run_id, names = asked.replica_set.run_id, tuple(f"worker-{rank}" for rank in range(asked.workers))
    order = FormGroup(run_id=run_id, generation=1, name=_GROUP, rank=0, members=names, backend="guava", timeout_s=120.0)
    question = StoreAsk(10, "set", (f"{_GROUP}store_based_barrier_key:1",), (b"0" * 40,))
    talk = (gauge.back(question) + gauge.out(StoreReply(10))) * _STORE_ASKS
    return gauge.out(order) + gauge.back(GroupFormed(run_id=run_id, generation=1, ok=True)) + talk + gauge.acks(3, 3)


def _voting(gauge: Gauge, asked: Asked) -> Traffic:
    """What a step takes of one worker beside its batches and what the group exchanges."""
    run_id, every = asked.replica_set.run_id, asked.spec.hash_every_steps
    ready = Ready(
        run_id=run_id,
        generation=1,
        step=STEP,
        shard=0,
        loss_sum=1.5,
        count=1.5,
        finite=True,
        rows=100,
        forward_s=1.5,
        backward_s=1.5,
        wait_s=1.5,
        culprit="",
        gradient_square=1.5,
    )
    done = gauge.back(ready) + gauge.back(
        Committed(run_id=run_id, generation=1, step=STEP, parameter_hash="", learning_rate=1.5)
    )
    commit = gauge.out(CommitStep(run_id, 1, STEP, Commit(1.5, False)))
    return done + commit + Traffic.coming("control", 64 / every if every else 0.0) + gauge.acks(1, 2)


# ------------------------------------------------------------------------------------------------------------- batches


def _training(asked: Asked, sizes: Sizes, mesh: Mesh, gauge: Gauge) -> Feeding:
    spec, plan, weighed = asked.spec, asked.plan, Weighed()
    team = tuple(range(mesh.size))
    writer, splitter = writer_for(spec, mesh.size), RowSplitter(plan.split_fn)
    weights = plan.weights(team)[:: mesh.stages * mesh.tensor]
    treated = spec.wants_whole_batches
    for group in sizes.groups:
        shares = shares_of(group, mesh, weights, splitter)
        tasks, shards = tasks_of(
            asked.replica_set.run_id, 1, STEP, mesh, team, shares, False, treated, writer, splitter
        )  # fmt: skip
        rows = sum(batch.rows for batch in group)
        # Rows are counted once, though several ranks get them.
        orders = [
            (task.owner, *shard, rows if task.index == 0 else 0) for task, shard in zip(tasks, shards, strict=True)
        ]
        weigh(writer, orders, weighed, gauge)
        weighed.batches += len(group)
    travel = (1.0,) if spec.cache is None or not weighed.named else (1.0, 0.0 if not plan.feed.is_shuffled else 1.0)
    return weighed.feeding(sizes, NOTHING, travel)


def _validation(asked: Asked, sizes: Sizes, mesh: Mesh, gauge: Gauge, spread: _Spread) -> Feeding:
    question, weighed = asked.plan.validation(), Weighed()
    writer, splitter = writer_for(asked.spec, mesh.size), RowSplitter()
    treated = asked.spec.preprocess is not None
    for (batch,) in sizes.groups:
        shares = shares_of([batch], mesh, [1.0] * mesh.data, splitter)
        orders: list[tuple[int, Any, OutgoingBatch, int]] = []
        for rank in range(mesh.size):
            share = shares[rank // (mesh.stages * mesh.tensor)]
            piece: Any = share.pieces[0]
            if mesh.stages > 1:
                piece = question.for_stage(mesh, mesh.stage_of(rank), piece, treated)
            piece = taken_apart(writer, piece, max(1, sum(share.rows)), splitter)
            record = question.message(asked.replica_set.run_id, STEP, sum(share.rows), Tree(b""), True)
            record = msgspec.structs.replace(record, source=batch.source)
            orders.append((rank, record, OutgoingBatch([piece], single=True), batch.rows if rank == 0 else 0))
        weigh(writer, orders, weighed, gauge)
        weighed.batches += 1
    answer = gauge.back(
        Evaluated(run_id=asked.replica_set.run_id, request_id=STEP, loss_sum=1.5, count=1.5, correct=100, rows=100)
    ) + gauge.acks(1, 1)
    looked = spread.looking(sizes.batch_rows / mesh.data)
    return weighed.feeding(sizes, answer * mesh.size + looked, (1.0,))


# ------------------------------------------------------------------------------------------------------------ exchanged


@dataclass(frozen=True, slots=True)
class _Spread:
    """What the ranks of a mesh exchange, as functions of the rows that a replica gets of a batch."""

    asked: Asked
    shape: ParallelSpec
    mesh: Mesh
    gauge: Gauge
    passing: Boundaries | None
    sums: PassedSums | None
    plan: Plan | None
    shared: int  # bytes of the gradients of parameters that stand in several stages

    @classmethod
    def of(cls, asked: Asked, sizes: Sizes, resolve: Resolve, shape: ParallelSpec, mesh: Mesh, gauge: Gauge) -> _Spread:
        """Look at the model."""
        model = asked.replica_set.master.model
        plan = make_plan(model, shape.tensor_plan, mesh.tensor) if mesh.tensor > 1 else None
        sums = passing = None
        shared = 0
        if plan is not None:
            sums = passed_sums(model, plan, mesh.tensor, Few.of(asked, sizes, resolve, _FEW_ROWS), resolve)
        if mesh.stages > 1:
            split = split_model(copy.deepcopy(model), mesh.stages * shape.stages_per_rank, shape.split)
            passing = boundaries(split, Few.of(asked, sizes, resolve, _FEW_ROWS))
            named = dict(model.named_parameters())
            shared = sum(
                (len({at % mesh.stages for at in stages}) - 1) * _nbytes(named[name])
                for name, stages in split.holders.items()
                if name in named
            )
        return cls(asked, shape, mesh, gauge, passing, sums, plan, shared)

    @property
    def _replicas(self) -> Relayed:
        return Relayed(self.gauge, self.mesh.data)

    @property
    def _layers(self) -> Relayed:
        return Relayed(self.gauge, self.mesh.tensor)

    def batch(self, rows: float) -> Traffic:
        """A loader batch, forward and backward."""
        total = NOTHING
        if self.passing is not None:
            total = total + self._piped(rows) * (self.mesh.data * self.mesh.tensor)
        if self.sums is not None:
            total = total + self._summed(self.sums.trained, rows)
        return total + self._gathered(training=True)

    def looking(self, rows: float) -> Traffic:
        """A batch of a validation."""
        total = NOTHING
        if self.passing is not None:
            total = total + self._probed(self._sizes(rows)) * (self.mesh.data * self.mesh.tensor)
        if self.sums is not None:
            total = total + self._summed(self.sums.looked, rows)
        return total + self._gathered(training=False)

    def first(self, rows: float) -> Traffic:
        """What only the first batch takes: shapes are told; split layers are looked at, in training and in validation."""
        times = 1 if self.asked.plan.val_feed is None else 2
        total = NOTHING
        if self.passing is not None:
            sizes = self._sizes(rows)
            total = self._probed(sorted(set(sizes))) * (self.mesh.data * self.mesh.tensor)
        if self.sums is not None:
            micro = len(self._sizes(rows)) if self.passing is not None else 1  # the first of them is looked at
            extra = self._summed(self.sums.looked, rows) + self._summed(self.sums.checked, rows)
            total = total + extra * (times / micro)
        return total

    def step(self) -> Traffic:
        """What completes the gradients of a step, and what follows its commit."""
        named = self._held()
        total = NOTHING
        if self.shape.zero_stage < 2:
            total = total + self._reduced([p for p in named.values() if p.requires_grad])
        if self.shape.zero_stage == 1:
            total = (
                total + self._replicas.broadcast(sum(map(_nbytes, named.values())) / self.mesh.data) * self.mesh.data
            )
        if self.shape.zero_stage > 1:
            total = total + self._replicas.all_reduce(4 * len(named))
        total = total + self._buffers()
        if self.plan is not None and self.plan.partial:
            partial = [named[name] for name in self.plan.partial if name in named]
            total = total + self._layers.all_reduce(sum(map(_wire_bytes, partial)) + 4 * len(partial)) * self.mesh.data
        if self.shared:
            each = Relayed(self.gauge, 2)
            total = total + (each.sent(self.shared) + each.sent(8)) * (2 * self.mesh.data)
        return total

    # ----------------------------------------------------------------------------------------------------- pipelines

    def _sizes(self, rows: float) -> list[int]:
        whole = max(1, round(rows))
        count = count_micro_batches(self.shape.schedule, self.shape.micro_batches, whole, self.mesh.stages)
        return micro_batch_sizes(whole, count)

    def _piped(self, rows: float) -> Traffic:
        """A batch through the stages and its gradients back; two numbers ahead tell everybody which shape it has."""
        assert self.passing is not None
        sizes, few, group = self._sizes(rows), self.passing.rows, Relayed(self.gauge, self.mesh.stages)
        total = group.broadcast(16)
        for forward, backward in zip(self.passing.forward, self.passing.backward, strict=True):
            each = group.sent(forward / few * sizes[0])
            back = group.sent(backward / few * sizes[0]) if backward else NOTHING
            total = total + (each + back) * len(sizes)
        return total

    def _probed(self, sizes: Sequence[int]) -> Traffic:
        """Micro-batches forward only, each value with its record ahead."""
        assert self.passing is not None
        group, total = Relayed(self.gauge, self.mesh.stages), NOTHING
        for rows in sizes:
            for tensors in self.passing.tensors:
                total = total + group.sent(_HEAD_BYTES)
                for nbytes in tensors:
                    total = total + group.sent(nbytes / self.passing.rows * rows)
        return total

    # ------------------------------------------------------------------------------------------------- shared layers

    def _summed(self, passed: Passed, rows: float) -> Traffic:
        assert self.sums is not None
        micro = len(self._sizes(rows)) if self.passing is not None else 1
        each = rows / micro / self.sums.rows
        total = NOTHING
        for nbytes in passed.sums:
            total = total + self._layers.all_reduce(nbytes * each)
        for nbytes in passed.gathers:
            total = total + self._layers.all_gather(nbytes * each)
        return total * (micro * self.mesh.data)

    # ----------------------------------------------------------------------------------------------------- replicas

    def _held(self) -> Mapping[str, nn.Parameter]:
        return dict(self.asked.replica_set.master.model.named_parameters())

    def _reduced(self, parameters: Sequence[nn.Parameter]) -> Traffic:
        """Gradients of whole parameters, summed over the replicas: over all ranks that hold parts of one replica, once."""
        split = set() if self.plan is None else {id(p) for p in self._split_parameters(self.plan)}
        copies = [1 if id(p) in split else self.mesh.tensor for p in parameters]
        total = sum(_wire_bytes(p) * times for p, times in zip(parameters, copies, strict=True))
        return self._replicas.all_reduce(total + 4 * len(parameters))

    def _split_parameters(self, plan: Plan) -> Iterator[nn.Parameter]:
        for name in plan.splits:
            yield from self.asked.replica_set.master.model.get_submodule(name).parameters()

    def _gathered(self, training: bool) -> Traffic:
        """ZeRO 2 and 3: parameters are gathered for every forward (3: blocks again for backward), gradients scattered."""
        if self.shape.zero_stage < 2 or self.mesh.data < 2:
            return NOTHING
        total = NOTHING
        for parameters, again in gathered_in(self.asked.replica_set.master.model, self.shape.zero_stage):
            part = sum(_part_bytes(p, self.mesh.data, p.element_size()) for p in parameters)
            total = total + self._replicas.all_gather(part) * (2 if again and training else 1)
            if training:
                sums = sum(_part_bytes(p, self.mesh.data, max(4, p.element_size())) for p in parameters)
                total = total + self._replicas.reduce_scatter(sums * self.mesh.data)
        return total

    def _buffers(self) -> Traffic:
        """Statistics that moved, averaged over the replicas, and the small sum that tells which."""
        model = self.asked.replica_set.master.model
        if self.mesh.data < 2 or not any(True for _ in model.buffers()):
            return NOTHING
        told = self._replicas.all_reduce(8 * (1 + sum(1 for _ in model.buffers())))
        moved = moving_elements(model)
        return told + (self._replicas.all_reduce(4 * moved) + self._replicas.all_reduce(8) if moved else NOTHING)


def _nbytes(parameter: nn.Parameter) -> int:
    return parameter.numel() * parameter.element_size()


def _wire_bytes(parameter: nn.Parameter) -> int:
    """Of its gradient: halves travel as float32."""
    return parameter.numel() * max(4, parameter.element_size())


def _part_bytes(parameter: nn.Parameter, ranks: int, item_bytes: int) -> int:
    """Of one rank's rows, padded."""
    rows = parameter.shape[0] if parameter.ndim else 1
    return math.ceil(rows / ranks) * (parameter.numel() // max(1, rows)) * item_bytes
