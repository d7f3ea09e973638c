"""Rows taken apart and put together again give the batch that would have been sent whole."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from guava_nb.data.batch_reading import BatchReading
from guava_nb.data.codec import DTYPES, imported_class, pack, unpack
from guava_nb.data.rows import NotSeparable, Received, Rows, _packed, key_of
from guava_nb.data.split import RowSplitter, rewrite_marked
from guava_nb.errors import RemoteProtocolError


@dataclass
class Fields:
    images: Any
    note: str = "kept"


class Pair(NamedTuple):
    first: Any
    second: Any


def travelled(value: Any) -> Any:
    tree, buffers = pack(value)
    return unpack(tree, bytearray(b"".join(bytes(b) for b in buffers)), imported_class)


def same(one: Any, other: Any) -> None:
    """Equal to the last bit, type, shape, and strides."""
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
        assert bytes(one.contiguous().flatten().view(torch.uint8).numpy() if one.numel() else b"") == bytes(
            other.contiguous().flatten().view(torch.uint8).numpy() if other.numel() else b""
        )
    elif isinstance(one, np.ndarray):
        assert (one.dtype, one.shape, one.strides) == (other.dtype, other.shape, other.strides)
        assert one.tobytes() == other.tobytes()
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            same(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            same(a, b)
    elif isinstance(one, Fields):
        same(vars(one), vars(other))
    else:
        assert one == other


def raw_tensor(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    dtype = DTYPES[name]
    count = int(np.prod(shape)) * dtype.itemsize
    generator = torch.Generator().manual_seed(seed)
    high = 2 if name == "bool" else 256
    raw = torch.randint(0, high, (count,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)


@st.composite
def leaves(draw: st.DrawFn, rows: int) -> Any:
    kind = draw(st.sampled_from(["tensor", "array", "strings", "ragged", "strided", "whole", "number"]))
    inner = tuple(draw(st.lists(st.integers(0, 3), max_size=2)))
    seed = draw(st.integers(0, 3))
    if kind == "tensor":
        return raw_tensor(draw(st.sampled_from(sorted(DTYPES))), (rows, *inner), seed)
    if kind == "array":
        return raw_tensor(draw(st.sampled_from(["int16", "float64", "bool"])), (rows, *inner), seed).numpy()
    if kind == "strings":
        return [draw(st.text(max_size=4)) for _ in range(rows)]
    if kind == "ragged":
        return [torch.arange(draw(st.integers(0, 3))) for _ in range(rows)]
    if kind == "strided":
        return torch.arange(rows * 12.0).view(rows, 3, 4).transpose(1, 2)
    return torch.arange(rows + 1) if kind == "whole" else 0.5


@st.composite
def batches(draw: st.DrawFn) -> tuple[Any, int]:
    rows = draw(st.integers(3, 7))
    first = raw_tensor("float32", (rows, 2), draw(st.integers(0, 3)))
    parts = [first, *draw(st.lists(leaves(rows), max_size=3))]
    if draw(st.booleans()):
        parts.append(first)  # one tensor twice is one tensor again
    shape = draw(st.sampled_from(["tuple", "dict", "ordered", "pair", "fields", "nested"]))
    if shape == "dict":
        return {f"f{k}": part for k, part in enumerate(parts)}, rows
    if shape == "ordered":
        return OrderedDict((k, part) for k, part in enumerate(parts)), rows
    if shape == "pair":
        return Pair(first, tuple(parts)), rows
    if shape == "fields":
        return Fields({"all": parts}), rows
    return (tuple(parts), rows) if shape == "tuple" else (({"deep": (first, parts)}, None), rows)


@given(batches(), st.data())
def test_any_rows_of_any_batch_arrive_as_they_would_in_a_whole_one(drawn: tuple[Any, int], data: st.DataObject) -> None:
    batch, count = drawn
    reading = BatchReading()
    for _ in range(2):  # a second batch shows what is the same in each
        reading.read(batch, count)
    assume(not reading.problem)
    splitter = RowSplitter(reading=reading)
    rows = Rows(batch, count, splitter)
    wanted = data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=8))
    sent = data.draw(st.lists(st.sampled_from(wanted), unique=True))
    # What was held comes from another message, of all rows.
    whole = Received(travelled(rows.only(range(count))), count, rows.marks, rows.slots)
    held = whole.entries()
    assert [key_of(entry) for entry in held] == rows.keys
    assert [len(entry) for entry in held] == rows.sizes
    same(whole.as_came(imported_class), travelled(batch))
    came = Received(travelled(rows.only(sent)), len(sent), rows.marks, rows.slots)
    assert came.entries() == [held[i] for i in sent]
    made = came.whole([held[i] for i in wanted], imported_class)
    contiguous = list(range(min(wanted), max(wanted) + 1))
    if wanted == contiguous:
        same(made, travelled(splitter.split(batch, [(wanted[0], wanted[-1] + 1)], count)[0]))
    again = Received(travelled(ByMarks(rows.marks).only(made)), len(wanted), rows.marks, rows.slots)
    assert [key_of(entry) for entry in again.entries()] == [rows.keys[i] for i in wanted]


class ByMarks:
    """Lists of a batch packed as `Rows` packs them, decided as it was decided for the whole batch."""

    def __init__(self, marks: bytes) -> None:
        self.marks = marks

    def only(self, batch: Any) -> Any:
        def packed(value: Any) -> Any:
            return type(value)(_packed(item) for item in value) if isinstance(value, (list, tuple)) else value

        return rewrite_marked(batch, self.marks, packed)


def test_every_dtype_that_can_travel_is_kept_exactly() -> None:
    for name in DTYPES:
        batch = {"x": raw_tensor(name, (5, 3), 1), "empty": raw_tensor(name, (5, 0, 2), 1)}
        rows = Rows(batch, 5, RowSplitter())
        held = Received(travelled(rows.only(range(5))), 5, rows.marks, rows.slots).entries()
        made = Received(travelled(rows.only([])), 0, rows.marks, rows.slots).whole(held)
        same(made, travelled(batch))


def test_a_tensor_that_stands_in_two_places_is_one_again_and_is_sent_once() -> None:
    x = torch.arange(400.0).view(4, 100)
    rows = Rows((x, {"again": x}), 4, RowSplitter())
    tree, buffers = pack(rows.only([0, 2]))
    assert sum(b.nbytes for b in buffers) == 2 * 100 * 4
    held = Received(travelled(rows.only(range(4))), 4, rows.marks, rows.slots).entries()
    made = Received(travelled(rows.only([])), 0, rows.marks, rows.slots).whole(held)
    assert made[0] is made[1]["again"]


def stacked(batch: Any) -> BatchReading:
    reading = BatchReading(stacks=True)
    reading.read(batch, None)
    return reading


def test_equal_bytes_of_another_kind_have_another_key() -> None:
    zeros = [torch.zeros(2, 4), torch.zeros(2, 2, 2), torch.zeros(2, 4, dtype=torch.int32), np.zeros((2, 4), "f4")]
    keys = {Rows((value,), 2, RowSplitter(reading=stacked((value,)))).keys[0] for value in zeros}
    assert len(keys) == 4


@pytest.mark.parametrize(
    ("batch", "splitter", "reason"),
    [
        (torch.zeros(3, 2), RowSplitter(lambda batch, ranges: []), "split function"),
        ({"x": torch.zeros(2, 3)}, RowSplitter(), "one entry per sample"),
        ((torch.zeros(3), np.array(["a", None, 3], dtype=object)), RowSplitter(), "Python objects"),
    ],
)
def test_what_cannot_be_taken_apart_says_why(batch: Any, splitter: RowSplitter, reason: str) -> None:
    with pytest.raises(NotSeparable, match=reason):
        Rows(batch, 3, splitter)


def test_orders_that_do_not_fit_what_came_are_refused() -> None:
    rows = Rows((torch.arange(6.0).view(3, 2), torch.arange(3)), 3, RowSplitter())
    came = travelled(rows.only([0, 1]))
    for sent, marks, slots in ((3, rows.marks, rows.slots), (2, rows.marks[:1], rows.slots), (2, rows.marks, (1, 2))):
        with pytest.raises(RemoteProtocolError):
            Received(came, sent, marks, slots)
    with pytest.raises(RemoteProtocolError, match="was kept where"):
        Received(came, 2, rows.marks, rows.slots).whole([b"x" * 20])


@pytest.mark.parametrize("sent", [(), (1, 3), (0, 1, 2, 3)])
def test_rows_of_images_stay_channels_last(sent: tuple[int, ...]) -> None:
    """Whether they came, were held, or both."""
    images = torch.randn(4, 3, 5, 6).to(memory_format=torch.channels_last)
    rows = Rows((images, torch.arange(4)), 4, RowSplitter())
    held = Received(travelled(rows.only(range(4))), 4, rows.marks, rows.slots)
    made = Received(travelled(rows.only(sent)), len(sent), rows.marks, rows.slots).whole(held.entries())
    for batch in (made, held.as_came()):
        assert batch[0].stride() == images.stride()
        assert torch.equal(batch[0], images)
