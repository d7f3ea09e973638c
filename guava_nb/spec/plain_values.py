"""What a user pushes to workers, and what code there gives back, as values that the tensor wire takes.

Knows Python's plain types, tensors, arrays and pandas' tables; knows no worker and no cell. A table travels as columns of
arrays and lists, anything else that is not plain as what it shows of itself. Nothing is ever unpickled.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from guava_nb.data.classes import class_name
from guava_nb.data.codec import pack, unpack
from guava_nb.errors import ConfigError, GuavaError, RemoteProtocolError
from guava_nb.protocol.messages import Tree

__all__ = ["RemoteObject", "Table", "pack_values", "unpack_values"]

#: Characters of what an object shows of itself.
_SHOWN_CHARS = 10_000
_ATOMS = (type(None), bool, int, float, complex, str, bytes, bytearray, slice, torch.Size, torch.dtype, torch.device)
_PLAIN = "numbers, text, lists, dicts, tensors, arrays and tables of pandas"


@dataclasses.dataclass(frozen=True)
class RemoteObject:
    """What a value at a worker that cannot travel shows of itself.

    Attributes:
        kind: its class.
        text: its representation there.
    """

    kind: str
    text: str

    def __repr__(self) -> str:
        """Show what it shows there."""
        return self.text


@dataclasses.dataclass
class Table:
    """A DataFrame: label, dtype's text and values of each column, and of the index, None for 0, 1, 2 ...; or a Series."""

    columns: list[Any]
    index: Any = None
    is_series: bool = False


def pack_values(values: Mapping[str, Any], strictly: bool) -> tuple[Tree, list[memoryview]]:
    """Describe named values for the wire.

    Args:
        values: by name.
        strictly: refuse what is not plain; else it travels as a `RemoteObject`.

    Raises:
        ConfigError: a value cannot travel; it is named.
    """
    found: dict[str, Any] = {}
    for name, value in values.items():
        shown = name or "the cell's last value"
        try:
            found[name] = _Plain(shown, strictly).of(value)
        except RecursionError:
            if strictly:
                raise ConfigError(f"{shown} contains itself, or is nested too deeply to travel") from None
            found[name] = _shown(value)
    return pack(found, "what is to travel")


def unpack_values(tree: Tree, payload: Any) -> dict[str, Any]:
    """Build named values again; tables become those of pandas where it is installed.

    Raises:
        RemoteProtocolError: record and payload do not describe plain values.
        ConfigError: there is a table among them, and pandas is not installed here.
    """
    found = unpack(tree, payload, _class_of)
    if not isinstance(found, dict):
        raise RemoteProtocolError("values arrived that have no names")
    try:
        return {str(name): _rebuilt(value) for name, value in found.items()}
    except GuavaError:
        raise
    except Exception as error:  # what pandas raises of columns that are none
        raise RemoteProtocolError(f"a table arrived damaged ({type(error).__name__}: {error})") from error


