"""Columns of a table: which are wanted, how a cell becomes a number, and where the numbers are kept."""

from __future__ import annotations

import difflib
import math
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from guava_nb.errors import ConfigError

__all__ = ["BadCell", "Block", "Columns", "RowParser", "choose_columns", "number_reader", "target_kind"]

#: Texts that stand for a missing value, in lower case.
_MISSING = frozenset({"", "na", "nan", "n/a", "null", "none"})
_FLUSH_ROWS = 4096
#: A number with one comma in it.
_WITH_COMMA = re.compile(r"[+-]?\d+,\d+(?:[eE][+-]?\d+)?")


@dataclass(frozen=True, slots=True)
class Columns:
    """Which cells of a row are wanted.

    Attributes:
        at, types: place and type of each feature.
        dtype: of the features together.
        target_at: place of the target; the last column when there is none.
        target_type: given by the user; "" to be found out.
    """

    header: tuple[str, ...]
    features: tuple[str, ...]
    at: tuple[int, ...]
    types: tuple[str, ...]
    dtype: np.dtype[Any]
    target: str | None
    target_at: int
    target_type: str

    @property
    def width(self) -> int:
        """Cells of a row."""
        return len(self.header)


def choose_columns(
    path: Path,
    header: Sequence[str],
    features: Sequence[str] | None,
    target: str | None,
    dtype: str,
    dtypes: Mapping[str, str],
    delimiter: str,
) -> Columns:
    """Find the wanted columns.

    Args:
        path: of the file, for errors.
        header: names of all columns.
        features: names of those that are wanted; None: all but the target.
        target: name of the column to predict; None: none.
        dtype: numpy type of the features.
        dtypes: other types, by name of the column; of the target also "class".
        delimiter: between cells, for errors.

    Raises:
        ConfigError: a name is unknown or stands twice, or a type is none of numbers.
    """
    _check_header(path, header, delimiter)
    wanted = _wanted_names(path, header, [features] if isinstance(features, str) else features, target, dtypes)
    types = tuple(dtypes.get(name, dtype) for name in wanted)
    target_type = dtypes.get(target, "") if target is not None else ""
    for kind, name in dict(zip(types, wanted, strict=True)).items():  # thousands of columns have few types
        _check_type(name, kind)
    if target_type not in ("", "class"):
        _check_type(str(target), target_type)
    places = {name: at for at, name in enumerate(header)}
    return Columns(
        header=tuple(header),
        features=tuple(wanted),
        at=tuple(places[name] for name in wanted),
        types=types,
        dtype=np.result_type(*[np.dtype(kind) for kind in set(types)]),
        target=target,
        target_at=len(header) - 1 if target is None else places[target],
        target_type=target_type,
    )


def _wanted_names(
    path: Path, header: Sequence[str], features: Sequence[str] | None, target: str | None, dtypes: Mapping[str, str]
) -> list[str]:
    """Return the names of the features."""
    wanted = [name for name in header if name != target] if features is None else list(features)
    known = set(header)
    for name in [*wanted, *([] if target is None else [target]), *dtypes]:
        if name not in known:
            raise ConfigError(f"{path} has no column {name!r}{_near(name, header)}; there are: {', '.join(header)}")
    if not wanted:
        raise ConfigError(f"{path} has no column but the target {target!r}: there is nothing to learn from")
    if target in wanted:
        raise ConfigError(f"{target!r} is both a feature and the target; take it out of features=")
    return wanted


def _check_header(path: Path, header: Sequence[str], delimiter: str) -> None:
    twice = sorted(name for name, count in Counter(header).items() if count > 1)
    if twice:
        raise ConfigError(
            f"{path}: the header names {', '.join(map(repr, twice))} more than once; each column needs its name"
        )
    other = next((mark for mark in (";", "\t", ",", "|") if mark != delimiter and mark in header[0]), None)
    if len(header) == 1 and other is not None:
        raise ConfigError(
            f"{path}: the header is one cell, {header[0][:60]!r}, with {delimiter!r} between cells: say delimiter={other!r}"
        )


def _check_type(name: str, kind: str) -> None:
    try:
        fine = np.dtype(kind).kind in "iuf" and kind != "float128"
    except TypeError:
        fine = False
    if not fine:
        raise ConfigError(f"column {name!r}: {kind!r} is no type of numbers; give float32, int64, uint8 or the like")


def _near(name: str, known: Sequence[str]) -> str:
    found = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {found[0]!r}?)" if found else ""


# --------------------------------------------------------------------------------------------------------------- cells


def number_reader(kind: str, missing: float | None, decimal: str = ".") -> Callable[[str], Any]:
    """Return a function from a cell's text to a number of this type; its ValueError says what is wrong with the text.

    Args:
        kind: a numpy type of numbers.
        missing: what an empty cell counts as; None: an empty cell is an error.
        decimal: "." or ",".
    """
    whole = np.dtype(kind).kind in "iu"
    convert: type[int] | type[float] = int if whole else float
    limits: Any = np.iinfo(kind) if whole else np.finfo(kind)
    low, high = convert(limits.min), convert(limits.max)

    def read(text: str) -> Any:
        try:
            if "_" in text:  # only Python spells numbers so
                raise ValueError
            value = convert(_pointed(text, decimal))
        except ValueError:
            if _WITH_COMMA.fullmatch(text.strip()) and decimal == ".":
                raise ValueError('has a comma: if it stands before the fraction, say decimal=","') from None
            return stand_in(text)
        if low <= value <= high:
            return value
        if whole:
            raise ValueError(f"does not fit {kind} ({low} to {high})")
        return stand_in(text)  # "nan" is a number to Python

    def stand_in(text: str) -> Any:
        if text.strip().lower() not in _MISSING:
            raise ValueError(f"is no {'whole number' if whole else 'finite number'} ({kind})")
        if missing is None:
            raise ValueError("is a missing value; give missing= to put a number there")
        fits = low <= missing <= high or not math.isfinite(missing)
        if not fits or (whole and not float(missing).is_integer()):
            raise ValueError(f"is a missing value, and missing={missing} does not fit {kind} ({low} to {high})")
        return convert(missing)

    return read


