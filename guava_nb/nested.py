"""Nested batches: one walker over every container that a batch may have, and the table by which rows are cut.

Knows Python's containers, tensors and arrays; knows nothing of the wire, workers or models. It stands below `data` and
`parallel`, which must not import each other and must agree on what a batch is. What happens to each part of a batch of
`rows` samples that is cut:

| part | what a share gets |
|---|---|
| tensor or array whose first axis has `rows` entries | its rows (a view, nothing is copied) |
| list or tuple of `rows` elements, one per sample | its elements |
| dict, dataclass, namedtuple, any other list or tuple | the same container, looked into |
| everything else (numbers, text, sets, other tensors, None) | all of it |

A list of `rows` elements is ambiguous when it may as well be a list of fields: `[images, labels]` with two samples. It
is taken as fields when its tensors all have `rows` entries.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from guava_nb.errors import ConfigError

__all__ = ["ARRAYS", "Path", "Range", "RowCut", "children", "fields_of", "leaves", "map_leaves", "rebuild"]

#: Rows from the first to before the second.
Range = tuple[int, int]
#: Keys from the root of a batch to a part of it.
Path = tuple[Any, ...]
ARRAYS = (Tensor, np.ndarray)

_Kinds = type | tuple[type, ...]
#: Values that are no containers, told by their exact type because most of a batch is of these.
_PLAIN = frozenset({Tensor, torch.Size, int, float, bool, str, bytes, type(None)})


# ----------------------------------------------------------------------------------------------------------- containers


def children(value: Any) -> list[tuple[Any, Any]] | None:
    """Return key and value of everything directly in a container; None for a value that is none.

    Containers are mappings, lists, tuples (namedtuples by their field names), sets, dataclasses (the fields that are
    set), slices, and numpy arrays of objects. `torch.Size` is a value.
    """
    if type(value) in _PLAIN:
        return None
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, tuple):
        return list(zip(getattr(value, "_fields", range(len(value))), value, strict=True))
    if isinstance(value, list | set | frozenset):
        return list(enumerate(value))
    if isinstance(value, slice):
        return [(name, getattr(value, name)) for name in ("start", "stop", "step")]
    if isinstance(value, np.ndarray):
        return list(enumerate(value.reshape(-1).tolist())) if value.dtype.kind == "O" else None
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = (field.name for field in dataclasses.fields(value))
        return [(name, getattr(value, name)) for name in names if hasattr(value, name)]
    return None


def rebuild(value: Any, parts: Sequence[Any]) -> Any:
    """Return a container like `value` that holds `parts` in the places of its children, in the order of `children`.

    No `__init__` of a namedtuple or dataclass runs. A mapping that cannot be filled in place becomes a dict.
    """
    if isinstance(value, Mapping):
        return _mapping_like(value, dict(zip(value, parts, strict=True)))
    if isinstance(value, slice):
        return slice(*parts)
    if isinstance(value, np.ndarray):
        flat: np.ndarray[Any, Any] = np.empty(len(parts), object)
        for place, part in enumerate(parts):  # an assignment of the whole list would look into nested lists
            flat[place] = part
        return flat.reshape(value.shape)
    if isinstance(value, list | tuple | set | frozenset):
        return value._make(parts) if hasattr(value, "_make") else type(value)(parts)
    clone = copy.copy(value)
    for (name, _), part in zip(children(value) or (), parts, strict=True):
        object.__setattr__(clone, name, part)  # works for frozen dataclasses, and runs no __post_init__ again
    return clone


def _mapping_like(value: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """Keep the class of an unusual mapping (OrderedDict, a tokenizer's batch) where it can be filled in place."""
    if type(value) is dict:
        return items
    try:
        clone: Any = copy.copy(value)
        for key, item in items.items():
            clone[key] = item
    except (AttributeError, TypeError):
        return items
    return clone


def leaves(value: Any, kind: _Kinds = Tensor) -> Iterator[Any]:
    """Yield the values of a kind, depth first; containers are looked into unless they are of that kind themselves."""
    if isinstance(value, kind):
        yield value
        return
    for _, child in children(value) or ():
        yield from leaves(child, kind)


def map_leaves(value: Any, change: Callable[[Any], Any], kind: _Kinds = Tensor) -> Any:
    """Return new containers with each value of a kind changed; every other value stays as it is."""
    if isinstance(value, kind):
        return change(value)
    inside = children(value)
    return value if inside is None else rebuild(value, [map_leaves(child, change, kind) for _, child in inside])


# ----------------------------------------------------------------------------------------------------------------- rows


def fields_of(value: Any) -> list[tuple[Any, Any]]:
    """Return the children that have a place of their own, by which a batch is cut; elements of a set have none."""
    return [] if isinstance(value, set | frozenset | slice | np.ndarray) else children(value) or []


class RowCut:
    """One batch being cut by the table of this module.

    Args:
        rows: samples of the batch.
        ranges: which of them each share gets.
        per_row: what is known of the parts at each path: whether they have an entry per sample. It learns.

    Attributes:
        found_rows: whether anything was cut.
    """

    def __init__(self, rows: int, ranges: Sequence[Range], per_row: dict[Path, bool] | None = None) -> None:
        self.rows = rows
        self.ranges = ranges
        self.per_row = {} if per_row is None else per_row
        self.found_rows = False

    def parts(self, value: Any, path: Path = ()) -> list[Any]:
        """Return the value of every share.

        Raises:
            ConfigError: a packed sequence has no rows that can be cut.
        """
        if isinstance(value, Tensor) and value.layout is not torch.strided:
            pass  # has no rows that could be cut, and does not travel: `pack` says so
        elif isinstance(value, ARRAYS):
            if value.ndim and self._is_per_row(path, value.shape[0], lambda: True):
                return self._slices(value)
        elif type(value) in (list, tuple) and self._is_per_row(path, len(value), lambda: self._guess(value, path)):
            return self._slices(value)
        elif isinstance(value, PackedSequence):
            raise ConfigError(
                "a PackedSequence cannot be shared out by rows: pack inside the model, or give a split function"
            )
        elif inside := fields_of(value):
            columns = [self.parts(child, (*path, key)) for key, child in inside]
            return [rebuild(value, items) for items in zip(*columns, strict=True)]
        return [value] * len(self.ranges)

    def _slices(self, value: Any) -> list[Any]:
        self.found_rows = True
        return [value[start:stop] for start, stop in self.ranges]

    def _is_per_row(self, path: Path, length: int, guess: Callable[[], bool]) -> bool:
        if length != self.rows:
            self.per_row[path] = False
            return False
        if path in self.per_row:
            return self.per_row[path]
        if guess():
            self.per_row[path] = True
            return True
        return False  # it may be either; a later batch decides

    def _guess(self, value: Sequence[Any], path: Path) -> bool:
        """Whether a sequence of `rows` elements has one per sample, and not one per field."""
        stacked = [leaf.shape[0] == self.rows for leaf in leaves(value, ARRAYS) if leaf.ndim]
        if path:
            return not (stacked and all(stacked))
        # The batch itself is nearly always fields, of which some may be whole (weights, masks) or not stacked.
        return not (any(stacked) or all(self._is_column(item) for item in value))

    def _is_column(self, value: Any) -> bool:
        """Whether a value may be one field of all samples, not stacked: as long as the batch, and of one type."""
        return type(value) in (list, tuple) and len(value) == self.rows and len(set(map(type, value))) == 1
