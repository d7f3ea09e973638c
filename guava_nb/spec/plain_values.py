"""What a user pushes to workers, and what code there gives back, as values that the tensor wire takes.

Knows Python's plain types, tensors, arrays and tables; knows no worker and no cell. A table of pandas travels as columns of
arrays and lists, those of polars and pyarrow as Arrow's own stream, anything else that is not plain as what it shows of itself.
Nothing is ever unpickled.
"""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import importlib
import inspect
import io
import re
from collections.abc import Callable, Iterable, Mapping
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
#: Older ones unpickle what the schema of a stream names as an extension type.
_LEAST_PYARROW = (14, 0, 1)
_PLAIN = "Numbers, text, times, lists, dicts, tensors, arrays and tables of pandas, polars and pyarrow"
#: What travels as its text: how it is read again.
_WRITTEN: dict[str, tuple[type, Callable[[str], Any]]] = {
    "datetime": (datetime.datetime, datetime.datetime.fromisoformat),
    "date": (datetime.date, datetime.date.fromisoformat),
    "time": (datetime.time, datetime.time.fromisoformat),
    "Decimal": (decimal.Decimal, decimal.Decimal),
}
_NAME_OF = {kind: name for name, (kind, _) in _WRITTEN.items()}


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


@dataclasses.dataclass
class Written:
    """A time of day, a date, a Decimal: its class, and its text."""

    kind: str
    text: str


@dataclasses.dataclass
class ArrowTable:
    """A table as Arrow's stream of bytes; `library` and `kind` are those of its class."""

    library: str
    kind: str
    stream: np.ndarray[Any, Any]


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
    """Build named values again.

    Raises:
        RemoteProtocolError: record and payload do not describe plain values.
        ConfigError: there is a table among them whose library is not installed here.
    """
    found = unpack(tree, payload, _class_of)
    if not isinstance(found, dict):
        raise RemoteProtocolError("values arrived that have no names")
    try:
        return {str(name): _rebuilt(value) for name, value in found.items()}
    except GuavaError:
        raise
    except Exception as error:  # what a library raises of a table that is none
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
        if type(value) in _NAME_OF:
            return Written(
                _NAME_OF[type(value)], str(value) if isinstance(value, decimal.Decimal) else value.isoformat()
            )
        if type(value) is datetime.timedelta:
            return Written("timedelta", f"{value.days} {value.seconds} {value.microseconds}")
        library = type(value).__module__.partition(".")[0]
        if library == "pandas":
            return self._table(value)
        return self._arrow(library, value) if library in ("polars", "pyarrow") else self._other(value)

    def _arrow(self, library: str, value: Any) -> Any:
        kind, sink = type(value).__name__, io.BytesIO()
        if library == "polars" and kind in ("DataFrame", "Series"):
            (value.to_frame() if kind == "Series" else value).write_ipc_stream(sink)
        elif library == "pyarrow" and kind in ("Table", "RecordBatch"):
            with importlib.import_module("pyarrow").ipc.new_stream(sink, value.schema) as writer:
                writer.write(value)
        else:
            return self._other(value)
        return ArrowTable(library, kind, np.frombuffer(sink.getbuffer(), np.uint8))

    def _key(self, key: Any) -> Any:
        return key if type(key) in _ATOMS or isinstance(key, tuple | np.generic) else self._other(key, "a key of ")

    def _array(self, value: np.ndarray[Any, Any]) -> Any:
        if value.dtype.kind in "VT":  # of several fields; of strings that lie elsewhere
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
        raise ConfigError(f"{what}{self._name} is {_kind(value)}, which cannot travel: {_way(value)}. {_PLAIN} can")


def _kind(value: Any) -> str:
    """What a value is, with its article; Python's own kinds by their everyday names."""
    kind = type(value)
    everyday = {
        "a class": isinstance(value, type),
        "a function": inspect.isroutine(value),
        "a module": inspect.ismodule(value),
        "an open file": isinstance(value, io.IOBase),
    }
    named = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    article = "an" if named[0].lower() in "aeiou" else "a"
    return next((name for name, holds in everyday.items() if holds), f"{article} {named}")


