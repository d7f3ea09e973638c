"""What a run exchanges whose model is spread over a process group, by way of the relay.

Pipelines: the model is cut as its workers will cut it, and what passes between the stages is looked at with a few rows.
Shared layers: the split model is run here by one rank that counts what it would exchange. ZeRO: from sizes alone.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence

from torch import nn

from guava_nb.cluster.traffic import NOTHING, Traffic
from guava_nb.forecast.relay_bytes import Operation, Relayed
from guava_nb.forecast.run_facts import Exchanged, RunFacts, Sizes
from guava_nb.forecast.stage_bytes import Passed, passed_between, passed_sums
from guava_nb.parallel.pipeline.microbatches import count_micro_batches, micro_batch_sizes
from guava_nb.parallel.pipeline.stages import split_model
from guava_nb.parallel.replicas.buffer_policy import followed_parameters, is_statistic
from guava_nb.parallel.tensor.plan_search import make_plan
from guava_nb.protocol import messages

__all__ = ["group_exchange"]

_GROUP = "run-1/1/"
#: Questions to the shared keys for each worker while a group is formed, about.
_STORE_ASKS = 6
_HEAD_BYTES = 512  # of the record that goes ahead of a value, where none is agreed on


def group_exchange(run: RunFacts) -> Exchanged:
    """Return what the workers exchange, and the orchestrator with them."""
    shape, mesh, spread = run.spec.parallel, run.mesh, _Spread(run)
    assert shape is not None
    rows = run.train.batch_rows / mesh.data
    elastic = shape.mode == "data" and not shape.zero_stage and shape.pp * shape.tp == 1
    pieces = 1 if elastic else run.workers
    return Exchanged(
        step=_voting(run) * run.workers + spread.step(),
        joining=_forming(run) * run.workers + spread.first(rows),
        batch=_mean(spread.batch, run.train, mesh.data),
        looked=NOTHING if run.val is None else _mean(spread.looking, run.val, mesh.data),
        gathering=run.acks(pieces, pieces),
        spread=not elastic or run.workers == 1,
    )


def _mean(cost: Callable[[float], Traffic], sizes: Sizes, replicas: int) -> Traffic:
    """Return what a batch of an epoch takes in the mean: the last one may be shorter.

    Args:
        cost: of the rows that a replica gets of a batch.
        sizes: of the loader.
        replicas: that share a batch.
    """
    whole, batches = sizes.batch_rows, sizes.batches or 0
    rest = 0.0 if sizes.rows is None else sizes.rows - (batches - 1) * whole
    if batches < 2 or not 0 < rest < whole:
        return cost(whole / replicas)
    return (cost(whole / replicas) * (batches - 1) + cost(rest / replicas)) * (1 / batches)


def _forming(run: RunFacts) -> Traffic:
    """What it takes that a worker finds its place in a group."""
    names = tuple(f"worker-{rank}" for rank in range(run.workers))
    order = run.out(messages.FormGroup, name=_GROUP, members=names, backend="guava")
    key = f"{_GROUP}store_based_barrier_key:1"
    question = run.back(messages.StoreAsk, request_id=10, op="set", keys=(key,), values=(b"0" * 40,))
    talk = question + run.out(messages.StoreReply, request_id=10)
    return order + run.back(messages.GroupFormed) + talk * _STORE_ASKS + run.acks(3, 3)


def _voting(run: RunFacts) -> Traffic:
    """What a step takes of one worker beside its batches and what the group exchanges."""
    done = (
        run.back(messages.ShardReport, gradient_square=1.5)
        + run.back(messages.StepApplied, learning_rate=1.5)
        + run.hashes
    )
    return done + run.out(messages.CommitStep, commit=messages.Commit(1.5, False)) + run.acks(1, 2)


class _Spread:
    """What the ranks of a mesh exchange, as functions of the rows that a replica gets of a batch."""

    def __init__(self, run: RunFacts) -> None:
        """Look at the model."""
        assert run.spec.parallel is not None
        self.run, self.mesh, self.shape, self.model = run, run.mesh, run.spec.parallel, run.model
        self.stages, self.layers, self.replicas = (
            Relayed(run, ranks) for ranks in (self.mesh.stages, self.mesh.tensor, self.mesh.data)
        )
        self.named = dict(self.model.named_parameters())
        self.plan = make_plan(self.model, self.shape.tensor_plan, self.mesh.tensor) if self.mesh.tensor > 1 else None
        self.sums = Passed() if self.plan is None else passed_sums(run, self.plan)
        self.passing: list[Operation] = []  # from stage to stage, for a row: where shapes are agreed on
        self.telling: list[Operation] = []  # and where each value is told of
        self.stage_count = self.mesh.stages * self.shape.stages_per_rank if self.mesh.stages > 1 else 1
        self.tied_bytes = 0  # of the gradients of parameters that stand in several stages
        if self.stage_count > 1:
            split = split_model(copy.deepcopy(self.model), self.stage_count, self.shape.split)
            crossing, self.telling = passed_between(run, split.modules)
            self.passing = [(Relayed.sent, sum(way)) for ways in crossing for way in ways if way]
            held = {name: {at % self.mesh.stages for at in stages} for name, stages in split.holders.items()}
            self.tied_bytes = sum((len(held.get(name, "1")) - 1) * _nbytes(p) for name, p in self.named.items())

    def batch(self, rows: float) -> Traffic:
        """A loader batch, forward and backward; in a pipeline two numbers ahead tell every rank which shape it has."""
        parts = self._micro_batches(rows)
        piped = self.stages.broadcast(16) + self.stages.all_of(self.passing, parts[0]) * len(parts)
        return piped * self._pipelines + self._summed(self.sums.trained, rows) + self._gathered(training=True)

    def looking(self, rows: float) -> Traffic:
        """A batch of a validation."""
        told = self._told(self._micro_batches(rows))
        return told + self._summed(self.sums.looked, rows) + self._gathered(training=False)

    def first(self, rows: float) -> Traffic:
        """What only the first batch takes: shapes are told; split layers are looked at, in training and in validation."""
        parts = self._micro_batches(rows)
        times = (1 if self.run.val is None else 2) / len(parts)  # the first of them is looked at
        return self._told(sorted(set(parts))) + self._summed(self.sums.looked + self.sums.checked, rows) * times

    def step(self) -> Traffic:
        """What completes the gradients of a step, and what follows its commit."""
        each = self.mesh.data
        total = self._buffers()
        if self.shape.zero_stage > 1:
            total = total + self.replicas.all_reduce(4 * len(self.named))
        else:
            total = total + self._reduced([p for p in self.named.values() if p.requires_grad])
        if self.shape.zero_stage == 1:
            total = total + self.replicas.broadcast(sum(map(_nbytes, self.named.values())) / each) * each
        partial = [] if self.plan is None else [self.named[name] for name in self.plan.partial if name in self.named]
        if partial:
            total = total + self.layers.all_reduce(sum(map(_wire_bytes, partial)) + 4 * len(partial)) * each
        if self.tied_bytes:
            pair = Relayed(self.run, 2)
            total = total + (pair.sent(self.tied_bytes) + pair.sent(8)) * (2 * each)
        return total

    # ----------------------------------------------------------------------------------------- pipelines, shared layers

    @property
    def _pipelines(self) -> int:
        return self.mesh.data * self.mesh.tensor

    def _micro_batches(self, rows: float) -> list[int]:
        """Rows of each part of a batch; of one where there is no pipeline."""
        whole = max(1, round(rows))
        if self.mesh.stages == 1:
            return [whole]
        count = count_micro_batches(self.shape.schedule, self.shape.micro_batches, whole, self.mesh.stages)
        return micro_batch_sizes(whole, count)

    def _told(self, sizes: Sequence[int]) -> Traffic:
        """Micro-batches forward only, each value with its record ahead."""
        heads = self.stages.sent(_HEAD_BYTES) * (self.stage_count - 1)
        return sum((self.stages.all_of(self.telling, rows) + heads for rows in sizes), NOTHING) * self._pipelines

    def _summed(self, operations: Sequence[Operation], rows: float) -> Traffic:
        parts = len(self._micro_batches(rows))
        return self.layers.all_of(operations, rows / parts) * (parts * self.mesh.data)

    # ----------------------------------------------------------------------------------------------------- replicas

    def _reduced(self, parameters: Sequence[nn.Parameter]) -> Traffic:
        """Gradients of whole parameters, summed over the replicas: over all ranks that hold parts of one replica, once."""
        split = {
            id(p)
            for name in (self.plan.splits if self.plan else ())
            for p in self.model.get_submodule(name).parameters()
        }
        total = sum(_wire_bytes(p) * (1 if id(p) in split else self.mesh.tensor) for p in parameters)
        return self.replicas.all_reduce(total + 4 * len(parameters))

    def _gathered(self, training: bool) -> Traffic:
        """ZeRO 2 and 3: parameters are gathered for every forward (3: blocks again for backward), gradients scattered."""
        if self.shape.zero_stage < 2 or self.mesh.data < 2:
            return NOTHING
        from guava_nb.parallel.replicas.zero23_fsdp import gathered_in  # loads FSDP2

        total, ranks = NOTHING, self.mesh.data
        for parameters, again in gathered_in(self.model, self.shape.zero_stage):
            part = sum(_part_elements(p, ranks) * p.element_size() for p in parameters)
            total = total + self.replicas.all_gather(part) * (2 if again and training else 1)
            if training:
                sums = sum(_part_elements(p, ranks) * max(4, p.element_size()) for p in parameters)
                total = total + self.replicas.reduce_scatter(sums * ranks)
        return total

    def _buffers(self) -> Traffic:
        """Statistics that moved, averaged over the replicas, and the small sum that tells which."""
        names = [name for name, _ in [*self.model.named_buffers(), *followed_parameters(self.model)]]
        moved = self.run.moving_elements()
        uncertain, ranks = sum(not is_statistic(name) for name in names), self.mesh.data
        told = self.replicas.all_reduce(8 * (len(names) + ranks * (1 + 5 * uncertain))) if names else NOTHING
        return told + (self.replicas.all_reduce(4 * moved) + self.replicas.all_reduce(8) if moved else NOTHING)


def _nbytes(parameter: nn.Parameter) -> int:
    return parameter.numel() * parameter.element_size()


def _wire_bytes(parameter: nn.Parameter) -> int:
    """Of its gradient: halves travel as float32."""
    return parameter.numel() * max(4, parameter.element_size())


def _part_elements(parameter: nn.Parameter, ranks: int) -> int:
    """Of one rank's rows, padded."""
    rows = parameter.shape[0] if parameter.ndim else 1
    return math.ceil(rows / ranks) * (parameter.numel() // max(1, rows))
