"""How the batches of one loader are read: which parts have an entry per sample, along which axis, and which do not.

Decided once, at the first batch, with the number of samples that were drawn for it; held against every later batch; told
in words that can be given back. Knows batches; knows no worker, no run, and does not cut (`guava_nb.nested`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from guava_nb.data.packing import pack
from guava_nb.data.reading_words import CUT, Given, told
from guava_nb.data.sample_count import are_fields, has_rows, num_rows
from guava_nb.errors import ConfigError
from guava_nb.nested import ARRAYS, AxisOf, Path, fields_of, has_entries, leaves

__all__ = ["BatchReading"]

#: Names that index vectors have in public code: of PyG, YOLO, segment and packed attention code.
_INDEX_NAME = re.compile(r"(^|_)(batch|idxs?|index|indices|ptr|segment_ids?|cu_seqlens?)(_|$)")
_GUESS = (
    "That a batch has {} samples was taken from its first tensor: if that is wrong, name the parts that are cut, "
    'batch="cut: NAME; cut on axis 1: NAME" (--batch); a loader of single samples (batch_size=None) needs a batch size'
)
_BY_HAND = 'say how it is read with batch="{}" (--batch)'
_OTHERWISE = (
    "give split_fn, let the collate function return a list with one entry per sample, or let one worker do every batch, in "
    "data mode: shares=[1, 0] (--shares 1,0)"
)


class BatchReading:
    """Reads the batches of one loader, one after the other.

    Args:
        given: how the user says that they are read, see `guava_nb.data.reading_words`; what it does not name is read as usual.
        stacks: torch's own collate function makes them, which puts the samples on the first axis of every part.
        example: makes a batch of so many samples out of turn, for where lengths alone do not tell; None where it cannot.

    Attributes:
        seen: batches of two samples and more that were read.

    Raises:
        ConfigError: `given` has another form.
    """

    def __init__(
        self, given: str = "", stacks: bool = False, example: Callable[[int], Any] = lambda samples: None
    ) -> None:
        self._given, self._stacks, self._example = Given(given), stacks, example
        self._axes: dict[Path, int | None] = {}  # of all parts that have entries; None: looked into, or whole
        self._whole: dict[Path, Any] = {}  # parts that travel whole, of the first batch, and must not change
        self._shapes: dict[Path, str] = {}  # of the parts that are told, of the first batch
        self._pair = False
        self._fields: tuple[str, ...] = ()  # of a named tuple
        self._positions: set[Path] = set()  # of parts that may number the samples of the batch
        self._second: set[Path] = set()  # of parts that may have the samples on axis 1
        self._guessed = 0  # samples of the first batch, where nothing told how many were drawn
        self._trouble: Callable[[], str] | None = None
        self._few: dict[int, Any] = {}
        self.seen = 0

    # ------------------------------------------------------------------------------------------------------ what was read

    @property
    def text(self) -> str:
        """How batches are read, in the words of `given`; "" before the first one."""
        return self._text({})

    def _text(self, changed: Mapping[Path, int]) -> str:
        axes = {path: axis for path, axis in {**self._axes, **changed}.items() if path in self._shapes}
        lists = {path for path, axis in axes.items() if axis is not None and self._shapes[path].startswith("(")}
        return told({path: (self._name(path), shape.strip("()")) for path, shape in self._shapes.items()}, axes, lists)

    @property
    def is_plain(self) -> bool:
        """Whether every part with entries is cut along its first axis, as a user would expect."""
        return all(self._axes[path] == 0 for path in self._shapes)

    def on_second_axis(self, batch: Any) -> str:
        """Say how to have a batch cut on axis 1, where that fits as well and nothing told how many samples it has; else ""."""
        parts = {path: _at(batch, path) for path, axis in self._axes.items() if axis == 0}
        lengths = {part.shape[1] if isinstance(part, ARRAYS) and part.ndim > 1 else 0 for part in parts.values()}
        if not self._guessed or len(lengths) != 1 or lengths & {0, 1}:
            return ""
        return (
            f"Or the samples are on axis 1 ({lengths.pop()} of them), as in time-first batches, and not the {self._guessed} on "
            f"axis 0: then {_BY_HAND.format(self._text(dict.fromkeys(parts, 1)))}"
        )

    @property
    def problem(self) -> str:
        """Why batches cannot be cut; "" if they can."""
        if self._trouble is not None:
            return self._trouble()
        if self.seen != 1 or not self._whole:
            return ""
        first = next(iter(self._whole))
        return (
            f"{self._told(first)} would travel whole to every worker, and with a single batch nothing shows whether it is the "
            f"same in each or belongs to the samples of this one: {_BY_HAND.format(self.text)}, {_OTHERWISE}"
        )

    def axes(self, rows: int) -> AxisOf:
        """Return what `guava_nb.nested.cut_parts` asks about the parts of a batch of so many samples."""

        def axis_of(path: Path, part: Any) -> int | None:
            if path and path not in self._axes and isinstance(path[0], int) and path[0] < len(self._fields):
                path = (self._fields[path[0]], *path[1:])  # stages get the halves of a named tuple by place
            axis = self._axes.get(path)
            return axis if axis is not None and _has_axis(part, axis) and _length(part, axis) == rows else None

        return axis_of

    # ----------------------------------------------------------------------------------------------------------- reading

    def read(self, batch: Any, drawn: int | None) -> int:
        """Read a batch; returns its samples. What cannot be cut is kept as the `problem`: perhaps nothing has to be.

        Args:
            batch: as the collate function made it.
            drawn: samples that were drawn for it; None where nothing tells.

        Raises:
            ConfigError: there is no batch, nothing tells how many samples it has, or what the user said does not fit it.
        """
        if batch is None:
            raise ConfigError(
                "the collate function, or the iterable of batches, returned None instead of a batch: end it with a return"
            )
        rows = self._rows(batch, drawn)
        if rows > 1:  # of a single sample nothing can be cut
            if not self.seen:
                self._fields = getattr(batch, "_fields", ())
                self._pair, self._guessed = _is_pair(batch), rows if drawn is None else 0
            self._look(batch, (), rows)
            if not self.seen:
                self._check_first(batch, rows, drawn)
            self.seen += 1
        return rows

    def _rows(self, batch: Any, drawn: int | None) -> int:
        named = self._given.names and self._named_rows(batch)
        if named:
            return named
        cut = [(_at(batch, path), axis, path) for path, axis in self._axes.items() if axis is not None]
        lengths = {
            _length(part, axis) for part, axis, path in cut if _has_axis(part, axis) and self._is_like(part, path)
        }
        if len(lengths) == 1:
            return lengths.pop()
        if drawn is not None and has_rows(batch, drawn) and not are_fields(batch, drawn):
            return drawn
        if drawn is not None and any(part.ndim > 1 and part.shape[1] == drawn for part in leaves(batch, ARRAYS)):
            return drawn  # time first
        try:
            return num_rows(batch)
        except ConfigError:
            if drawn is None:
                raise
            return drawn

    def _is_like(self, part: Any, path: Path) -> bool:
        """Whether a part is an array, or a list, as it was in the first batch."""
        return isinstance(part, ARRAYS) != self._shapes[path].startswith("(")

    def _named_rows(self, batch: Any) -> int | None:
        """Samples by the parts that the user says are cut."""
        found = {self._given.name(path, _is_pair(batch)): part for path, part in _walk(batch)}
        if not self.seen and (missing := self._given.missing(found)):
            raise ConfigError(
                f"batch= (--batch) names {missing!r}, which this batch does not have; it has: {', '.join(filter(None, found))}"
            )
        lengths: dict[str, int] = {}
        for name, axis in self._given.cut():
            part = found.get(name)
            if has_entries(part):
                if not _has_axis(part, axis):
                    raise ConfigError(
                        f"batch= (--batch) says {name} is cut on axis {axis}; it has the shape {_shape(part)}"
                    )
                lengths[name] = _length(part, axis)
        if len(set(lengths.values())) > 1:
            counts = ", ".join(f"{name} has {count}" for name, count in lengths.items())
            raise ConfigError(
                f"batch= (--batch) says that these have one entry per sample, and their numbers differ: {counts}"
            )
        return next(iter(lengths.values()), None)

    def _look(self, value: Any, path: Path, rows: int) -> None:
        """Read a part and everything in it."""
        if has_entries(value):
            axis = self._axis(value, path, rows)
            if axis is not None:
                self._look_for_positions(value, path, rows)
                return
        if isinstance(value, PackedSequence):
            name = self._name(path)
            self._refuse(
                lambda: (
                    f"{name} is a PackedSequence, which has no axis of samples: pack inside the model, or {_OTHERWISE}"
                )
            )
        elif not _is_series(value):
            for key, child in fields_of(value):
                self._look(child, (*path, key), rows)
        elif path in self._shapes or _entries(value) > 1:
            self._look_at_whole(value, path)

    def _axis(self, value: Any, path: Path, rows: int) -> int | None:
        """The axis of a part's samples: as it was decided before, or now."""
        if path not in self._axes:
            axis = self._decide(value, path, rows)
            self._axes[path] = axis
            if axis is not None:
                self._shapes[path] = _shape(value)
            return axis
        axis = self._axes[path]
        if axis is not None and not (_has_axis(value, axis) and _length(value, axis) == rows):
            self._refuse(
                lambda: (
                    f"{self._told(path)} was read as having one entry per sample, and in a later batch of {rows} samples it "
                    f"is {_shape(value).strip('()')}, without {rows} on axis {axis}: what is joined of all samples cannot be "
                    f"cut so; {_OTHERWISE}"
                )
            )
        return axis

    def _decide(self, value: Any, path: Path, rows: int) -> int | None:
        by_hand = self._given.axis(self._name(path))
        if by_hand is not None:
            axis = None if by_hand < 0 else by_hand
            fits = axis is not None and _has_axis(value, axis) and _length(value, axis) == rows
            return axis if fits else None
        return self._of_array(value, path, rows) if isinstance(value, ARRAYS) else self._of_list(value, path, rows)

    def _of_array(self, value: Any, path: Path, rows: int) -> int | None:
        fits = [axis for axis in (0, 1) if axis < value.ndim and value.shape[axis] == rows]
        if self._stacks or fits in ([], [0]) or (fits == [0, 1] and _is_plainly_first(value)):
            return 0 if 0 in fits else None
        small = self._fewer(path, rows)
        if small is not None and getattr(small[1], "ndim", None) == value.ndim:
            grown = [
                axis for axis in range(value.ndim) if (value.shape[axis], small[1].shape[axis]) == (rows, small[0])
            ]
            if len(grown) < 2:
                return grown[0] if grown else None
        if fits == [1]:
            self._second.add(path)
            return None
        self._shapes[path] = _shape(value)
        self._refuse(
            lambda: f"{self._told(path)} has the {rows} samples of the batch on two axes: {self._either(path)}"
        )
        return 0

    def _either(self, path: Path) -> str:
        return f"if axis 1 is that of the samples, {_BY_HAND.format(self._text({path: 1}))}; else {_BY_HAND.format(self.text)}"

    def _of_list(self, value: Sequence[Any], path: Path, rows: int) -> int | None:
        """Whether a sequence of as many elements as samples has one per sample (0), or is one of fields (None)."""
        if len(value) != rows:
            return None
        if any(name.startswith(f"{self._name(path)}.") for name in self._given.names):
            return None  # the user names what is in it
        arrays = [leaf for leaf in leaves(value, ARRAYS) if leaf.ndim]
        if self._stacks:
            return None if arrays or any(map(fields_of, value)) else 0
        columns = [_has_columns(item, rows) for item in value]
        every, some = all(leaf.shape[0] == rows for leaf in arrays) if arrays else all(columns), any(columns)
        if type(value) is tuple and not path and every and len(arrays) == rows:
            return None  # a pair of tensors
        # The batch itself is nearly always one of fields, of which some may be whole or not stacked.
        if _are_alike(value) and (path or not any(item is None for item in value)):
            if not (every if path else some) and not _may_be_states(value, arrays):
                return 0
        elif every or (some and not path):
            return None
        elif path and not some:
            return 0
        small = self._fewer(path, rows)
        if small is not None and type(small[1]) in (list, tuple):
            return 0 if len(small[1]) == small[0] else None
        self._shapes[path] = _shape(value)
        name = self._name(path)
        self._refuse(
            lambda: (
                f"{name} is a {type(value).__name__} of {rows} elements in a batch of {rows} samples: one per sample, or "
                f"{rows} fields of all samples. If it is one per sample, {_BY_HAND.format(self.text)}; else name the fields, "
                f'such as batch="{CUT}: {self._name((*path, 0))}, {self._name((*path, 1))}" (--batch); or use another batch size'
            )
        )
        return 0

    def _fewer(self, path: Path, rows: int) -> tuple[int, Any] | None:
        """What is at a path in a batch of a few samples, and how many; None where no such batch can be made."""
        few = 3 if rows != 3 else 2
        if few not in self._few:
            self._few[few] = self._example(few)
        part = None if self._few[few] is None else _at(self._few[few], path)
        return None if part is None else (few, part)

    # -------------------------------------------------------------------------------------------------------- what is odd

    def _look_at_whole(self, value: Any, path: Path) -> None:
        if path not in self._shapes:
            self._axes[path], self._shapes[path] = None, _shape(value)
            if self._given.axis(self._name(path)) is None:
                self._whole[path] = value
                if self.seen:
                    self._refuse(lambda: self._changing(path, "it is not so in every batch"))
        elif path in self._whole and not _same(self._whole[path], value):
            now = _shape(value).strip("()")
            same = now == self._shapes[path].strip("()")
            how = "its values change from batch to batch" if same else f"in another batch it is {now}"
            self._refuse(lambda: self._changing(path, how))
        elif path in self._second:
            self._refuse(
                lambda: (
                    f"{self._told(path)} has as many entries on axis 1 as the batch has samples: {self._either(path)}"
                )
            )

    @property
    def guess(self) -> str:
        """Where the number of samples was taken from, if nothing told how many were drawn; else ""."""
        return _GUESS.format(self._guessed) if self._guessed else ""

    def _changing(self, path: Path, how: str) -> str:
        second = path in self._second
        where = f" If its samples are on axis 1, {_BY_HAND.format(self._text({path: 1}))}." if second else ""
        where += f" {self.guess}." if self.guess else ""
        return (
            f"{self._told(path)} has not one entry per sample, so it would travel whole to every worker, and {how}: what "
            "belongs to single samples, or names positions in the batch, would be wrong in a part of the batch. Join it on the "
            f"worker (in step) from a list with one entry per sample, or give split_fn; if every worker needs all of it, "
            f"{_BY_HAND.format(self.text)}; or let one worker do every batch, in data mode: shares=[1, 0] (--shares 1,0).{where}"
        )

    def _look_for_positions(self, value: Any, path: Path, rows: int) -> None:
        """Refuse what by name and values numbers the samples of the batch, in both of the first two batches."""
        named = path and isinstance(path[-1], str) and _INDEX_NAME.search(path[-1])
        if not named or self._stacks or self.seen > 1 or rows < 2 or not isinstance(value, ARRAYS) or value.ndim != 1:
            return
        if self._given.axis(self._name(path)) is not None:
            return
        numbers = np.asarray(value) if isinstance(value, np.ndarray) else value.detach().cpu().numpy()
        inside = numbers.dtype.kind in "iu" and bool(((numbers >= 0) & (numbers < rows)).all())
        if not self.seen and inside:
            self._positions.add(path)
        elif self.seen and inside and path in self._positions:
            self._refuse(
                lambda: (
                    f"{self._told(path)} holds numbers from 0 to {rows - 1}, as positions in the batch do, and these would "
                    f"be wrong in a part of it: {_OTHERWISE}; if they are none, {_BY_HAND.format(self.text)}"
                )
            )

    def _check_first(self, batch: Any, rows: int, drawn: int | None) -> None:
        """Refuse a first batch that has nothing to cut, or more entries than samples were drawn."""
        if all(axis is None for axis in self._axes.values()):
            self._refuse(lambda: self._nothing_to_cut(batch, rows))
        elif drawn is not None and rows > drawn and not self._given.names:
            self._refuse(
                lambda: (
                    f"{drawn} samples were drawn and the batch has {rows} entries: where several belong to one sample, a "
                    f"share may get a part of one. If each entry stands for itself, {_BY_HAND.format(self.text)}; "
                    f"else {_OTHERWISE}"
                )
            )

    def _nothing_to_cut(self, batch: Any, rows: int) -> str:
        try:
            pack(batch)
        except ConfigError as error:  # the true cause: it cannot even travel
            return str(error)
        parts = ", ".join(map(self._told, self._shapes)) or f"a {type(batch).__name__}"
        words = self._text(dict.fromkeys(self._second, 1)) if self._second else "cut on axis 1: NAME"
        return (
            f"nothing in the batch has its {rows} samples on its first axis, so it cannot be shared out: it has {parts}; put the "
            f"batch axis first (batch_first=True), {_BY_HAND.format(words)}, or {_OTHERWISE}"
        )

    def _refuse(self, sentence: Callable[[], str]) -> None:
        self._trouble = self._trouble or sentence  # made when it is read: then all of the batch is known

    def _name(self, path: Path) -> str:
        return self._given.name(path, self._pair)

    def _told(self, path: Path) -> str:
        return f"{self._name(path)} {self._shapes[path].strip('()')}"


