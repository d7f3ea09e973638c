"""How many samples a batch has, and how it is cut into shares.

Knows tensors, arrays and Python's containers; knows no worker and no run. What happens to each part of a batch of
`rows` samples:

| part | what a share gets |
|---|---|
| tensor or array whose first axis has `rows` entries | its rows (a view, nothing is copied) |
| list or tuple of `rows` elements, one per sample | its elements |
| dict, dataclass, namedtuple, any other list or tuple | the same container, looked into |
| everything else (numbers, text, other tensors, None) | all of it |

A list of `rows` elements is ambiguous when it may as well be a list of fields: `[images, labels]` with two samples. It
is taken as fields when its tensors all have `rows` entries. `RowSplitter` also remembers: what once had another length
than the batch had samples was never one per sample, and what once had elements of unlike lengths always is, so only
batches before the first such one can be misread.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence

from guava_nb.data.classes import is_dataclass_type, is_namedtuple_type
from guava_nb.errors import ConfigError, RemoteProtocolError

__all__ = ["RowSplitter", "SplitFunction", "has_rows", "num_rows", "rewrite_marked", "share_ranges", "split_rows"]

Range = tuple[int, int]
SplitFunction = Callable[[Any, Sequence[Range]], Sequence[Any]]
_Path = tuple[Any, ...]


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


def num_rows(batch: Any) -> int:
    """Samples in a batch: entries of the first axis of the first tensor or array in it (scalars do not count).

    Without any, the length of the first list or tuple that holds no containers, or of the batch itself.

    Raises:
        ConfigError: nothing in it tells.
    """
    for leaf in _arrays(batch):
        return int(leaf.shape[0])
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
    if isinstance(batch, (torch.Tensor, np.ndarray)):
        return bool(batch.ndim) and int(batch.shape[0]) == rows
    if type(batch) in (list, tuple) and len(batch) == rows:
        return True
    return any(has_rows(child, rows) for child in _children(batch))


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
        self._per_row: dict[_Path, bool] = {}

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
        cut = _Cut(rows, ranges, self._per_row)
        parts = cut.parts(batch, ())
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
        return work.parts(batch, ())[0], bytes(work.marks)


def rewrite_marked(batch: Any, marks: bytes, leaf: Callable[[Any], Any]) -> Any:
    """`RowSplitter.rewrite` of a batch of the same structure, deciding as it decided then.

    Raises:
        RemoteProtocolError: the marks are of another structure.
    """
    work = _Rewrite(0, {}, leaf, iter(marks))
    try:
        return work.parts(batch, ())[0]
    except StopIteration:
        raise RemoteProtocolError(f"{len(marks)} marks came for a batch of more parts") from None


class _Cut:
    """One batch being cut."""

    def __init__(self, rows: int, ranges: Sequence[Range], per_row: dict[_Path, bool]) -> None:
        self.rows = rows
        self.ranges = ranges
        self.per_row = per_row
        self.found_rows = False

    def parts(self, value: Any, path: _Path) -> list[Any]:
        """The value of every share."""
        cls = type(value)
        if isinstance(value, torch.Tensor) and value.layout is not torch.strided:
            pass  # has no rows that could be cut, and does not travel: `pack` says so
        elif isinstance(value, (torch.Tensor, np.ndarray)):
            if value.ndim and self._is_per_row(path, value.shape[0], lambda: True):
                return self._slices(value)
        elif cls is list or cls is tuple:
            if self._is_per_row(path, len(value), lambda: self._guess(value, path)):
                return self._slices(value)
            return [cls(items) for items in self._transposed(list(enumerate(value)), path)]
        elif cls is dict or cls is OrderedDict:
            columns = self._transposed(list(value.items()), path)
            return [cls(zip(value, items, strict=True)) for items in columns]
        elif cls is PackedSequence:
            raise ConfigError(
                "a PackedSequence cannot be shared out by rows: pack inside the model, or give a split function"
            )
        elif is_namedtuple_type(cls):
            return [cls._make(items) for items in self._transposed(list(zip(cls._fields, value, strict=True)), path)]
        elif is_dataclass_type(cls):
            return self._dataclass_parts(value, path)
        return [value] * len(self.ranges)

    def _slices(self, value: Any) -> list[Any]:
        self.found_rows = True
        return [value[start:stop] for start, stop in self.ranges]

    def _transposed(self, items: Sequence[tuple[Any, Any]], path: _Path) -> list[list[Any]]:
        """For every share the parts of all (key, value) items."""
        columns = [self.parts(value, (*path, key)) for key, value in items]
        return [[column[share] for column in columns] for share in range(len(self.ranges))]

    def _dataclass_parts(self, value: Any, path: _Path) -> list[Any]:
        names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        made = []
        for items in self._transposed([(name, getattr(value, name)) for name in names], path):
            part = copy.copy(value)
            for name, item in zip(names, items, strict=True):
                object.__setattr__(part, name, item)  # works for frozen classes, and runs no __post_init__ again
            made.append(part)
        return made

    def _is_per_row(self, path: _Path, length: int, guess: Callable[[], bool]) -> bool:
        if length != self.rows:
            self.per_row[path] = False
            return False
        if path in self.per_row:
            return self.per_row[path]
        if guess():
            self.per_row[path] = True
            return True
        return False  # it may be either; a later batch decides

    def _guess(self, value: Sequence[Any], path: _Path) -> bool:
        """Whether a sequence of `rows` elements has one per sample, and not one per field."""
        stacked = [leaf.shape[0] == self.rows for leaf in _arrays(value)]
        if path:
            return not (stacked and all(stacked))
        # The batch itself is nearly always fields, of which some may be whole (weights, masks) or not stacked.
        return not (any(stacked) or all(self._is_column(item) for item in value))

    def _is_column(self, value: Any) -> bool:
        """Whether a value may be one field of all samples, not stacked: as long as the batch, and of one type."""
        return type(value) in (list, tuple) and len(value) == self.rows and len(set(map(type, value))) == 1


class _Rewrite(_Cut):
    """One batch being given other leaves; `given` decides which, where the decision was taken elsewhere."""

    def __init__(
        self, rows: int, per_row: dict[_Path, bool], leaf: Callable[[Any], Any], given: Iterator[int] | None
    ) -> None:
        super().__init__(rows, [(0, rows)], per_row)
        self.leaf, self.given = leaf, given
        self.marks: list[int] = []

    def _slices(self, value: Any) -> list[Any]:
        return [self.leaf(value)]

    def _is_per_row(self, path: _Path, length: int, guess: Callable[[], bool]) -> bool:
        if self.given is not None:
            return bool(next(self.given))
        self.marks.append(super()._is_per_row(path, length, guess))
        return bool(self.marks[-1])


def _children(value: Any) -> Iterator[Any]:
    cls = type(value)
    if cls is dict or cls is OrderedDict:
        yield from value.values()
    elif cls is list or cls is tuple or is_namedtuple_type(cls):
        yield from value
    elif is_dataclass_type(cls):
        yield from (getattr(value, field.name) for field in dataclasses.fields(cls) if hasattr(value, field.name))


def _arrays(value: Any) -> Iterator[Any]:
    """Tensors and arrays with at least one axis, depth first."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        if value.ndim:
            yield value
        return
    for child in _children(value):
        yield from _arrays(child)


def _plain_sequences(value: Any) -> Iterator[Sequence[Any]]:
    """Lists and tuples of which no element is a container, depth first."""
    children = list(_children(value))
    if type(value) in (list, tuple) and not any(True for child in children for _ in _children(child)):
        yield value
        return
    for child in children:
        yield from _plain_sequences(child)