class _Plain:
    """Turns one value into plain ones; `name` is for errors."""

    def __init__(self, name: str, strictly: bool) -> None:
        self._name, self._strictly = name, strictly

    def of(self, value: Any) -> Any:
        """The value as the wire takes it."""
        if type(value) in _ATOMS or isinstance(value, np.generic):
            return value
        if isinstance(value, torch.Tensor):
            has_bytes = value.layout is torch.strided and not (value.is_meta or value.is_quantized)
            return value if has_bytes and type(value) in (torch.Tensor, torch.nn.Parameter) else self._other(value)
        if isinstance(value, np.ndarray):
            return self._array(value) if type(value) in (np.ndarray, np.memmap) else self._other(value)
        if isinstance(value, Mapping):
            return {self._key(key): self.of(item) for key, item in value.items()}
        for kind in (list, tuple, set, frozenset):
            if isinstance(value, kind):
                return kind(map(self.of, value))
        return self._table(value) if type(value).__module__.partition(".")[0] == "pandas" else self._other(value)

    def _key(self, key: Any) -> Any:
        return key if type(key) in _ATOMS or isinstance(key, tuple | np.generic) else self._other(key, "a key of ")

    def _array(self, value: np.ndarray[Any, Any]) -> Any:
        if value.dtype.kind == "V":  # of several fields
            return self._other(value)
        if value.dtype.kind != "O":
            return value
        found = np.empty(value.size, object)
        found[:] = [self.of(item) for item in value.reshape(-1).tolist()]
        return found.reshape(value.shape)

    def _table(self, value: Any) -> Any:
        pandas = importlib.import_module("pandas")
        if isinstance(value, pandas.Series):
            return Table([self._column(value.name, value)], self._index(value.index), is_series=True)
        if isinstance(value, pandas.DataFrame):
            columns = [self._column(value.columns[k], value.iloc[:, k]) for k in range(value.shape[1])]
            return Table(columns, self._index(value.index))
        return self._other(value)

    def _index(self, index: Any) -> Any:
        pandas = importlib.import_module("pandas")
        if index.equals(pandas.RangeIndex(len(index))) and index.name is None:
            return None
        if index.nlevels > 1:
            raise ConfigError(f"{self._name} has an index of several levels, which cannot travel: reset_index() first")
        return self._column(index.name, index)

    def _column(self, label: Any, column: Any) -> list[Any]:
        """Label, dtype and values; values of a dtype that numpy does not have travel one by one."""
        if isinstance(column.dtype, np.dtype) and not column.dtype.hasobject:
            return [label, "", column.to_numpy()]
        where = f"column {label!r} of {self._name}"
        gone = column.isna()
        plain = _Plain(where, strictly=True)
        if str(column.dtype) == "category":
            kept = column.array
            return [label, "category", [kept.codes, list(map(plain.of, kept.categories)), kept.ordered]]
        if getattr(column.dtype, "tz", None) is not None:
            return [label, str(column.dtype), column.to_numpy("datetime64[ns]")]
        return [
            label,
            str(column.dtype),
            [None if no else plain.of(item) for item, no in zip(column, gone, strict=True)],
        ]

    def _other(self, value: Any, what: str = "") -> Any:
        if not self._strictly:
            return _shown(value)
        kind = type(value)
        raise ConfigError(
            f"{what}{self._name} is a {kind.__module__}.{kind.__qualname__}, which cannot travel: {_PLAIN} can; make it there "
            "in a %%guava_px cell instead"
        )


def _shown(value: Any) -> RemoteObject:
    try:
        text = repr(value)
    except Exception as failed:  # the user's class
        text = f"({type(value).__name__}: its __repr__ raised {type(failed).__name__})"
    return RemoteObject(
        type(value).__qualname__, text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]} ... (cut)"
    )


_CLASSES: dict[str, type] = {class_name(kind): kind for kind in (RemoteObject, Table)}


def _class_of(name: str) -> type:
    if name not in _CLASSES:
        raise RemoteProtocolError(f"a value of the class {name[:100]!r} arrived, and only plain ones are taken")
    return _CLASSES[name]


def _rebuilt(value: Any) -> Any:
    if isinstance(value, Table):
        return _frame(value)
    if isinstance(value, dict):
        return {key: _rebuilt(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_rebuilt, value))
    return value


def _frame(table: Table) -> Any:
    try:
        pandas = importlib.import_module("pandas")
    except ImportError:
        raise ConfigError(
            "a table of pandas arrived where pandas is not installed: pandas is needed on both sides"
        ) from None
    index = None if table.index is None else pandas.Index(_series(pandas, *table.index), name=table.index[0])
    columns = [_series(pandas, *column) for column in table.columns]
    if table.is_series:
        return columns[0] if index is None else columns[0].set_axis(index)
    frame = pandas.DataFrame(dict(enumerate(columns)))
    frame.columns = pandas.Index([label for label, _, _ in table.columns])
    return frame if index is None else frame.set_axis(index)


def _series(pandas: Any, label: Any, dtype: str, values: Any) -> Any:
    if not dtype:
        return pandas.Series(values, name=label)
    if dtype == "category":
        codes, categories, ordered = values
        return pandas.Series(pandas.Categorical.from_codes(codes, categories, ordered=ordered), name=label)
    if dtype.startswith("datetime64"):
        zone = dtype.partition(",")[2].strip(" ]")
        return pandas.Series(values, name=label).dt.tz_localize("UTC").dt.tz_convert(zone).astype(dtype)
    return pandas.Series(values, name=label, dtype=dtype)
