"""Passes without training: validation, prediction, and the check of a batch before its first step."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from guava_nb.protocol.messages.row_records import CachedRows
from guava_nb.protocol.messages.run_records import Factory, MetricSpec
from guava_nb.protocol.messages.wire_types import Channel, Message, Tree

__all__ = [
    "CheckStep",
    "Evaluate",
    "Evaluated",
    "Finding",
    "Generated",
    "GivenUp",
    "Predict",
    "Predicted",
    "StepChecked",
    "Wanted",
]


class Evaluate(Message, frozen=True, kw_only=True):
    """Orchestrator to worker (BATCH): forward only on this batch, at the last committed state.

    When `grouped`, every member of the group gets one, and `rows` is 0 for a stand-in row. `metrics` are wanted beside
    loss and accuracy. `cached`, `axes` (at most one each) and `source` are those of `BatchShard`.
    """

    NUMBER: ClassVar[int] = 33
    CHANNEL: ClassVar[Channel] = Channel.BATCH

    run_id: str
    request_id: int
    rows: int
    batch: Tree
    grouped: bool = False
    metrics: tuple[MetricSpec, ...] = ()
    cached: tuple[CachedRows, ...] = ()
    source: int = 0
    axes: tuple[bytes, ...] = ()


class Evaluated(Message, frozen=True, kw_only=True):
    """Worker to orchestrator (BATCH): sums over the batch.

    `correct` right predictions of `scored` targets, None where accuracy has no meaning; `nll` is the negative log-likelihood
    of these targets in nats, None where the model is no language model.
    `metrics` is a list with the state of each metric after this batch alone; without a structure where none was asked for,
    or where this rank's figures do not count.
    """

    NUMBER: ClassVar[int] = 34
    CHANNEL: ClassVar[Channel] = Channel.BATCH

    run_id: str
    request_id: int
    loss_sum: float
    count: float
    correct: int | None
    rows: int
    metrics: Tree = Tree(b"")
    scored: int = 0
    nll: float | None = None


class Wanted(msgspec.Struct, frozen=True, array_like=True):
    """What comes back of a model's outputs; nothing else crosses the wire.

    Attributes:
        top_k: the best classes of each row, with their probabilities.
        threshold: rows whose best probability is below it send no classes.
        full: the probabilities of all classes too.
        raw: the outputs as they are, instead of all the above.
        step: `step(model, batch)` that gives the outputs; None calls the model on the inputs.
    """

    top_k: int = 1
    threshold: float | None = None
    full: bool = False
    raw: bool = False
    step: Factory | None = None


class Predict(Message, frozen=True, kw_only=True):
    """Orchestrator to worker (BATCH): the model's outputs on this batch, at the last committed state.

    When `grouped`, every member of the group gets one, and `rows` is 0 for a stand-in row. `cached`, `axes` (at most
    one each) and `source` are those of `BatchShard`.
    """

    NUMBER: ClassVar[int] = 80
    CHANNEL: ClassVar[Channel] = Channel.BATCH

    run_id: str
    request_id: int
    rows: int
    batch: Tree
    wanted: Wanted
    grouped: bool = False
    cached: tuple[CachedRows, ...] = ()
    source: int = 0
    axes: tuple[bytes, ...] = ()


class Predicted(Message, frozen=True):
    """Worker to orchestrator (BATCH): names to tensors, see `guava_nb.replica.outputs`; no structure without outputs."""

    NUMBER: ClassVar[int] = 81
    CHANNEL: ClassVar[Channel] = Channel.BATCH

    run_id: str
    request_id: int
    rows: int
    columns: Tree = Tree(b"")


class Generated(Message, frozen=True):
    """Worker to orchestrator (METRICS): tokens that it added to a prompt of a `Predict` in work; the answer has them all again.

    Attributes:
        number: of the prompt.
        begin: how many of the prompt's tokens were told before.
    """

    NUMBER: ClassVar[int] = 84
    CHANNEL: ClassVar[Channel] = Channel.METRICS

    run_id: str
    request_id: int
    number: int
    begin: int
    tokens: tuple[int, ...]


class GivenUp(Message, frozen=True):
    """Orchestrator to worker (CONTROL): no one waits for the answer to this `Predict` any more."""

    NUMBER: ClassVar[int] = 85

    run_id: str
    request_id: int


class CheckStep(Message, frozen=True, kw_only=True):
    """Orchestrator to worker (BATCH): compute loss and gradient of a batch whole and in pieces, and tell how they differ.

    The replica stays as it is. `batch` is a list: the whole batch, then its pieces; `rows` has the samples of each.
    `source` is that of `BatchShard`. With `has_weights` the list ends with the state of the model that is compared, where it
    lies in parts at the workers and is not as built.
    """

    NUMBER: ClassVar[int] = 82
    CHANNEL: ClassVar[Channel] = Channel.BATCH

    run_id: str
    request_id: int
    rows: tuple[int, ...]
    batch: Tree
    source: int = 0
    has_weights: bool = False


class Finding(msgspec.Struct, frozen=True, array_like=True):
    """What came of comparing a batch with its pieces.

    Attributes:
        outcome: "same", "differs", "memory" (it does not fit), "large" (the model is too large to be copied), "whole failed"
            or "piece failed".
        causes: of a difference, as far as they could be told apart.
        loss: of the whole batch, and of its pieces.
        loss_difference, gradient_difference: relative ones.
        parameter: the one whose gradient differs most.
        buffers: names of buffers that the pieces would leave with other values, those of batch norms left out.
        fits: of those that they would not under another policy of `RunSpec.buffers`, the policy by name.
        drawn: random functions that were replaced by constants.
        moved: names of buffers that a forward changes, those of batch norms left out.
        precision: in which it was computed.
        problem: what was raised.
        kept: what a forward changes outside parameters and buffers, and another forward depends on, then what only counts on.
        unlike: of the former, what the pieces would leave with other values.
        kept_looking: of the former, what a forward of a validation changes, too.
        compared: whole numbers that the loss compares targets with, or ignores.
        written: names of trained parameters that a forward writes into.
        written_unlike: of these, what the pieces would leave with other values.
        gradient_norm: of the whole batch.
    """

    outcome: str
    causes: tuple[str, ...] = ()
    loss: tuple[float, float] = (0.0, 0.0)
    loss_difference: float = 0.0
    gradient_difference: float = 0.0
    parameter: str = ""
    buffers: tuple[str, ...] = ()
    drawn: tuple[str, ...] = ()
    moved: tuple[str, ...] = ()
    precision: str = ""
    problem: str = ""
    kept: tuple[str, ...] = ()
    unlike: tuple[str, ...] = ()
    kept_looking: tuple[str, ...] = ()
    compared: tuple[int, ...] = ()
    written: tuple[str, ...] = ()
    written_unlike: tuple[str, ...] = ()
    gradient_norm: float = 0.0
    fits: dict[str, str] = {}


class StepChecked(Message, frozen=True, kw_only=True):
    """Worker to orchestrator: what came of `CheckStep`."""

    NUMBER: ClassVar[int] = 83

    run_id: str
    request_id: int
    finding: Finding