# ---------------------------------------------------------------------------------------------------------- one part


def _is_pair(batch: Any) -> bool:
    return type(batch) in (list, tuple) and len(batch) == 2


def _has_axis(part: Any, axis: int) -> bool:
    """Whether a part has entries along an axis."""
    return has_entries(part) and axis < (part.ndim if isinstance(part, ARRAYS) else 1)


def _length(part: Any, axis: int) -> int:
    return int(part.shape[axis]) if isinstance(part, ARRAYS) else len(part)


def _shape(part: Any) -> str:
    """A shape as it is told, in round brackets that of a list."""
    return str(list(part.shape)) if isinstance(part, ARRAYS) else f"([{len(part)}])"


def _is_plainly_first(value: Any) -> bool:
    """Whether the first of two equal axes is that of the samples by custom: rows of features, images."""
    whole = (
        not (value.is_floating_point() or value.is_complex())
        if isinstance(value, Tensor)
        else value.dtype.kind in "iub"
    )
    return bool(value.ndim == 4 or (value.ndim == 2 and not whole))


def _may_be_states(value: Sequence[Any], arrays: Sequence[Any]) -> bool:
    """Whether two elements may be hidden state and cell of an LSTM, [layers, 2, units] each."""
    alike = len(value) == len(arrays) == 2 and arrays[0].shape == arrays[1].shape
    return alike and arrays[0].ndim == 3 and arrays[0].shape[1] == 2


