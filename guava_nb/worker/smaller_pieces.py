"""What a worker does where its part of a step does not fit the memory: smaller pieces, or advice.

Knows batches and how they are cut; knows nothing of steps in flight or messages that are sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from guava_nb.data.batch_reading import BatchReading
from guava_nb.errors import TrainingError
from guava_nb.nested import marks_of
from guava_nb.protocol.messages import BatchShard
from guava_nb.replica.one_step_check.causes import COUPLED, TREATED, WEIGHTS
from guava_nb.replica.one_step_check.whole_against_cut import compare
from guava_nb.replica.preprocess import cut, cut_at
from guava_nb.replica.shard import ShardWork
from guava_nb.worker.preparation import PreparedRun

__all__ = ["axes_for", "memory_advice", "refuse_coupled", "work_of"]


def memory_advice(run: PreparedRun | None, request: int, rows: int, pieces: int) -> str:
    """Say what helps where memory ran out: only whole replicas cut a step's part into smaller pieces.

    Args:
        run: that runs here.
        request: number of the `Evaluate` or `Predict`, 0 in training.
        rows: samples of the shard in work.
        pieces: into how many it was cut.
    """
    if request:
        return "Here a batch of a validation or prediction does not fit: give a loader with smaller batches"
    if run is not None and run.spec.parallel is not None:
        pipeline = ", more micro-batches" if run.spec.parallel.pp > 1 else ""
        return (
            "This worker's part of the step does not fit here, and all workers of this mode compute theirs at one time, so "
            f"it cannot be cut: use smaller batches with accumulation_steps{pipeline}, activation checkpointing, a lower "
            "precision or more workers"
        )
    if pieces < rows:
        return (
            f"This worker's part of the batch, {rows} samples, does not fit here and cannot be cut further: use smaller "
            "batches, more workers, a lower precision or another device"
        )
    return "One sample alone does not fit here: use a smaller model, lower precision or another device"


def refuse_coupled(run: PreparedRun, batch: Any, rows: int, marks: bytes) -> None:
    """See on a few samples whether a batch may be cut.

    Args:
        run: whose model and loss are looked at.
        batch: of any nesting.
        rows: samples in it.
        marks: along which axes its parts may be cut.

    Raises:
        TrainingError: pieces come to another loss than the whole.
    """
    few = min(rows, 8)
    if few < 2:
        return
    pieces = cut_at(batch, marks, [(0, few), (0, few // 2), (few // 2, few)])
    found = compare(run.replica, run.spec, run.resolve, pieces, (few, few // 2, few - few // 2))
    if found.outcome == "piece failed" or {COUPLED, TREATED, WEIGHTS} & set(found.causes):
        raise TrainingError(
            f"a batch of {rows} samples does not fit the memory here, and in pieces it comes to another loss, because its "
            f"samples depend on each other ({found.loss[0]:.6g} whole and {found.loss[1]:.6g} in two pieces, of {few} samples"
            f"{found.problem and ', ' + found.problem}): give smaller batches, or more workers with gather_batch in the loss"
        )


def axes_for(message: BatchShard, parts: Sequence[Any], rows: Sequence[int]) -> Sequence[bytes]:
    """Return how the parts of a shard may be cut further; empty where they must not. What was loaded here is read here.

    Args:
        message: the shard.
        parts: as they came or were loaded here.
        rows: samples of each part.
    """
    if not message.source:
        return message.axes
    readings = [BatchReading() for _ in parts]
    for reading, part, count in zip(readings, parts, rows, strict=True):
        reading.read(part, count)
    if any(reading.problem for reading in readings):
        return ()
    return [marks_of(part, one.axes(count)) for one, part, count in zip(readings, parts, rows, strict=True)]


def work_of(message: BatchShard, parts: Sequence[Any], rows: Sequence[int], num_pieces: int) -> ShardWork:
    """Return a shard's work, its parts cut into so many pieces each, where they can be cut.

    Args:
        message: the shard.
        parts: as they came or were loaded here.
        rows: samples of each part.
        num_pieces: into how many each is cut; 1: as it is.
    """
    pieces, steps = list(zip(parts, rows, strict=True)), message.part_steps
    if num_pieces > 1 and (axes := axes_for(message, parts, rows)):
        finer = [list(cut(part, marks, count, num_pieces)) for (part, count), marks in zip(pieces, axes, strict=True)]
        pieces = [piece for some in finer for piece in some]
        if steps:
            steps = tuple(step for some, step in zip(finer, steps, strict=True) for _ in some)
    return ShardWork(
        message.step, message.shard, [part for part, _ in pieces], message.rows, message.global_rows,
        [count for _, count in pieces], is_cut=num_pieces > 1, axes=message.axes, part_steps=steps,
        num_steps=message.num_steps, local_batches=message.local_batches, generation=message.generation,
        buffers=message.buffers,
    )  # fmt: skip
