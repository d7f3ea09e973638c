"""How many samples a batch has, and how it is cut into shares.

Knows batches of one loader, one after the other; knows no worker and no run. One batch is cut by the table of
`guava_nb.nested`. `RowSplitter` also remembers: what once had another length than the batch had samples was never one
per sample, and what once had elements of unlike lengths always is, so only batches before the first such one can be
misread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any

from guava_nb.errors import ConfigError, RemoteProtocolError
from guava_nb.nested import ARRAYS, Path, Range, RowCut, fields_of, leaves

__all__ = [
    "RowSplitter",
    "SplitFunction",
    "count_rows",
    "has_rows",
    "num_rows",
    "rewrite_marked",
    "share_ranges",
    "split_rows",
]

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


def count_rows(batch: Any) -> int | None:
    """Entries of the first axis of the first tensor or array in a batch; scalars do not count. None where there is none."""
    return next((int(leaf.shape[0]) for leaf in leaves(batch, ARRAYS) if leaf.ndim), None)


def num_rows(batch: Any) -> int:
    """Samples in a batch: those of `count_rows`.

    Without any, the length of the first list or tuple that holds no containers, or of the batch itself.

    Raises:
        ConfigError: nothing in it tells.
    """
    rows = count_rows(batch)
    if rows is not None:
        return rows
    for plain in _plain_sequences(batch):
        return len(plain)
    if type(batch) in (list, tuple):
        return len(batch)
    raise ConfigError(
        f"a batch of type {type(batch).__name__} does not tell how many samples it has: let it hold a tensor whose "
        "first axis is the batch, or give a split function"
    )


def has_rows(batch: Any, rows: int) -> bool:
    """Whether anything in the batch (a tensor's first axis, a list, a tuple) is `rows` long."""
    if isinstance(batch, ARRAYS):
        return bool(batch.ndim) and int(batch.shape[0]) == rows
    if type(batch) in (list, tuple) and len(batch) == rows:
        return True
    return any(has_rows(child, rows) for _, child in fields_of(batch))


def split_rows(batch: Any, ranges: Sequence[Range], rows: int | None = None) -> list[Any]:
    """Cut one batch; see `RowSplitter`, which is for a series of batches."""
    return RowSplitter().split(batch, ranges, rows)


class RowSplitter:
    """Cuts the batches of one loader by the table above, or with the user's own function.

    Args:
        split_fn: `split_fn(batch, ranges)` gives one part per range; None uses the table.
    """

    def __init__(self, split_fn: SplitFunction | None = None) -> None:
        self._split_fn = split_fn
        self._per_row: dict[Path, bool] = {}

    def split(self, batch: Any, ranges: Sequence[Range], rows: int | None = None) -> list[Any]:
        """One part per range, tensors as views of the batch.

        Args:
            batch: any nesting that `pack` takes.
            ranges: (start, stop) pairs within `rows`.
            rows: samples in the batch where the caller knows (`LoadedBatch.rows`); None asks `num_rows`.

        Raises:
            ConfigError: nothing in the batch can be cut, or `split_fn` gave another number of parts.
        """
        if self._split_fn is not None:
            parts = list(self._split_fn(batch, ranges))
            if len(parts) != len(ranges):
                raise ConfigError(
                    f"the split function gave {len(parts)} parts for {len(ranges)} ranges: one is needed each"
                )
            return parts
        rows = num_rows(batch) if rows is None else rows
        if any(not 0 <= start <= stop <= rows for start, stop in ranges):
            raise ConfigError(f"the ranges {list(ranges)} do not lie within the {rows} samples of the batch")
        cut = RowCut(rows, ranges, self._per_row)
        parts = cut.parts(batch)
        if not cut.found_rows and any(stop - start not in (0, rows) for start, stop in ranges):
            raise ConfigError(
                f"nothing in the batch has its {rows} samples first, so it cannot be shared out: put the batch axis "
                "first (batch_first=True), or give a split function"
            )
        return parts

    @property
    def by_table(self) -> bool:
        """Whether batches are cut by the table, so that their rows can be told apart."""
        return self._split_fn is None

    def rewrite(self, batch: Any, rows: int, leaf: Callable[[Any], Any]) -> tuple[Any, bytes]:
        """The batch with `leaf(value)` in the place of each part that has one entry per sample.

        Returns:
            The batch, its other parts shared with the original, and the marks that `rewrite_marked` needs: a byte per
            tensor, array, list and tuple that was looked at, in order; 1 for those with one entry per sample.
        """
        work = _Rewrite(rows, self._per_row, leaf, None)
        return work.parts(batch)[0], bytes(work.marks)


def rewrite_marked(batch: Any, marks: bytes, leaf: Callable[[Any], Any]) -> Any:
    """`RowSplitter.rewrite` of a batch of the same structure, deciding as it decided then.

    Raises:
        RemoteProtocolError: the marks are of another structure.
    """
    work = _Rewrite(0, {}, leaf, iter(marks))
    try:
        return work.parts(batch)[0]
    except StopIteration:
        raise RemoteProtocolError(f"{len(marks)} marks came for a batch of more parts") from None


class _Rewrite(RowCut):
    """One batch being given other leaves; `given` decides which, where the decision was taken elsewhere."""

    def __init__(
        self, rows: int, per_row: dict[Path, bool], leaf: Callable[[Any], Any], given: Iterator[int] | None
    ) -> None:
        super().__init__(rows, [(0, rows)], per_row)
        self.leaf, self.given = leaf, given
        self.marks: list[int] = []

    def _slices(self, value: Any) -> list[Any]:
        return [self.leaf(value)]

    def _is_per_row(self, path: Path, length: int, guess: Callable[[], bool]) -> bool:
        if self.given is not None:
            return bool(next(self.given))
        self.marks.append(super()._is_per_row(path, length, guess))
        return bool(self.marks[-1])


def _plain_sequences(value: Any) -> Iterator[Sequence[Any]]:
    """Lists and tuples of which no element is a container, depth first."""
    inside = [child for _, child in fields_of(value)]
    if type(value) in (list, tuple) and not any(map(fields_of, inside)):
        yield value
        return
    for child in inside:
        yield from _plain_sequences(child)
