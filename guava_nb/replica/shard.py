"""One shard of one step: what is asked, what it came to.

Plain records; knows nothing of how it is computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from guava_nb.data.sample_count import count_rows
from guava_nb.errors import ConfigError
from guava_nb.protocol.messages import BatchShard, ParameterChange, ShardReport

__all__ = [
    "EvalSums",
    "LaunchedShard",
    "ShardResult",
    "ShardWork",
    "clip_factor",
    "rows_of_batch",
    "rows_of_parts",
    "true_scale",
]


@dataclass(frozen=True, slots=True)
class ShardWork:
    """One shard of one step.

    Attributes:
        step: optimizer step, counted from 0.
        shard: index in summation order.
        parts: loader batches, or pieces of them; their gradients accumulate.
        rows: samples over all parts.
        global_rows: samples of the whole step.
        part_rows: samples of each part; None: counted from the first tensor of each.
        is_cut: parts are pieces of loader batches that did not fit the memory as a whole.
        axes: how each part is cut into micro-batches, by `guava_nb.nested.marks_of`; empty: its replica reads it.
        part_steps: in a round of local steps the one that each part belongs to, from 0; empty: all parts are one step.
        num_steps: optimizer steps of the round.
        local_batches: of each of these steps; `part_steps` counts them.
        generation: membership in which the step was issued.
        buffers: as of `BatchShard`.
    """

    step: int
    shard: int
    parts: Sequence[Any]
    rows: int
    global_rows: int
    part_rows: Sequence[int] | None = None
    is_cut: bool = False
    axes: Sequence[bytes] = ()
    part_steps: Sequence[int] = ()
    num_steps: int = 1
    local_batches: int = 1
    generation: int = 0
    buffers: str = ""


@dataclass(frozen=True, slots=True)
class ShardResult:
    """What a shard came to.

    Attributes:
        loss_sum: sum of the losses, to be divided by the sum of all counts.
        count: true denominator of this shard.
        rows: samples.
        finite: the loss is finite; for a lone worker, whose gradients are checked nowhere else, they and the buffers too.
        forward_s: seconds of forward.
        backward_s: seconds of backward, with handing over.
        nonfinite: for a lone worker or a group, the first parameter or buffer that is not finite.
        gradient_square: for a group, this rank's share of the squared norm of the gradient; for a lone worker, all of it.
        tokens: as the user's function counted them; None where it is not asked.
        unlike: for a group, buffers that its replicas changed differently so far, with no rule or choice for it.
        changed: what the step's forwards changed of the trained parameters; None also for a lone worker.
        owed: of a round: norm of all that messages left out so far, over that of its pseudo-gradient; None: nothing.
        frozen: parameters that took a gradient when the run began and take none now; None for a lone worker, and without samples.
        early_s: of a round: seconds of both that were spent before its turn, while the sum of the one before travelled.
    """

    loss_sum: float
    count: float
    rows: int
    finite: bool
    forward_s: float
    backward_s: float
    nonfinite: str = ""
    gradient_square: float | None = None
    tokens: float | None = None
    unlike: tuple[str, ...] = ()
    changed: ParameterChange | None = None
    owed: float | None = None
    frozen: tuple[str, ...] | None = None
    early_s: float = 0.0

    def report(self, shard: BatchShard, wait_s: float) -> ShardReport:
        """Return what the orchestrator is told of it; `wait_s`: seconds that this worker waited for the shard."""
        return ShardReport(
            run_id=shard.run_id, generation=shard.generation, step=shard.step, shard=shard.shard, rows=shard.rows,
            loss_sum=self.loss_sum, count=self.count, finite=self.finite, nonfinite=self.nonfinite,
            forward_s=self.forward_s, backward_s=self.backward_s, wait_s=wait_s, tokens=self.tokens,
            gradient_square=self.gradient_square, unlike=self.unlike, changed=self.changed, owed=self.owed,
            frozen=self.frozen,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class LaunchedShard:
    """A shard that the device was given, whose figures were not waited for yet.

    Attributes:
        read: waits for the device and returns what the shard came to; errors as those of `Replica.run_shard`.
        factor: a lone worker's: to the true mean of the loss, a scalar on the device where only that knows it.
        bad: a lone worker's: a float32 scalar on the device, 1 where the step must not be applied, else 0.
    """

    read: Callable[[], ShardResult]
    factor: Tensor | float = 1.0
    bad: Tensor | None = None

    def telling(self, changed: ParameterChange | None, frozen: tuple[str, ...] | None) -> LaunchedShard:
        """Return the same, whose result tells what user code changed of the parameters, and which take no gradient any more."""
        return replace(self, read=lambda: replace(self.read(), changed=changed, frozen=frozen))


def true_scale(rows: int, count: float) -> float:
    """Return the factor from a sum over a step, divided by its samples, to the mean by its true count; 0 for a count of 0."""
    return rows / count if count else 0.0


def clip_factor(max_grad_norm: float | None, square: float | None, scale: float) -> float:
    """Return the factor of torch's `clip_grad_norm_`.

    Args:
        max_grad_norm: to clip to; None: nothing is clipped.
        square: squared norm of the gradient before it is multiplied with `scale`; None: not known.
        scale: as `true_scale` gives it.
    """
    if max_grad_norm is None or square is None:
        return 1.0
    return min(1.0, max_grad_norm / (math.sqrt(square) * scale + 1e-6))


@dataclass(frozen=True, slots=True)
class EvalSums:
    """Sums over one batch.

    Attributes:
        loss_sum, count: of the loss, and its denominator.
        rows: samples.
        correct: right predictions; None where accuracy has no meaning.
        scored: targets that they are counted over.
        nll: negative log-likelihood of these, in nats, for a language model; else None.
    """

    loss_sum: float
    count: float
    rows: int
    correct: int | None = None
    scored: int = 0
    nll: float | None = None


def rows_of_parts(work: ShardWork) -> Sequence[int]:
    """Return the samples of each part.

    Raises:
        ConfigError: they are not given and cannot be counted.
    """
    if work.part_rows is not None:
        return work.part_rows
    return [work.rows] if len(work.parts) == 1 else [rows_of_batch(part) for part in work.parts]


def rows_of_batch(batch: Any) -> int:
    """Return the samples of a batch.

    Raises:
        ConfigError: there is no tensor or array to count by.
    """
    rows = count_rows(batch)
    if rows is None:
        raise ConfigError(
            "cannot count the samples of a batch without tensors or arrays; put one with a row per sample into it"
        )
    return rows
