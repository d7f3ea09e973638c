"""From what a run would be to its forecast: which parts it has in its mode, and what would make them smaller."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from guava_nb.cluster.traffic import NOTHING
from guava_nb.config import DistributedConfig
from guava_nb.config.units import show_bytes
from guava_nb.data.codec import pack
from guava_nb.data.loader_feed import Feed, LoadedBatch
from guava_nb.data.randomness import RandomState
from guava_nb.data.rows import NotSeparable, Rows
from guava_nb.data.sizes import size_of
from guava_nb.data.split import RowSplitter
from guava_nb.data.worker_data import WorkerData
from guava_nb.errors import ConfigError
from guava_nb.evaluation.validation import Validation
from guava_nb.forecast.compression import NOT_SQUEEZED, Squeezed, tried
from guava_nb.forecast.forecast import Forecast, Parts
from guava_nb.forecast.savings import savings
from guava_nb.forecast.star_bytes import Sizes, peeked, star_parts
from guava_nb.forecast.state_bytes import Asked
from guava_nb.protocol.messages import DataSpec, RunSpec
from guava_nb.replica.resident import held
from guava_nb.row_cache.policy import WorkerCaches
from guava_nb.spec import cells as source
from guava_nb.spec.run_spec import mode_of
from guava_nb.sync.replica_set import ReplicaSet
from guava_nb.training.byte_budget import Budget, Costs, Limit, refuse_small
from guava_nb.training.plan import TrainingPlan

__all__ = ["Composed", "PlannedRun", "budget_of", "forecast_of", "guessed_feeds", "parts_of", "unchanged_randomness"]


@dataclass(slots=True)
class Composed:
    """The record of a run, and what it was made of."""

    spec: RunSpec
    shared: ModuleType | None
    own: list[DataSpec]
    validation: Callable[[], Validation]


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

    def resolve(self, name: str) -> Any:
        """Return what a name in the record stands for, here."""
        return held(name) if name.startswith("@") else source.resolve(name, self.composed.shared)

    def sizes(self) -> tuple[Sizes, Sizes | None]:
        """Look at the first batches of both loaders."""
        known = all(spec.length >= 0 for spec in self.composed.spec.data) and not (
            self.composed.own and not self.composed.spec.data
        )
        train = peeked(self.plan.feed, self.plan.accumulation_steps, known)
        return train, None if self.plan.val_feed is None else peeked(self.plan.val_feed, 1, known)

    def asked(self, sizes: Sizes) -> Asked:
        """What the parts are measured for."""
        return Asked(
            self.replica_set, self.plan, self.workers, self.replica_set.spec, self._held_share(sizes), self.trained
        )

    def _held_share(self, sizes: Sizes) -> float:
        """Which part of the first samples some worker holds already."""
        if self.composed.spec.cache is None:
            return 0.0
        keys = [key for group in sizes.groups for batch in group for key in _keys(batch)]
        if not keys:
            return 0.0
        return sum(any(key in of for of in self.caches.of.values()) for key in keys) / len(keys)


def _keys(batch: LoadedBatch) -> list[bytes]:
    try:
        return [] if batch.source else Rows(batch.batch, batch.rows, RowSplitter()).keys
    except (NotSeparable, ConfigError):
        return []


def guessed_feeds(loaders: tuple[Any, Any]) -> tuple[Feed, Feed | None]:
    """Return feeds to look at; of data that lies at the workers, ids of a batch, since nobody was asked how much there is."""
    made: list[Feed | None] = []
    for number, loader in enumerate(loaders, start=1):
        if isinstance(loader, WorkerData):
            made.append(Feed(loader.loader(loader.batch_size), number))
        else:
            made.append(None if loader is None else Feed(loader))
    train, val = made
    assert train is not None
    return train, val


def _first_rows(batch: LoadedBatch, rows: int) -> Any:
    return RowSplitter().split(batch.batch, [(0, min(rows, batch.rows))], batch.rows)[0]


@contextmanager
def unchanged_randomness() -> Iterator[None]:
    """Give random numbers back as they were: of torch on the CPU, numpy and Python."""
    state = RandomState.take({})
    try:
        yield
    finally:
        state.put({})


def parts_of(planned: PlannedRun, train: Sizes, val: Sizes | None) -> Parts:
    """Return what the run consists of, in its mode."""
    asked = planned.asked(train)
    if asked.spec.parallel is None:
        return star_parts(asked, planned.resolve, train, val)
    from guava_nb.forecast.group_bytes import group_parts  # torch's parallel libraries cost a second to load

    return group_parts(asked, planned.resolve, train, val)


def forecast_of(
    planned: PlannedRun,
    config: DistributedConfig,
    rates: tuple[float | None, float | None],
    squeezed: Squeezed = NOT_SQUEEZED,
    on_lines: Sequence[str] = (),
) -> Forecast:
    """Return the forecast of a run.

    Args:
        rates: bytes a second out and in, as far as they were measured.
        squeezed: what compression has left of the bytes in this session.
        on_lines: what is to be said of how the lines were measured.
    """
    train, val = planned.sizes()
    left, said = _compression(planned, train, config, rates, squeezed)
    plain = parts_of(planned, train, val)
    parts = plain.squeezed(left.of)
    spec = planned.composed.spec
    epochs = [parts.epoch(number) for number in range(len(parts.epochs))]
    passed = None if parts.validation is None else parts.validation.part(0)
    return Forecast(
        mode=mode_of(spec),
        workers=planned.workers,
        steps=parts.steps(),
        steps_per_epoch=parts.steps_per_epoch,
        start=parts.start,
        step=parts.one_step(train.batch_rows * parts.accumulation),
        validation=passed,
        end=parts.end(),
        epochs=tuple(epoch for epoch in epochs if epoch is not None),
        run=parts.run(),
        rates_bytes_s=rates,
        encrypted=config.tls,
        budget_bytes=planned.budget_bytes,
        savings=savings(planned.asked(train), plain, planned.resolve, train, val, left.of),
        notes=(*said, *on_lines, *_notes(planned, train, config)),
        first_epoch=planned.plan.start.epoch + 1,
        only_ends=parts.validation is not None and parts.epochs[0] <= 0.0,
    )


def _compression(
    planned: PlannedRun,
    train: Sizes,
    config: DistributedConfig,
    rates: tuple[float | None, float | None],
    squeezed: Squeezed,
) -> tuple[Squeezed, list[str]]:
    """What compression leaves of the run's bytes, and the sentence on it."""
    if config.compression == "off":
        return NOT_SQUEEZED, []
    measured = sorted({*squeezed.out, *squeezed.back})
    if measured:
        return squeezed, [
            f"Compression as it was in this session so far ({', '.join(measured)}); all else counts in full."
        ]
    trial = None
    if train.groups:
        share = max(1, round(train.batch_rows / planned.workers)) if planned.composed.spec.parallel is None else None
        _, buffers = pack(train.groups[0][0].batch if share is None else _first_rows(train.groups[0][0], share))
        trial = tried(buffers)
    if trial is None or not trial.pays_below_bytes_s:
        return NOT_SQUEEZED, ["Counted without compression, which would not make these batches smaller."]
    told = f"samples compress to {trial.share:.0%}, which a line slower than {show_bytes(round(trial.pays_below_bytes_s))}/s uses"
    if config.compression == "on" or (rates[0] is not None and rates[0] < trial.pays_below_bytes_s):
        return Squeezed({"sample": trial.share}, {}), [
            f"Compression is reckoned for samples: {told}; all else counts in full."
        ]
    return NOT_SQUEEZED, [f"Counted without compression: {told}; gradients and states may take less, too."]


