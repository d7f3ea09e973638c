"""A batch that is augmented and prepared whole, and cut after, as a pipeline's micro-batches are."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from guava_nb.data.split import RowSplitter
from guava_nb.parallel.tensor.without_randomness import WithoutRandomness
from guava_nb.protocol.messages import RunSpec
from guava_nb.replica.rng import seeded

__all__ = ["Pieces", "treated_first", "treats_first"]

#: Batches, each with its number of samples.
Pieces = Sequence[tuple[Any, int]]


def treats_first(spec: RunSpec) -> bool:
    """Whether a run cuts its batches after `augment` and `preprocess` alone: with one replica, in stages."""
    shape = spec.parallel
    is_lone_pipeline = shape is not None and shape.pp > 1 and shape.dp == 1
    return is_lone_pipeline and (spec.augment is not None or spec.preprocess is not None)


@contextlib.contextmanager
def treated_first(trial: Any, whole: Pieces, pieces: Pieces) -> Iterator[tuple[Pieces, Pieces]]:
    """Give the batch as `augment` and `preprocess` leave it, and its pieces; nothing is treated again inside.

    Args:
        trial: measures inside, a `whole_against_cut.Trial`.
        whole, pieces: as they came.

    Raises:
        ConfigError: a function gave no batch, or one that cannot be cut.
    """
    (batch, rows), before = whole[0], trial.preprocessing
    with seeded(0, trial.device), WithoutRandomness() as still:
        treated = before.train(copy.deepcopy(batch))
    trial.drawn |= still.drawn
    counts = [count for _, count in pieces]
    ranges = list(itertools.pairwise(itertools.accumulate(counts, initial=0)))
    cut = RowSplitter().split(treated, ranges, rows)
    trial.preprocessing = before.done()
    try:
        yield [(treated, rows)], list(zip(cut, counts, strict=True))
    finally:
        trial.preprocessing = before
