"""What the batches of a loader take: the run's own orders are made of the first ones and weighed, not sent."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from guava_nb.cluster.traffic import NOTHING, Traffic
from guava_nb.data.loader_feed import LoadedBatch
from guava_nb.data.rows import KEY_BYTES
from guava_nb.data.split import RowSplitter, share_ranges
from guava_nb.evaluation.batch_orders import BatchOrders
from guava_nb.forecast.forecast import Feeding
from guava_nb.forecast.run_facts import STEP, RunFacts, Sizes, rows_of
from guava_nb.protocol.messages import CacheSpec, Evaluated, RunSpec
from guava_nb.row_cache.policy import CachePolicy, WorkerCaches, cost_function, deal
from guava_nb.row_cache.writer import OutgoingBatch, RowWriter
from guava_nb.sync.group_exchange import shares_of, tasks_of
from guava_nb.sync.step_in_flight import StepHead, plan_step

__all__ = ["training_batches", "travelling", "validation_batches", "writer_for"]

# Which part of the samples travels in each epoch where workers keep them: the real rules, played with row numbers.
#
# Pure: knows numbers of rows and `row_cache.policy`; knows no data and no worker.

#: Rows that are played at most; of larger data sets a part stands for all, with as much less room to keep them.
_MOST_ROWS = 12_000
#: Epochs that are played; in later ones about as much travels as in the last of these.
_MOST_EPOCHS = 6


def travelling(
    cache: CacheSpec, row_bytes: int, rows: int, batch_rows: int, weights: Sequence[float], epochs: int, shuffled: bool
) -> tuple[float, ...]:
    """Return which part of the samples travels in each epoch, 0 to 1.

    Args:
        cache: where each worker keeps samples, and in how many bytes.
        row_bytes: of one entry.
        rows: samples of an epoch; batch_rows: of a batch.
        weights: shares of the workers.
        shuffled: another order in each epoch.
    """
    batch_rows = max(1, min(batch_rows, rows))
    played = min(rows, max(_MOST_ROWS // batch_rows, 1) * batch_rows)
    held = [CachePolicy(cache.budget_bytes * played // max(1, rows), cost_function(cache.mode)) for _ in weights]
    found = []
    for epoch in range(min(epochs, _MOST_EPOCHS)):
        for one in held:
            one.next_pass()
        order = list(range(played))
        if shuffled:
            random.Random(epoch).shuffle(order)
        sent = sum(_sent(order[at : at + batch_rows], held, weights, row_bytes) for at in range(0, played, batch_rows))
        found.append(sent / max(1, played))
    return tuple(found)


def _sent(batch: Sequence[int], held: Sequence[CachePolicy], weights: Sequence[float], row_bytes: int) -> int:
    """Deal one batch as a step does; returns how many of its rows travel."""
    keys = [row.to_bytes(4, "little") for row in batch]
    holders = [[place for place, one in enumerate(held) if key in one] for key in keys]
    counts = [last - first for first, last in share_ranges(len(batch), list(weights))]
    sent = 0
    for one, rows in zip(held, deal(holders, counts), strict=True):
        sent += len(one.order([keys[row] for row in rows], [row_bytes] * len(rows)).to_send())
    return sent


#: Rank, record, what it holds, and the rows that count: rows count once, though several ranks may get them.
_Order = tuple[int, Any, OutgoingBatch, int]


def writer_for(spec: RunSpec, workers: int) -> RowWriter:
    """Return a writer of the run for workers that exist only in the forecast and hold nothing yet."""
    caches: WorkerCaches = {}
    if spec.cache is not None:
        cost = cost_function(spec.cache.mode)
        caches = {rank: CachePolicy(spec.cache.budget_bytes, cost) for rank in range(workers)}
    return RowWriter(spec, caches, lambda sentence: None)


def training_batches(run: RunFacts, exchanged: Traffic = NOTHING) -> Feeding:
    """Return what the batches of training take; `exchanged`: between the ranks of a group, for a batch."""
    mesh, team, plan = run.mesh, tuple(range(run.workers)), run.plan
    splitter = RowSplitter(plan.split_fn, plan.feed.reading)
    per_step = 0 if run.spec.rounds is None else run.spec.rounds.batches_per_step
    head = StepHead(run.replica_set.run_id, 1, STEP, solo=run.solo, batches_per_step=per_step)
    weights = plan.weights(team)

    def orders(group: Sequence[LoadedBatch], writer: RowWriter) -> Iterable[_Order]:
        if run.spec.parallel is None:
            tasks, shards = plan_step(head, group, team, weights, splitter, writer)
            return [(task.owner, *shard, task.rows) for task, shard in zip(tasks, shards, strict=True)]
        shares = shares_of(group, mesh, weights[:: mesh.stages * mesh.tensor], splitter)
        wants_whole = run.spec.wants_whole_batches
        tasks, shards = tasks_of(head, mesh, team, shares, wants_whole, writer, splitter)
        rows = sum(batch.rows for batch in group)
        return [(task.owner, *shard, 0 if task.index else rows) for task, shard in zip(tasks, shards, strict=True)]

    travel = (1.0, float(plan.feed.is_shuffled)) if run.spec.parallel else _travel(run, run.train, validating=False)
    return _feeding(run, run.train, orders, exchanged, travel)


def validation_batches(run: RunFacts, exchanged: Traffic = NOTHING) -> Feeding | None:
    """Return what the batches of a validation take: whole to one worker or replica; others of a group get two rows."""
    if run.val is None:
        return None
    mesh, grouped = run.mesh, run.spec.parallel is not None
    assert run.plan.val_feed is not None
    splitter = RowSplitter(run.plan.split_fn, run.plan.val_feed.reading)

    def orders(group: Sequence[LoadedBatch], writer: RowWriter) -> Iterable[_Order]:
        made = BatchOrders(
            run.plan.validation(), run.replica_set.run_id, run.spec.preprocess is not None, writer, splitter
        )
        for batch in group:
            asked = made.shared(STEP, batch, mesh) if grouped else [made.whole(STEP, batch)]
            yield from ((rank, *order, 0 if rank else batch.rows) for rank, order in enumerate(asked))

    answers = (run.back(Evaluated, correct=100) + run.acks(1, 1)) * (mesh.size if grouped else 1)
    travel = (1.0,) if grouped else _travel(run, run.val, validating=True)
    return _feeding(run, run.val, orders, answers + exchanged, travel)


def _feeding(
    run: RunFacts,
    sizes: Sizes,
    orders: Callable[[Sequence[LoadedBatch], RowWriter], Iterable[_Order]],
    answers: Traffic,
    travel: tuple[float, ...],
) -> Feeding:
    """Weigh the orders of the first batches as they go the first time, and as they go when their rows are held.

    Args:
        orders: makes those of the batches of a step.
        answers: what else a batch takes.
        travel: see `Feeding`; where no row has a key, all of them travel always.
    """
    writer, kind = writer_for(run.spec, run.workers), "sample"
    rows = named = payload = 0
    head = held = 0.0  # records and headers, keys left out
    for group in sizes.groups:
        written = [(order, *writer.write(*order[:3])) for order in orders(group, writer)]
        for (rank, record, outgoing, count), first, buffers in written:
            nbytes, keys = _size(buffers), sum(len(part.keys) // KEY_BYTES for part in first.cached)
            sent = run.sent(first, nbytes)
            again, left = writer.write(rank, record, outgoing)
            kind = "sample" if sent.of("sample") else "control"
            head += sent.total_bytes - nbytes - keys * (KEY_BYTES + 1)
            held += run.sent(again, _size(left)).total_bytes - keys * (KEY_BYTES + 1)
            rows, named, payload = rows + count, named + keys, payload + nbytes
    batches, rows = max(1, sum(map(len, sizes.groups))), max(1, rows)
    # What does not depend on rows (a mask for all samples) counts as if it did: full batches are right.
    return Feeding(
        sizes.batches, sizes.rows,
        batch=Traffic.going(kind, head / batches) + answers,
        row=Traffic.going(kind, payload / rows),
        held=Traffic.going("control", held / batches) + answers,
        key=(KEY_BYTES + 1) * named / rows,
        travel=travel if named else (1.0,),
    )  # fmt: skip


def _size(buffers: Sequence[memoryview]) -> int:
    return sum(buffer.nbytes for buffer in buffers)


def _travel(run: RunFacts, sizes: Sizes, validating: bool) -> tuple[float, ...]:
    """Which part of the samples travels to whole replicas in each pass."""
    cache, rows = run.spec.cache, sizes.rows
    feed = run.plan.val_feed if validating else run.plan.feed
    assert feed is not None
    splitter = RowSplitter(run.plan.split_fn, feed.reading)
    first = sizes.first
    apart = None if cache is None or rows is None or first is None else rows_of(first, splitter)  # looks at every row
    if cache is None or rows is None or apart is None:
        return (1.0,)
    entry = round(sum(apart.sizes) / max(1, len(apart.sizes)))
    if (
        validating
    ):  # a batch goes to the worker that holds it, so nothing travels twice as long as the workers have room
        fits = rows * cost_function(cache.mode)(entry) <= cache.budget_bytes * run.workers
        return (1.0, 0.0 if fits else 1.0)
    plan, weights = run.plan, run.plan.weights(range(run.workers))
    epochs = plan.num_epochs - plan.start.epoch + 1
    found = travelling(cache, entry, round(rows), round(sizes.batch_rows), weights, epochs, plan.feed.is_shuffled)
    return found[1:] if run.held_before > 0.9 else found  # an earlier run has sent them
