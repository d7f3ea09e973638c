"""How many samples a batch has, by what is in it. Knows one batch; what else is known of it, its callers know."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from guava_nb.errors import ConfigError
from guava_nb.nested import ARRAYS, fields_of, leaves

__all__ = ["are_fields", "count_rows", "has_rows", "num_rows"]


def count_rows(batch: Any) -> int | None:
    """Entries of the first axis of the first tensor or array in a batch; scalars do not count. None where there is none."""
    return next((int(leaf.shape[0]) for leaf in leaves(batch, ARRAYS) if leaf.ndim), None)


def num_rows(batch: Any) -> int:
    """Samples in a batch of which nothing is known: those of `count_rows`.

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


def _plain_sequences(value: Any) -> Iterator[Sequence[Any]]:
    """Lists and tuples of which no element is a container, depth first."""
    inside = [child for _, child in fields_of(value)]
    if type(value) in (list, tuple) and not any(map(fields_of, inside)):
        yield value
        return
    for child in inside:
        yield from _plain_sequences(child)


def are_fields(batch: Any, drawn: int) -> bool:
    """Whether a list of `drawn` elements is not one of samples: (images, labels) of two drawn samples, one of them dropped.

    Fields have equally many rows and differ in kind; samples of one data set are of one kind.
    """
    if type(batch) not in (list, tuple) or not all(isinstance(field, Tensor) and field.ndim for field in batch):
        return False
    rows, kinds = {len(field) for field in batch}, {(field.ndim, field.dtype) for field in batch}
    return len(rows) == 1 and rows != {drawn} and len(kinds) > 1
