"""Where a worker's own steps led, between the steps of one round and the common weights of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from guava_nb.replica.shard import ShardResult

__all__ = ["FirstSteps", "RoundEnd"]


@dataclass(frozen=True, slots=True)
class RoundEnd:
    """Where a worker's own steps of a round led.

    Attributes:
        inner: what optimizer and schedule keep.
        num_steps: of the round.
        weights: where the next round begins, by name; None: with the common ones.
        buffers: to begin it with.
    """

    inner: list[dict[str, Any]]
    num_steps: int
    weights: dict[str, Tensor] | None
    buffers: list[Tensor]


@dataclass(frozen=True, slots=True)
class FirstSteps:
    """The first steps of a round, up to where the common weights are mixed in.

    Attributes:
        asked: generation, step and shard of the work.
        begun_at: the end of the round before, where they began.
        results: what they came to.
        moved: what became of the buffers, as `BufferBook.flatten` gives it; None where the model has none.
        seconds: that they took.
        weights, inner: where they led.
    """

    asked: tuple[int, int, int]
    begun_at: RoundEnd
    results: list[ShardResult]
    moved: tuple[bytes, Tensor] | None
    seconds: float = 0.0
    weights: Mapping[str, Tensor] | None = None
    inner: Sequence[dict[str, Any]] = ()