def budget_of(limit: Limit, planned: PlannedRun) -> Budget:
    """Return the budget of a run that is about to begin.

    Raises:
        ConfigError: not even one step and its checkpoint have room.
    """
    train, val = planned.sizes()
    parts = parts_of(planned, train, val)
    spec, workers = planned.composed.spec, planned.workers
    step = parts.step + parts.train.batch * parts.accumulation
    passed = NOTHING if parts.validation is None else parts.validation.part(0) or NOTHING
    alone, looked = (part.without("gradient", "activation") if spec.parallel else part for part in (step, passed))
    seen = sum(size_of(batch.batch) for group in train.groups for batch in group)
    rows = sum(batch.rows for group in train.groups for batch in group)
    costs = Costs(
        start=parts.start.total_bytes / max(1, workers),
        state=parts.state.total_bytes,
        step=alone.total_bytes,
        batch_times=max(1.0, parts.train.row.total_bytes * rows / seen if seen else float(workers)),
        validation=looked.total_bytes,
        workers=workers,
        exchanged=step.total_bytes - alone.total_bytes,
        validation_exchanged=passed.total_bytes - looked.total_bytes,
    )
    budget = Budget(limit, costs)
    first = budget.batches_cost(train.groups[0]) if train.groups else 0.0
    relayed = spec.parallel is None or spec.parallel.path == "relay"  # else nobody knows before the group is formed
    needed = costs.step + (costs.exchanged if relayed else 0.0) + first
    refuse_small(limit, parts.start.total_bytes, needed, costs.state, workers)
    return budget


def _notes(planned: PlannedRun, train: Sizes, config: DistributedConfig) -> Iterator[str]:
    spec = planned.composed.spec
    if not train.groups:
        yield "The loader is an iterator that can be drawn once only, so no batch was looked at: samples are not counted."
    if planned.composed.own:
        yield "How many samples lie at the workers is known when the run asks them; here their ids are counted per step."
    if spec.parallel is not None and spec.parallel.path != "relay":
        yield (
            "Counted by way of the orchestrator (path relay); where the workers reach each other directly, "
            "what they exchange does not pass here."
        )
    elif spec.parallel is None and planned.workers > 1 and config.path == "auto" and torch.cuda.is_available():
        yield "Where all workers have GPUs and reach each other, gradients do not pass here."