def _pointed(text: str, decimal: str) -> str:
    """Return a number's text as Python reads it; one with a point where commas are meant is none."""
    return text if decimal == "." else text.replace(".", "?").replace(",", ".")


def target_kind(columns: Columns, rows: Sequence[Sequence[str]], decimal: str = ".") -> str | None:
    """Return what the target holds: "class", or a type of numbers; None without a target.

    Judged by the first rows when the user did not say: a few bad cells must not turn a column of numbers into classes.

    Args:
        columns: of the file.
        rows: its first ones, as texts.
        decimal: "." or ",".
    """
    if columns.target is None:
        return None
    if columns.target_type:
        return columns.target_type
    texts = [row[columns.target_at] for row in rows if len(row) == columns.width]
    present = [text for text in texts if text.strip().lower() not in _MISSING]
    numbers = [value for text in present if (value := _number(_pointed(text, decimal))) is not None]
    if 2 * len(numbers) <= len(present):
        return "class"
    whole = all(isinstance(value, int) for value in numbers)
    return "int64" if whole else "float32" if columns.dtype.kind != "f" else str(columns.dtype)


def _number(text: str) -> int | float | None:
    for kind in (int, float):
        try:
            return kind(text) if "_" not in text and math.isfinite(kind(text)) else None
        except (ValueError, OverflowError):
            continue
    return None


class BadCell(Exception):
    """A cell that is no value of its column; never leaves this room."""

    def __init__(self, at: int, reason: str) -> None:
        super().__init__(reason)
        self.at, self.reason = at, reason


class RowParser:
    """Turns the cells of a row into its numbers; classes are numbered as they come, until `finish_classes`.

    Args:
        columns: that are read.
        kind: of the target, as `target_kind` gives it.
        missing, decimal: as for `number_reader`.
    """

    def __init__(self, columns: Columns, kind: str | None, missing: float | None, decimal: str = ".") -> None:
        self._readers = [
            (number_reader(wanted, missing, decimal), at) for wanted, at in zip(columns.types, columns.at, strict=True)
        ]
        self._classes: dict[str, int] = {}
        self._has_target = kind is not None
        if kind is not None:
            self._readers.append(
                (self._class_number if kind == "class" else number_reader(kind, missing, decimal), columns.target_at)
            )

    def _class_number(self, text: str) -> int:
        if not text.strip():
            raise ValueError("is no class: the cell is empty")
        return self._classes.setdefault(text, len(self._classes))

    def parse(self, cells: Sequence[str]) -> tuple[list[Any], Any]:
        """Return features and target, the latter None where there is none.

        Raises:
            BadCell: one is no value.
        """
        numbers: list[Any] = []
        try:
            for read, at in self._readers:  # the target last: a class counts only where the rest of its row is good
                numbers.append(read(cells[at]))
        except ValueError as error:
            raise BadCell(self._readers[len(numbers)][1], str(error)) from error
        return numbers, numbers.pop() if self._has_target else None

    def finish_classes(self, column: np.ndarray[Any, Any] | None) -> tuple[str, ...]:
        """Put the alphabetical numbers of the classes into the target's column.

        Returns:
            The classes by number; () where the target holds numbers.
        """
        classes = sorted(self._classes)
        if column is None or not classes:
            return ()
        table = np.empty(len(classes), np.int64)
        for number, text in enumerate(classes):
            table[self._classes[text]] = number
        for start in range(0, len(column), _FLUSH_ROWS):
            column[start : start + _FLUSH_ROWS] = table[column[start : start + _FLUSH_ROWS]]
        return tuple(classes)


class Block:
    """Rows of numbers that grow: in memory up to a limit, then in a temporary file.

    Args:
        dtype: of all numbers.
        width: numbers in a row; 0 for one number without a row of its own.
        memory_bytes: the limit.
    """

    def __init__(self, dtype: np.dtype[Any], width: int, memory_bytes: int) -> None:
        self._dtype, self._width, self._limit = dtype, width, memory_bytes
        self._pending: list[Sequence[Any]] = []
        self._bytes = bytearray()
        self._file: Any = None

    def add(self, row: Sequence[Any]) -> None:
        """Add a row."""
        self._pending.append(row)
        if len(self._pending) >= _FLUSH_ROWS:
            self._flush()

    def _flush(self) -> None:
        data = np.array(self._pending, self._dtype).tobytes()
        self._pending.clear()
        if self._file is None and len(self._bytes) + len(data) > self._limit:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the map on it
            self._file.write(self._bytes)
            self._bytes = bytearray()
        if self._file is None:
            self._bytes += data
        else:
            self._file.write(data)

    def finish(self) -> np.ndarray[Any, Any]:
        """Return all rows as an array that may be written to."""
        self._flush()
        shape = (-1, self._width) if self._width else (-1,)
        if self._file is None:
            return np.frombuffer(self._bytes, self._dtype).reshape(shape)
        with self._file as file:  # the map keeps it, without a name, until it is let go itself
            file.flush()
            return np.memmap(file, self._dtype, "r+").reshape(shape)
