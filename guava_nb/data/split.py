"""How many samples each share has, and what of a batch it gets.

Knows batches of one loader, one after the other; knows no worker and no run. How a batch is read `batch_reading` decides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from guava_nb.data.batch_reading import BatchReading
from guava_nb.data.sample_count import num_rows
from guava_nb.errors import ConfigError, RemoteProtocolError
from guava_nb.nested import Range, axes_of, cut_parts, marks_of, sliced

__all__ = ["RowSplitter", "SplitFunction", "rewrite_marked", "share_ranges"]

SplitFunction = Callable[[Any, Sequence[Range]], Sequence[Any]]


def share_ranges(rows: int, weights: Sequence[float]) -> list[Range]:
    """Cut `rows` samples into contiguous shares in proportion to weights.

    Largest remainder, ties to the lower index; computed exactly, so equal inputs give equal shares on every machine. A
    share may be empty.

    Args:
        rows: samples to share out.
        weights: one per share, at least 0, not all 0.

    Returns:
        One (start, stop) per weight; they follow each other from 0 to `rows`.

    Raises:
        ConfigError: rows or a weight is negative or not finite, or all weights are 0.
    """
    if rows < 0 or not all(math.isfinite(weight) and weight >= 0 for weight in weights) or not any(weights):
        raise ConfigError(f"{rows} samples cannot be shared out by weights {list(weights)}: one must be above 0")
    total = sum(map(Fraction, weights))
    quotas = [rows * Fraction(weight) / total for weight in weights]
    counts = [math.floor(quota) for quota in quotas]
    by_remainder = sorted(range(len(quotas)), key=lambda index: (counts[index] - quotas[index], index))
    for index in by_remainder[: rows - sum(counts)]:
        counts[index] += 1
    stops = [sum(counts[: index + 1]) for index in range(len(counts))]
    return list(zip([0, *stops], stops, strict=False))


class RowSplitter:
    """Cuts the batches of one loader as they are read, or with the user's own function.

    Args:
        split_fn: `split_fn(batch, ranges)` gives one part per range; None cuts as the batches are read.
        reading: of the loader's batches, which the loader's feed has read; None reads what comes.
    """

    def __init__(self, split_fn: SplitFunction | None = None, reading: BatchReading | None = None) -> None:
        self._split_fn = split_fn
        self._own = reading is None
        self.reading = BatchReading() if reading is None else reading

    def split(self, batch: Any, ranges: Sequence[Range], rows: int | None = None) -> list[Any]:
        """One part per range, tensors as views of the batch.

        Args:
            batch: any nesting that `pack` takes.
            ranges: (start, stop) pairs within `rows`.
            rows: samples in the batch where the caller knows (`LoadedBatch.rows`); None counts them.

        Raises:
            ConfigError: the batch cannot be cut, or `split_fn` gave another number of parts.
        """
        if self._split_fn is not None:
            return self._by_function(self._split_fn, batch, ranges)
        rows = self._rows(batch, rows)
        if any(not 0 <= start <= stop <= rows for start, stop in ranges):
            raise ConfigError(f"the ranges {list(ranges)} do not lie within the {rows} samples of the batch")
        if all(stop - start == rows for start, stop in ranges):
            return [batch] * len(ranges)
        if self.reading.problem:
            raise ConfigError(self.reading.problem)
        return cut_parts(
            batch,
            self.reading.axes(rows),
            lambda part, axis: [sliced(part, axis, start, stop) for start, stop in ranges],
            len(ranges),
        )

    def _by_function(self, split_fn: SplitFunction, batch: Any, ranges: Sequence[Range]) -> list[Any]:
        parts = list(split_fn(batch, ranges))
        if len(parts) != len(ranges):
            raise ConfigError(
                f"the split function gave {len(parts)} parts for {len(ranges)} ranges: one is needed each"
            )
        return parts

    def _rows(self, batch: Any, rows: int | None) -> int:
        return self.reading.read(batch, rows) if self._own else num_rows(batch) if rows is None else rows

    @property
    def problem(self) -> str:
        """Why batches cannot be cut as they are read; "" if they can, or if the user's function cuts them."""
        return "" if self._split_fn is not None else self.reading.problem

    def marks(self, part: Any, rows: int) -> bytes:
        """How a batch, or a part of one, of so many samples may be cut further, see `guava_nb.nested.marks_of`; b"": not."""
        if self._split_fn is not None or self.reading.problem:
            return b""
        return marks_of(part, self.reading.axes(rows))

    def row_marks(self, batch: Any, rows: int) -> bytes:
        """The marks by which `rewrite_marked` finds each part of a batch that has one entry per sample.

        Raises:
            ConfigError: it cannot be taken apart into rows; the sentence says why.
        """
        if self._split_fn is not None:
            raise ConfigError("a split function of your own cuts it, by a rule that only it knows")
        self._rows(batch, rows)
        if self.reading.problem:
            raise ConfigError(self.reading.problem)
        marks = marks_of(batch, self.reading.axes(rows))
        if any(mark > 1 for mark in marks):
            raise ConfigError("a part of it has its samples on another axis than the first")
        return marks


def rewrite_marked(batch: Any, marks: bytes, leaf: Callable[[Any], Any]) -> Any:
    """The batch with `leaf(value)` in the place of each part that is marked, its other parts shared with the original.

    Raises:
        RemoteProtocolError: the marks are of another structure.
    """
    try:
        return cut_parts(batch, axes_of(marks), lambda part, axis: [leaf(part)], 1)[0]
    except StopIteration:
        raise RemoteProtocolError(f"{len(marks)} marks came for a batch of more parts") from None
