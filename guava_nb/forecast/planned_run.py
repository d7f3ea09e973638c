"""From what a run would be to its forecast: which parts it has in its mode, and what would make them smaller."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import msgspec
import torch

from guava_nb.cluster.cluster import Cluster
from guava_nb.cluster.traffic import NOTHING
from guava_nb.config import DistributedConfig
from guava_nb.data.loader_feed import LoaderFeed
from guava_nb.data.randomness import RandomState
from guava_nb.data.sizes import size_of
from guava_nb.data.split import RowSplitter
from guava_nb.data.worker_data import WorkerData
from guava_nb.evaluation.validation import Validation
from guava_nb.forecast.compression import NOT_SQUEEZED, Squeezed, squeezed_in
from guava_nb.forecast.forecast import Forecast
from guava_nb.forecast.run_facts import RunFacts, Sizes, peeked, rows_of
from guava_nb.forecast.run_parts import parts_of
from guava_nb.forecast.savings import savings
from guava_nb.forecast.sync_choice import SyncChoice, SyncWork
from guava_nb.protocol.messages import DataSpec, RoundSpec, RunSpec
from guava_nb.protocol.tensor_bounds import ITEM_BYTES
from guava_nb.replica.buckets import message_format
from guava_nb.replica.model.resident import held
from guava_nb.row_cache.policy import WorkerCaches
from guava_nb.spec.cells import resolve
from guava_nb.spec.changed_code import CodeHere
from guava_nb.spec.round_options import SPARSE_METHODS
from guava_nb.spec.run_spec import mode_of
from guava_nb.sync.replica_set import ReplicaSet
from guava_nb.training.byte_budget import Budget, Costs, Limit, refuse_small
from guava_nb.training.plan import TrainingPlan

__all__ = ["Composed", "PlannedRun", "budget_of", "forecast_of", "guessed_feeds", "sync_work", "unchanged_randomness"]


@dataclass(slots=True)
class Composed:
    """The record of a run, and what it was made of."""

    spec: RunSpec
    shared: ModuleType | None
    own: list[DataSpec]
    validation: Callable[[], Validation]
    code: CodeHere | None = None

    @property
    def validating(self) -> tuple[Callable[[], Validation], tuple[tuple[str, ...], bool]]:
        """What makes a validation; names of the metrics that it measures, and whether it has an accuracy."""
        return self.validation, (tuple(one.name for one in self.spec.metrics), self.spec.step is None)


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """A run that may be begun.

    Attributes:
        replica_set, plan, composed: of it.
        workers: how many take part.
        trained: its state at the start has an optimizer's.
        budget_bytes: 0 without a budget.
        caches: what the workers of the session hold.
    """

    replica_set: ReplicaSet
    plan: TrainingPlan
    composed: Composed
    workers: int
    trained: bool
    budget_bytes: int
    caches: WorkerCaches

    @classmethod
    def about_to_begin(
        cls, replica_set: ReplicaSet, plan: TrainingPlan, composed: Composed, cluster: Cluster, budget_bytes: int = 0
    ) -> PlannedRun:
        """Return the run that these replicas are about to begin."""
        workers = len(replica_set.pick(set(cluster.roster.ready())))
        trained = replica_set.step >= 0 or bool(replica_set.master.optimizer.state)
        return cls(replica_set, plan, composed, workers, trained, budget_bytes, cluster.caches)

    def resolve(self, name: str) -> Any:
        """Return what a name in the record stands for, here."""
        return held(name) if name.startswith("@") else resolve(name, self.composed.shared)

    def facts(self) -> RunFacts:
        """Look at the first batches of both loaders."""
        given = self.composed.spec.data
        known = all(spec.length >= 0 for spec in given) and bool(given or not self.composed.own)
        train = peeked(self.plan.feed, self.plan.batches_per_exchange, known)
        val = None if self.plan.val_feed is None else peeked(self.plan.val_feed, 1, known)
        return RunFacts(
            self.replica_set, self.plan, self.replica_set.spec, self.workers, self.resolve, train, val,
            self._held_share(train), self.trained,
        )  # fmt: skip

    def _held_share(self, sizes: Sizes) -> float:
        """Which part of the first samples some worker holds already."""
        if self.composed.spec.cache is None:
            return 0.0
        splitter = RowSplitter(self.plan.split_fn, self.plan.feed.reading)
        apart = [rows_of(batch, splitter) for group in sizes.groups for batch in group]
        keys = [key for rows in apart if rows is not None for key in rows.keys]
        return sum(any(key in held for held in self.caches.values()) for key in keys) / max(1, len(keys))


def guessed_feeds(loaders: tuple[Any, Any], batch: str | None = None) -> tuple[LoaderFeed, LoaderFeed | None]:
    """Return feeds to look at; of data that lies at the workers, ids of a batch, since no worker was asked how much it has.

    `batch` says how batches are read, as for `LoaderFeed`.
    """

    def feed(loader: Any, number: int) -> LoaderFeed:
        return (
            LoaderFeed(loader.loader(loader.batch_size), number)
            if isinstance(loader, WorkerData)
            else LoaderFeed(loader, batch=batch)
        )

    train, val = loaders
    return feed(train, 1), None if val is None else feed(val, 2)


@contextmanager
def unchanged_randomness() -> Iterator[None]:
    """Give random numbers back as they were: of torch on the CPU, numpy and Python."""
    state = RandomState.take({})
    try:
        yield
    finally:
        state.put({})


def forecast_of(
    planned: PlannedRun,
    config: DistributedConfig,
    rates: tuple[float | None, float | None],
    squeezed: Squeezed = NOT_SQUEEZED,
    on_lines: Sequence[str] = (),
    sync: SyncChoice | None = None,
) -> Forecast:
    """Return the forecast of a run.

    Args:
        rates: bytes a second out and in, as far as they were measured.
        squeezed: what compression has left of the bytes in this session.
        on_lines: what is to be said of how the lines were measured.
        sync: how often to exchange, chosen or compared; None: not known.
    """
    run = planned.facts()
    left, said = squeezed_in(run, config, rates[0], squeezed)
    plain = parts_of(run)
    parts, is_local = plain.squeezed(left.of), run.spec.rounds is not None
    per_epoch = planned.plan.steps_per_epoch if is_local else parts.steps_per_epoch
    return Forecast(
        mode=mode_of(run.spec),
        workers=run.workers,
        steps=planned.plan.steps_left(run.replica_set.step) if is_local else parts.steps(),
        steps_per_epoch=per_epoch,
        start=parts.start,
        step=parts.one_step(run.train.batch_rows * parts.accumulation),
        validation=None if parts.validation is None else parts.validation.part(0),
        end=parts.end(),
        epochs=parts.every_epoch(),
        run=parts.run(),
        rates_bytes_s=rates,
        encrypted=config.tls,
        budget_bytes=planned.budget_bytes,
        savings=savings(run, plain, left.of),
        notes=(*said, *on_lines, *_notes(run, bool(planned.composed.own), config)),
        first_epoch=run.plan.start.epoch + 1,
        only_ends=parts.validation is not None and parts.epochs[0] <= 0.0,
        sync=sync,
    )


def sync_work(planned: PlannedRun, rounds: RoundSpec | None = None, wire: str = "fp32") -> SyncWork:
    """Return what a run sends and computes, as far as it matters how often it exchanges.

    `rounds` are those that a run with an exchange in every step may be trained in instead, with messages in the format `wire`.
    """
    run, plan = planned.facts(), planned.plan
    parts, layout, left = parts_of(run), run.replica_set.master.layout, plan.steps_left(run.replica_set.step)
    whole, exchanges, batches = parts.run(), parts.steps(), plan.feed.batches_per_epoch
    work = SyncWork(
        samples=run.train.batch_rows * plan.accumulation_steps,
        sample_bytes=parts.train.row.out_bytes,
        up_bytes=parts.step.in_bytes / run.workers,
        down_bytes=parts.step.out_bytes / run.workers,
        buckets=max(1, len(layout.buckets)),
        other_bytes=whole.total_bytes - parts.step.total_bytes * exchanges if whole and exchanges is not None else None,
        steps=left,
        steps_per_epoch=batches and -(-batches // plan.accumulation_steps),
        sync_delay=0 if run.spec.rounds is None else run.spec.rounds.sync_delay,
    )
    return replace(work, **_of_rounds(run, rounds, wire))


def _of_rounds(run: RunFacts, rounds: RoundSpec | None, wire: str) -> dict[str, Any]:
    """Return what the exchange of a round is where it is another one than that of a step, by name."""
    if run.spec.rounds is not None and run.spec.rounds.outer in SPARSE_METHODS:  # a step would send all
        step, dense = parts_of(run).step, float(run.replica_set.master.weights_bytes)
        return {
            "up_bytes": dense,
            "down_bytes": dense,
            "round_up_bytes": step.in_bytes / run.workers,
            "round_down_bytes": step.out_bytes / run.workers,
        }
    if run.spec.rounds is not None or rounds is None:
        return {}
    wire_format, _ = message_format(msgspec.structs.replace(run.spec, rounds=rounds, wire=wire))
    layout, is_sparse = run.replica_set.master.layout, rounds.outer in SPARSE_METHODS
    forms = [replace(bucket, wire=wire_format).form(bucket.numel) for bucket in layout.buckets]
    up = sum(form.numel * ITEM_BYTES[form.dtype] for form in forms)
    return {
        "round_up_bytes": up,
        "round_down_bytes": up * (run.workers - 1) if is_sparse else up,
        "density": rounds.density if is_sparse else None,
        "round_wire": "" if is_sparse or wire == "fp32" else wire,
    }


def budget_of(limit: Limit, planned: PlannedRun) -> Budget:
    """Return the budget of a run that is about to begin.

    Raises:
        ConfigError: not even one step and its checkpoint have room.
    """
    run = planned.facts()
    parts, shape = parts_of(run), run.spec.parallel
    step = parts.step + parts.train.batch * parts.accumulation
    passed = NOTHING if parts.validation is None else parts.validation.part(0) or NOTHING
    exchanged = ("gradient", "activation") if shape else ()
    alone, looked = step.without(*exchanged), passed.without(*exchanged)
    batches = [batch for group in run.train.groups for batch in group]
    seen, rows = sum(size_of(batch.batch) for batch in batches), sum(batch.rows for batch in batches)
    costs = Costs(
        start=parts.start.total_bytes / max(1, run.workers),
        state=parts.state.total_bytes,
        step=alone.total_bytes,
        batch_times=max(1.0, parts.train.row.total_bytes * rows / seen if seen else float(run.workers)),
        validation=looked.total_bytes,
        workers=run.workers,
        exchanged=step.total_bytes - alone.total_bytes,
        validation_exchanged=passed.total_bytes - looked.total_bytes,
    )
    budget = Budget(limit, costs)
    first = budget.batches_cost(run.train.groups[0]) if run.train.groups else 0.0
    relayed = shape is None or shape.path == "relay"  # else it is not known before the group is formed
    needed = costs.step + (costs.exchanged if relayed else 0.0) + first
    refuse_small(limit, parts.start.total_bytes, needed, costs.state, run.workers)
    return budget


def _notes(run: RunFacts, own: bool, config: DistributedConfig) -> Iterator[str]:
    shape = run.spec.parallel
    if not run.train.groups:
        yield "The loader is an iterator that can be drawn once only, so no batch was looked at: samples are not counted."
    if own:
        yield "How many samples lie at the workers is known when the run asks them; here their ids are counted per step."
    if run.spec.rounds is not None:
        yield f"With sync='local' what is told of a step is that of a round of up to {run.plan.sync_every} steps: one exchange."
    if shape is not None and shape.path != "relay":
        yield (
            "Counted by way of the orchestrator (path relay); where the workers reach each other directly, "
            "what they exchange does not pass here."
        )
    elif (
        shape is None
        and run.spec.rounds is None
        and run.workers > 1
        and config.path == "auto"
        and torch.cuda.is_available()
    ):
        yield "Where all workers have GPUs and reach each other, gradients do not pass here."
