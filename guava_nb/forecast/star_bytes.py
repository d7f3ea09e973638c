"""What a run consists of, measured: its own records are made of its first batches and its model, and weighed, not sent.

Whole replicas here; models that are spread over a group in `forecast_group`. Nothing is started and nothing is changed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import msgspec
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from guava_nb.cluster.cluster import Cluster
from guava_nb.cluster.traffic import NOTHING, Gauge, Traffic
from guava_nb.data.loader_feed import Feed, LoadedBatch
from guava_nb.data.rows import KEY_BYTES, NotSeparable, Rows
from guava_nb.data.split import RowSplitter
from guava_nb.errors import ConfigError
from guava_nb.forecast.cached_rows import travelling
from guava_nb.forecast.forecast import Feeding, Parts
from guava_nb.forecast.state_bytes import HASH, STEP, Asked, coming_state, starting, trained_state
from guava_nb.protocol.messages import (
    Commit,
    CommitStep,
    Committed,
    Evaluated,
    FlatTensor,
    GradientBucket,
    Ready,
    RunSpec,
    StepInfo,
    SumBucket,
    Tree,
)
from guava_nb.replica.buckets import Bucket
from guava_nb.row_cache.policy import CachePolicy, WorkerCaches, cost_function
from guava_nb.row_cache.writer import OutgoingBatch, RowSlice, RowWriter
from guava_nb.sync.step_in_flight import plan_step

__all__ = [
    "Sizes",
    "Weighed",
    "epochs_of",
    "feeding_of",
    "moving_elements",
    "peeked",
    "star_parts",
    "validating_of",
    "weigh",
    "writer_for",
]

#: Loader batches that are looked at.
_PEEKED = 4


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the first batches of a loader are like.

    Attributes:
        groups: batches of an optimizer step each; none where the loader can be drawn once only.
        batches, rows: of an epoch; None where the loader cannot tell.
    """

    groups: tuple[tuple[LoadedBatch, ...], ...]
    batches: int | None
    rows: float | None

    @property
    def batch_rows(self) -> float:
        """Samples of a whole loader batch: the largest of those that were looked at."""
        return max((batch.rows for group in self.groups for batch in group), default=0)


