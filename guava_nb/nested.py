"""Nested batches: one walker over every container that a batch may have, and the knife that cuts them.

Knows Python's containers, tensors and arrays; knows nothing of the wire, workers or models. It stands below `data` and
`parallel`, which must not import each other and must agree on what a batch is. Which parts of a batch have an entry per
sample, and along which axis, is decided elsewhere (`guava_nb.data.batch_reading`); here a share gets of

| part | what |
|---|---|
| a tensor or array with an axis of samples | its samples (a view, nothing is copied) |
| a list or tuple with one element per sample | its elements |
| a dict, dataclass, namedtuple, any other list or tuple | the same container, looked into |
| everything else (numbers, text, sets, other tensors, None) | all of it |
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

__all__ = [
    "ARRAYS",
    "AxisOf",
    "Path",
    "Range",
    "axes_at",
    "axes_by_length",
    "axes_of",
    "children",
    "cut_parts",
    "fields_of",
    "has_entries",
    "leaves",
    "map_leaves",
    "marks_of",
    "rebuild",
    "sliced",
]

#: Rows from the first to before the second.
Range = tuple[int, int]
#: Keys from the root of a batch to a part of it.
Path = tuple[Any, ...]
#: Tells of a part with entries along which axis it has one per sample; None: along none, all of it goes to every share.
AxisOf = Callable[[Path, Any], int | None]
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
    return [] if isinstance(value, set | frozenset | slice | np.ndarray | PackedSequence) else children(value) or []


def has_entries(value: Any) -> bool:
    """Whether a part can be cut: a dense tensor or an array with axes, a list, a tuple (no namedtuple)."""
    if isinstance(value, ARRAYS):
        return bool(value.ndim) and (not isinstance(value, Tensor) or value.layout is torch.strided)
    return type(value) in (list, tuple)


def sliced(value: Any, axis: int, start: int, stop: int) -> Any:
    """Return the entries from `start` to before `stop` along an axis; of a list or tuple the axis is 0."""
    return value[(slice(None),) * axis + (slice(start, stop),)] if axis else value[start:stop]


def cut_parts(
    value: Any, axis_of: AxisOf, cut: Callable[[Any, int], list[Any]], shares: int, path: Path = ()
) -> list[Any]:
    """Return the value of every share.

    Args:
        value: a batch, or what lies at `path` of it.
        axis_of: asked about every part that can be cut, in the order of the walk.
        cut: gives what each share gets of a part with an axis of samples.
        shares: how many there are.
        path: where the value lies.
    """
    if has_entries(value) and (axis := axis_of(path, value)) is not None:
        return cut(value, axis)
    inside = [] if isinstance(value, ARRAYS) else fields_of(value)
    if not inside:
        return [value] * shares
    columns = [cut_parts(child, axis_of, cut, shares, (*path, key)) for key, child in inside]
    return [rebuild(value, items) for items in zip(*columns, strict=True)]


def marks_of(value: Any, axis_of: AxisOf) -> bytes:
    """Return how a value is cut as one byte per part that `cut_parts` asks about: the axis and 1, or 0."""
    marks = bytearray()

    def marked(path: Path, part: Any) -> int | None:
        axis = axis_of(path, part)
        marks.append(0 if axis is None else axis + 1)
        return axis

    cut_parts(value, marked, lambda part, axis: [part], 1)
    return bytes(marks)


def axes_of(marks: bytes) -> AxisOf:
    """Return what `marks_of` wrote down, for one walk over a value of the same structure; StopIteration: it has more parts."""
    given = iter(marks)

    def axis_of(path: Path, part: Any) -> int | None:
        mark = next(given)
        return mark - 1 if mark else None

    return axis_of


def axes_at(value: Any, marks: bytes) -> dict[Path, int]:
    """Return the axes that `marks_of` wrote down of a value, by path."""
    found: dict[Path, int] = {}
    axis_of = axes_of(marks)

    def noted(path: Path, part: Any) -> int | None:
        axis = axis_of(path, part)
        if axis is not None:
            found[path] = axis
        return axis

    cut_parts(value, noted, lambda part, axis: [part], 1)
    return found


def axes_by_length(rows: int) -> AxisOf:
    """Return the guess for a value that was not read: what has `rows` entries has one per sample.

    A list of `rows` elements may as well be one of fields: it is, when the tensors in it all have `rows` entries.
    """

    def axis_of(path: Path, part: Any) -> int | None:
        if isinstance(part, ARRAYS):
            return 0 if part.shape[0] == rows else None
        stacked = [leaf.shape[0] == rows for leaf in leaves(part, ARRAYS) if leaf.ndim]
        return 0 if len(part) == rows and not (stacked and all(stacked)) else None

    return axis_of