def _way(value: Any) -> str:
    """What to do with a value that cannot travel."""
    kind = type(value)
    if isinstance(value, io.IOBase):
        return "push what it holds, its read()"
    if isinstance(value, type) or inspect.isroutine(value) or inspect.ismodule(value):
        return "import it or define it there in a %%guava_px cell"
    if isinstance(value, torch.nn.Module):
        return "push its state_dict(), and make the model there in a %%guava_px cell"
    if isinstance(value, np.ndarray) and value.dtype.names:
        return "push a dict of its fields"
    if isinstance(value, np.ndarray) and value.dtype.kind == "T":
        return "push its astype(str)"
    for name, way in _WAYS.items():
        if hasattr(value, name):
            return way
    if dataclasses.is_dataclass(value):
        return "push dataclasses.asdict() of it"
    if kind.__module__.partition(".")[0] == "PIL":
        return "push numpy.asarray() of it"
    if isinstance(value, Iterable) and not isinstance(value, str):
        return "push list() of it"
    return "make it there in a %%guava_px cell"


#: What has one of these methods or attributes is turned into something plain by it.
_WAYS = {
    "is_sparse": "push its to_dense(), or its as_subclass(torch.Tensor)",
    "to_pydatetime": "push its to_pydatetime()",
    "__fspath__": "push str() of it",
    "filled": "push its filled()",
    "collect": "push its collect()",
    "toarray": "push its toarray()",
}


def _shown(value: Any) -> RemoteObject:
    try:
        text = repr(value)
    except Exception as failed:  # the user's class
        text = f"({type(value).__name__}: its __repr__ raised {type(failed).__name__})"
    return RemoteObject(
        type(value).__qualname__, text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]} ... (cut)"
    )


_CLASSES: dict[str, type] = {class_name(kind): kind for kind in (ArrowTable, RemoteObject, Table, Written)}


def _class_of(name: str) -> type:
    if name not in _CLASSES:
        raise RemoteProtocolError(f"a value of the class {name[:100]!r} arrived, and only plain ones are taken")
    return _CLASSES[name]


def _rebuilt(value: Any) -> Any:
    if isinstance(value, Table):
        return _frame(value)
    if isinstance(value, ArrowTable):
        return _arrow_table(value)
    if isinstance(value, Written):
        return _read(value)
    if isinstance(value, dict):
        return {key: _rebuilt(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_rebuilt, value))
    return value


def _read(value: Written) -> Any:
    if value.kind == "timedelta":
        days, seconds, microseconds = map(int, value.text.split())
        return datetime.timedelta(days, seconds, microseconds)
    return _WRITTEN[value.kind][1](value.text)


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ConfigError(
            f"a table of {name} arrived where {name} is not installed: it is needed on both sides"
        ) from None


def _pyarrow() -> Any:
    """The library, where reading what another machine wrote runs none of its code: see CVE-2023-47248."""
    found = _library("pyarrow")
    version = tuple(map(int, re.findall(r"\d+", str(found.__version__))[:3]))
    if version < _LEAST_PYARROW:
        raise ConfigError(
            f"a table of pyarrow arrived, and pyarrow {found.__version__} may run code that its sender put into it: install "
            f"pyarrow {'.'.join(map(str, _LEAST_PYARROW))} or newer here"
        )
    return found


def _arrow_table(table: ArrowTable) -> Any:
    stream = table.stream.data
    if table.library == "polars":
        frame = _library("polars").read_ipc_stream(io.BytesIO(stream))
        return frame.to_series() if table.kind == "Series" else frame
    if table.library != "pyarrow":
        raise RemoteProtocolError("a table of a library arrived that this version does not know")
    found = _pyarrow().ipc.open_stream(stream).read_all()
    found.validate(full=True)  # another machine wrote it
    return _whole_batch(found) if table.kind == "RecordBatch" else found


def _whole_batch(table: Any) -> Any:
    return next(iter(table.combine_chunks().to_batches()), None) or _library("pyarrow").RecordBatch.from_pylist(
        [], table.schema
    )


def _frame(table: Table) -> Any:
    pandas = _library("pandas")
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