def peeked(feed: Feed, accumulation: int, lengths_known: bool = True) -> Sizes:
    """Look at the first batches of a loader, which stays as it is."""
    total = feed.batches_per_epoch if lengths_known else None
    wanted = max(accumulation, _PEEKED // accumulation * accumulation)
    batches = [batch for batch in feed.peek(wanted if total is None else min(wanted, total)) if batch.rows]
    groups = [tuple(batches[at : at + accumulation]) for at in range(0, len(batches), accumulation)]
    whole = [group for group in groups if len(group) == accumulation] or groups
    rows: float | None = feed.samples_per_epoch if lengths_known else None
    if rows is None and total is not None and batches:
        rows = total * sum(batch.rows for batch in batches) / len(batches)
    return Sizes(tuple(whole), total if batches else None, rows)


# ------------------------------------------------------------------------------------------------------------- batches


def writer_for(spec: RunSpec, workers: int) -> RowWriter:
    """A writer of the run to nobody, whose workers hold nothing yet."""
    caches = WorkerCaches()
    if spec.cache is not None:
        cost = cost_function(spec.cache.mode)
        caches.of = {rank: CachePolicy(spec.cache.budget_bytes, cost) for rank in range(workers)}
    nobody = SimpleNamespace(caches=caches, notice=lambda sentence: None, name=str)
    return RowWriter(spec, cast(Cluster, nobody))


@dataclass(slots=True)
class Weighed:
    """Messages of batches: their bytes, as samples and as orders."""

    batches: int = 0
    rows: int = 0
    head: float = 0.0  # records and headers, keys left out
    held: float = 0.0  # the same, where no row travels
    payload: float = 0.0
    named: int = 0  # rows that have a key
    sizes: float = 0.0  # of their entries
    as_orders: bool = False

    def add(self, first: tuple[Any, int], again: tuple[Any, int], gauge: Gauge, rows: int) -> None:
        """Take one message as it goes the first time, and as it goes when its rows are held."""
        named = sum(len(part.keys) // KEY_BYTES for part in first[0].cached)
        sent = gauge.out(*first)
        self.as_orders = not sent.of("sample")
        self.head += sent.total_bytes - first[1] - named * (KEY_BYTES + 1)
        self.held += gauge.out(*again).total_bytes - named * (KEY_BYTES + 1)
        self.payload += first[1]
        self.rows += rows
        self.named += named

    def feeding(self, sizes: Sizes, answers: Traffic, travel: tuple[float, ...]) -> Feeding:
        """The loader whose batches these are; `answers`: to one batch."""
        count, kind = max(1, self.batches), "control" if self.as_orders else "sample"
        # What does not depend on rows (a mask for all samples) counts as if it did: full batches are right.
        return Feeding(
            sizes.batches,
            sizes.rows,
            Traffic.going(kind, self.head / count) + answers,
            Traffic.going(kind, self.payload / max(1, self.rows)),
            Traffic.going("control", self.held / count) + answers,
            (KEY_BYTES + 1) * self.named / max(1, self.rows),
            travel,
        )


def _size(buffers: Sequence[memoryview]) -> int:
    return sum(buffer.nbytes for buffer in buffers)


def weigh(
    writer: RowWriter, orders: Sequence[tuple[int, Any, OutgoingBatch, int]], weighed: Weighed, gauge: Gauge
) -> None:
    """Weigh records with their parcels: (rank, record, parcel, rows) each."""
    written = [(writer.write(rank, message, parcel), rows) for rank, message, parcel, rows in orders]
    for (rank, message, parcel, _), ((first, buffers), rows) in zip(orders, written, strict=True):
        again, left = writer.write(rank, message, parcel)
        weighed.add((first, _size(buffers)), (again, _size(left)), gauge, rows)


def feeding_of(asked: Asked, sizes: Sizes, gauge: Gauge, solo: bool) -> Feeding:
    """Return what the batches of training take: the run's own shards, weighed."""
    weights = asked.plan.weights(range(asked.workers))
    team, weighed = tuple(range(asked.workers)), Weighed()
    writer, splitter = writer_for(asked.spec, asked.workers), RowSplitter(asked.plan.split_fn)
    for group in sizes.groups:
        tasks, shards = plan_step(
            asked.replica_set.run_id, 1, STEP, group, team, weights, solo=solo, want_hash=False, splitter=splitter,
            writer=writer,
        )  # fmt: skip
        orders = [(task.owner, *shard, task.rows) for task, shard in zip(tasks, shards, strict=True)]
        weigh(writer, orders, weighed, gauge)
        weighed.batches += len(group)
    return weighed.feeding(sizes, NOTHING, _travel(asked, sizes, weights))


def _travel(asked: Asked, sizes: Sizes, weights: Sequence[float]) -> tuple[float, ...]:
    """Which part of the samples travels in each epoch."""
    cache, rows = asked.spec.cache, sizes.rows
    entry = None if cache is None or rows is None else _entry_bytes(sizes)  # looks at every row
    if cache is None or entry is None or rows is None:
        return (1.0,)
    found = travelling(
        round(rows), round(sizes.batch_rows), weights, len(epochs_of(asked)) + 1, row_bytes=entry,
        budget_bytes=cache.budget_bytes, mode=cache.mode, shuffled=asked.plan.feed.is_shuffled,
    )  # fmt: skip
    return found[1:] if asked.held_before > 0.9 else found  # an earlier run has sent them


def _entry_bytes(sizes: Sizes) -> int | None:
    """Bytes of one sample in a worker's cache; None where samples cannot be kept one by one."""
    batch = sizes.groups[0][0] if sizes.groups else None
    if batch is None or batch.source:
        return None
    try:
        rows = Rows(batch.batch, batch.rows, RowSplitter())
    except (NotSeparable, ConfigError):
        return None
    return round(sum(rows.sizes) / max(1, len(rows.sizes)))


def validating_of(asked: Asked, sizes: Sizes, gauge: Gauge) -> Feeding:
    """Return what the batches of a validation take: each goes whole to one worker."""
    question, weighed = asked.plan.validation(), Weighed()
    writer, splitter = writer_for(asked.spec, 1), RowSplitter()
    treated = asked.spec.preprocess is not None
    for number, batch in enumerate(itertools.chain.from_iterable(sizes.groups), start=1):
        part: Any = question.part(batch.batch, treated)
        apart = part if batch.source else writer.apart(part, batch.rows, splitter)
        if isinstance(apart, Rows):
            part = RowSlice(apart, range(apart.count))
        record = question.message(asked.replica_set.run_id, number, batch.rows, Tree(b""), False)
        order = msgspec.structs.replace(record, source=batch.source)
        weigh(writer, [(0, order, OutgoingBatch([part], single=True), batch.rows)], weighed, gauge)
        weighed.batches += 1
    answer = gauge.back(
        Evaluated(run_id=asked.replica_set.run_id, request_id=1000, loss_sum=1.5, count=1.5, correct=100, rows=100)
    ) + gauge.acks(1, 1)
    return weighed.feeding(sizes, answer, _kept_travel(asked, sizes))


def _kept_travel(asked: Asked, sizes: Sizes) -> tuple[float, ...]:
    cache = asked.spec.cache
    entry = None if cache is None else _entry_bytes(sizes)
    if cache is None or entry is None or sizes.rows is None:
        return (1.0,)
    # A batch goes to whoever holds it, so nothing travels twice as long as the workers have room.
    fits = sizes.rows * cost_function(cache.mode)(entry) <= cache.budget_bytes * asked.workers
    return (1.0, 0.0 if fits else 1.0)


# ----------------------------------------------------------------------------------------------------------------- star


def star_parts(asked: Asked, resolve: Callable[[str], Any], sizes: Sizes, val_sizes: Sizes | None) -> Parts:
    """Return what a run of whole replicas that meet at the orchestrator consists of."""
    gauge, spec, plan = Gauge.of(asked.spec), asked.spec, asked.plan
    at_orchestrator = spec.optimizer_site == "orchestrator"
    solo = asked.workers == 1 and not at_orchestrator
    after = trained_state(asked.replica_set, resolve)
    back = NOTHING if at_orchestrator else coming_state(gauge, asked, after)
    return Parts(
        start=starting(gauge, asked, after) * asked.workers,
        step=_step(gauge, asked, solo, at_orchestrator),
        train=feeding_of(asked, sizes, gauge, solo),
        accumulation=plan.accumulation_steps,
        epochs=epochs_of(asked),
        validation=None if val_sizes is None else validating_of(asked, val_sizes, gauge),
        val_interval=plan.val_interval,
        state=back,
        state_every=tuple(every for every in (plan.snapshot_every_steps, plan.save_every_steps) if every),
        each_epoch=plan.snapshot_every_steps is None and asked.workers == 1,
        ends_with_state=not at_orchestrator,
    )


def epochs_of(asked: Asked) -> tuple[float, ...]:
    """What is left of each epoch."""
    start, batches = asked.plan.start, asked.plan.feed.batches_per_epoch
    left = asked.plan.num_epochs - start.epoch
    first = 1.0 - (start.batches / batches if batches else 0.0)
    return (first, *[1.0] * (left - 1))


def _step(gauge: Gauge, asked: Asked, solo: bool, at_orchestrator: bool) -> Traffic:
    """Return what a step takes beside its batches."""
    run_id, workers = asked.replica_set.run_id, asked.workers
    busy = sum(weight > 0 for weight in asked.plan.weights(range(workers)))
    every = asked.spec.hash_every_steps
    hashes = Traffic.coming("control", len(HASH) / every if every else 0.0)
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
    )
    if solo:
        done = Committed(
            run_id=run_id,
            generation=1,
            step=STEP,
            parameter_hash="",
            learning_rate=1.5,
            skipped=False,
            ready=ready,
        )
        return gauge.back(done) + hashes + gauge.acks(1, 1)
    total = (
        gauge.back(ready) * busy
        + (gauge.back(Committed(run_id=run_id, generation=1, step=STEP, parameter_hash="", learning_rate=1.5)) + hashes)
        * workers
    )
    total = total + gauge.acks(2, 2) * workers + gauge.out(StepInfo(run_id, 1, STEP)) * (workers - busy)
    layout = asked.replica_set.master.layout
    buckets = [(bucket, bucket.numel) for bucket in layout.buckets]
    if layout.buffers is not None:
        buckets.append((layout.buffers, moving_elements(asked.replica_set.master.model)))
    for bucket, numel in buckets:
        total = total + _up(gauge, run_id, bucket, numel) * busy + _down(gauge, run_id, bucket, numel) * workers
    if not buckets:
        total = total + gauge.out(CommitStep(run_id, 1, STEP, Commit(1.5, False))) * workers
    return total


def _flat(bucket: Bucket, numel: int) -> tuple[FlatTensor, bytes, int]:
    dtype = bucket.dtype
    return FlatTensor(str(dtype).removeprefix("torch."), numel), bytes(bucket.present_bytes), numel * dtype.itemsize


def _up(gauge: Gauge, run_id: str, bucket: Bucket, numel: int) -> Traffic:
    flat, present, nbytes = _flat(bucket, numel)
    return gauge.back(
        GradientBucket(
            run_id=run_id, generation=1, step=STEP, shard=0, bucket=bucket.index, present=present, tensor=flat
        ),
        nbytes,
    )


def _down(gauge: Gauge, run_id: str, bucket: Bucket, numel: int) -> Traffic:
    flat, present, nbytes = _flat(bucket, numel)
    return gauge.out(
        SumBucket(run_id=run_id, generation=1, step=STEP, bucket=bucket.index, present=present, tensor=flat), nbytes
    )


def moving_elements(model: nn.Module) -> int:
    """Return how many elements of buffers move in every step: the statistics of normalisation layers."""
    found = {
        id(buffer): buffer.numel()
        for module in model.modules()
        if isinstance(module, _NormBase)
        for buffer in module._buffers.values()
        if buffer is not None
    }
    return sum(found.values())