def _is_series(value: Any) -> bool:
    """Whether a value is a row of plain values: nothing in it is looked into. Height and width are two numbers."""
    if isinstance(value, (*ARRAYS, set, frozenset)):
        return True
    if type(value) not in (list, tuple) or len(value) <= (3 if type(value) is tuple else 1):
        return False
    return not any(fields_of(item) or (isinstance(item, ARRAYS) and item.ndim) for item in value)


def _entries(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel()
    return int(value.size) if isinstance(value, np.ndarray) else len(value)


def _are_alike(values: Sequence[Any]) -> bool:
    """Whether values may be samples of one data set."""
    return len({_kind(value) for value in values if value is not None}) <= 1


def _kind(value: Any) -> Any:
    """What samples of one data set have in common, and fields have not: type, element type and axes, keys."""
    if isinstance(value, ARRAYS):
        return "array", str(value.dtype), value.ndim
    inside = fields_of(value)[:1] if type(value) is list else fields_of(value)  # a list may have any length
    return type(value), tuple((key, _kind(child)) for key, child in inside)


def _has_columns(value: Any, rows: int) -> bool:
    """Whether a value may be a field: it, or something in it, has an entry per sample."""
    if isinstance(value, ARRAYS):
        return bool(value.ndim) and value.shape[0] == rows
    if type(value) in (list, tuple) and len(value) == rows and _are_alike(value):
        return True
    return any(_has_columns(child, rows) for _, child in fields_of(value))


def _same(one: Any, other: Any) -> bool:
    """Whether two values would travel as the same bytes."""
    if one is other:
        return True
    if type(one) is not type(other) or (
        isinstance(one, ARRAYS) and (one.shape, one.dtype) != (other.shape, other.dtype)
    ):
        return False
    try:
        (tree, buffers), (again, more) = pack(one), pack(other)
    except ConfigError:  # it cannot travel, and sending it tells why
        return True
    return tree == again and b"".join(buffers) == b"".join(more)


def _at(batch: Any, path: Path) -> Any:
    """What lies at a path of a batch; None where nothing does."""
    for key in path:
        batch = dict(fields_of(batch)).get(key)
    return batch


def _walk(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every part of a batch with its path, the batch itself first."""
    yield path, value
    for key, child in [] if isinstance(value, PackedSequence) else fields_of(value):
        yield from _walk(child, (*path, key))
