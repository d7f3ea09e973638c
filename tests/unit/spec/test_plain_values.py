"""What is pushed and pulled is the same on the other side, or is refused by name, or shows itself."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import io
import pathlib
import re
import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from guava_nb.data.codec import pack
from guava_nb.errors import ConfigError, RemoteProtocolError
from guava_nb.spec import plain_values
from guava_nb.spec.plain_values import ArrowTable, RemoteObject, Table, pack_values, unpack_values

KEYS = st.one_of(st.text(), st.integers(), st.tuples(st.integers(), st.text()))
PLAIN = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary(max_size=8)),
    lambda inner: st.one_of(st.lists(inner), st.tuples(inner, inner), st.dictionaries(KEYS, inner)),
    max_leaves=20,
)


def there_and_back(value: Any, strictly: bool = True) -> Any:
    tree, buffers = pack_values({"x": value}, strictly)
    return unpack_values(tree, bytearray(b"".join(bytes(part) for part in buffers)))["x"]


@settings(max_examples=50)
@given(PLAIN)
def test_plain_data_is_the_same_there(value: Any) -> None:
    assert there_and_back(value) == value


def test_tensors_and_arrays_keep_type_and_values() -> None:
    tensor = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).t().requires_grad_()
    back = there_and_back({"t": [tensor], "a": np.arange(3, dtype="<u2"), "n": np.float32(1.5)})
    assert torch.equal(back["t"][0], tensor.detach()) and back["t"][0].dtype is torch.bfloat16
    assert back["a"].dtype == np.uint16 and back["a"].tolist() == [0, 1, 2] and back["n"] == np.float32(1.5)
    assert there_and_back(collections.Counter("aab")) == {"a": 2, "b": 1}
    assert there_and_back(np.array([["x", None]], object)).tolist() == [["x", None]]


@settings(max_examples=50)
@given(
    st.one_of(
        st.datetimes(timezones=st.none() | st.timezones()),
        st.dates(),
        st.times(),
        st.timedeltas(),
        st.decimals(allow_nan=False),
    )
)
def test_times_and_decimals_are_the_same_there(value: Any) -> None:
    back = there_and_back({"k": [value]})["k"][0]
    assert back == value and type(back) is type(value)


def test_every_kind_of_array_and_tensor_keeps_its_type() -> None:
    for dtype in ("?", "i1", ">i4", "u8", "f2", "f8", "c8", "c16", "M8[D]", "m8[s]", "U3", "S2", "g"):
        array = np.zeros((2, 3), dtype).T
        back = there_and_back(array)
        assert back.dtype == array.dtype and back.shape == (3, 2) and (back == array).all()
    for name in (
        "bool",
        "int8",
        "uint16",
        "int64",
        "float16",
        "bfloat16",
        "float8_e4m3fn",
        "float64",
        "complex64",
        "complex128",
    ):
        tensor = torch.ones(2, 3).to(getattr(torch, name))
        back = there_and_back(tensor)
        assert back.dtype is tensor.dtype and torch.equal(back.to(torch.complex64), tensor.to(torch.complex64))


def test_tables_of_polars_and_arrow_are_the_same_there() -> None:
    polars = pytest.importorskip("polars")
    arrow = pytest.importorskip("pyarrow")
    days = [datetime.date(2020, 1, 1), None]
    frame = polars.DataFrame({"n": [1, None], "s": ["x", "z"], "d": days, "l": [[1.5], []]})
    assert there_and_back(frame).equals(frame, null_equal=True)
    assert (
        there_and_back({"k": frame["s"]})["k"].equals(frame["s"])
        and there_and_back(frame.clear()).schema == frame.schema
    )
    with pytest.raises(ConfigError, match=r"push its collect\(\)"):
        there_and_back(frame.lazy())
    table = arrow.table({"n": [1, None], "s": ["x", "z"], "d": days, "f": [{"a": 1}, None]})
    assert there_and_back([table])[0].equals(table)
    (batch,) = table.to_batches()
    assert there_and_back(batch).equals(batch) and there_and_back(batch.slice(0, 0)).equals(batch.slice(0, 0))
    for library, kind in (("polars", "DataFrame"), ("pyarrow", "Table"), ("os", "system")):
        damaged, buffers = pack({"x": ArrowTable(library, kind, np.arange(99, dtype=np.uint8))})
        with pytest.raises(RemoteProtocolError, match="a table "):
            unpack_values(damaged, bytearray(b"".join(bytes(part) for part in buffers)))


@dataclasses.dataclass
class Mine:
    size: int = 3


class Rude:
    def __repr__(self) -> str:
        raise ValueError("no")


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (lambda: 1, "is a function, which cannot travel: import it or define it there"),
        (len, "is a function"),
        (Mine, "is a class, which cannot travel: import it or define it there"),
        (pathlib, "is a module"),
        ((k for k in "a"), "is a generator, which cannot travel: push list() of it"),
        (io.StringIO("x"), "is an open file, which cannot travel: push what it holds, its read()"),
        (object(), "is an object,"),
    ],
)
def test_the_kinds_of_python_have_their_everyday_names(value: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        there_and_back(value)


def test_what_is_not_plain_is_refused_by_name_or_shows_itself() -> None:
    for value, way in [
        (Mine(), "push dataclasses.asdict() of it"), ([Mine()], "asdict"), (Rude(), "make it there in a %%guava_px cell"),
        ({"k": torch.nn.Linear(1, 1)}, "push its state_dict()"), (torch.eye(2).to_sparse(), "to_dense()"),
        (np.ma.array([1]), "filled()"), (np.zeros(1, "i4,f8"), "a dict of its fields"), (pathlib.Path("x"), "push str() of it"),
        ((k for k in "a"), "push list() of it"), (lambda: 1, "define it there in a %%guava_px cell"),
        (collections.deque([1]), "push list() of it"),
        (np.array(["x"], np.dtypes.StringDType()), "astype(str)"),
    ]:  # fmt: skip
        with pytest.raises(
            ConfigError, match=rf"^x is a .*, which cannot travel: .*{re.escape(way)}.*\. Numbers, .* can$"
        ):
            there_and_back(value)
    shown = there_and_back([Mine(), Rude()], strictly=False)
    assert [repr(one) for one in shown] == ["Mine(size=3)", "(Rude: its __repr__ raised ValueError)"]
    assert isinstance(shown[0], RemoteObject) and shown[0].kind == "Mine"
    assert (
        len(there_and_back(type("Long", (), {"__repr__": lambda self: "y" * 50_000})(), strictly=False).text) < 11_000
    )


def test_what_contains_itself_is_refused_or_shows_itself() -> None:
    ring: list[Any] = []
    ring.append(ring)
    with pytest.raises(ConfigError, match="contains itself"):
        there_and_back(ring)
    assert repr(there_and_back(ring, strictly=False)) == "[[...]]"


def test_no_class_of_the_peer_is_looked_up() -> None:
    tree, _ = pack({"x": Mine()})
    with pytest.raises(RemoteProtocolError, match="only plain ones are taken"):
        unpack_values(tree, b"")
    tree, _ = pack([1])
    with pytest.raises(RemoteProtocolError, match="no names"):
        unpack_values(tree, b"")


def test_tables_are_the_same_there() -> None:
    pandas = pytest.importorskip("pandas")
    days = pandas.to_datetime(["2020-01-01", "2020-06-01", "2021-01-01"])
    table = pandas.DataFrame(
        {
            "number": [1, 2, 3], "text": ["x", None, "z"], "day": days, "zone": days.tz_localize("Europe/Berlin"),
            "kind": pandas.Categorical(["u", "v", "u"], categories=["w", "v", "u"], ordered=True),
            "whole": pandas.array([1, None, 3], dtype="Int64"), "flag": [True, False, True],
        },
        index=pandas.Index(["p", "q", "r"], name="who"),
    )  # fmt: skip
    pandas.testing.assert_frame_equal(there_and_back([table])[0], table)
    pandas.testing.assert_series_equal(there_and_back(table["number"]), table["number"])
    empty = pandas.DataFrame({"a": pandas.Series([], dtype=float)})
    pandas.testing.assert_frame_equal(there_and_back(empty), empty)
    twice = pandas.DataFrame([[1, 2.5]], columns=["a", "a"])
    pandas.testing.assert_frame_equal(there_and_back(twice), twice)
    with pytest.raises(ConfigError, match="column 'o' of x is a .*Mine"):
        there_and_back(pandas.DataFrame({"o": [Mine()]}))
    with pytest.raises(ConfigError, match="several levels"):
        there_and_back(table.set_index(["number", "text"]))


def test_a_table_needs_pandas_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    tree, _ = pack({"x": Table([["a", "int64", [1]]])})
    damaged, _ = pack({"x": Table([["a"]])})
    with pytest.raises(RemoteProtocolError, match="a table arrived damaged"):
        unpack_values(damaged, b"")
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    with pytest.raises(ConfigError, match="pandas is not installed"):
        unpack_values(tree, b"")


@pytest.mark.parametrize(
    ("version", "opened"),
    [
        ("14.0.0", False), ("13.0.0", False), ("0.17.1", False), ("14.0", False),
        ("14.0.1", True), ("14.1.0.dev5", True), ("23.0.0", True),
    ],
)  # fmt: skip
def test_a_pyarrow_that_may_run_what_a_stream_names_opens_none(
    version: str, opened: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Opened(Exception):
        """The stream was opened."""

    class Ipc:
        @staticmethod
        def open_stream(stream: object) -> None:
            raise Opened

    library: Any = ModuleType("pyarrow")
    library.__version__, library.ipc = version, Ipc
    monkeypatch.setitem(sys.modules, "pyarrow", library)
    table = ArrowTable("pyarrow", "Table", np.arange(9, dtype=np.uint8))
    with pytest.raises(Opened if opened else ConfigError) as caught:
        plain_values._arrow_table(table)
    assert opened or f"pyarrow {version} may run code" in str(caught.value)
