"""Slices put together are the batch; shares sum up."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from guava_nb.data.batch_reading import BatchReading
from guava_nb.data.sample_count import num_rows
from guava_nb.data.split import RowSplitter, share_ranges
from guava_nb.errors import ConfigError

COMMON = settings(max_examples=80, deadline=None)


def split_rows(batch: Any, ranges: Any, rows: int | None = None) -> list[Any]:
    """Cut a batch that a loader gave twice, so that it is known what is the same in each batch."""
    reading = BatchReading()
    count = [reading.read(batch, rows) for _ in range(2)][1]
    return RowSplitter(reading=reading).split(batch, ranges, count)


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclass(frozen=True)
class Item:
    image: Any
    note: Any = "same for all"


weights = st.lists(st.floats(0, 1e6) | st.integers(0, 9), min_size=1, max_size=7).filter(any)


# -------------------------------------------------------------------------------------------------------------- shares


@COMMON
@given(st.integers(0, 5000), weights)
def test_shares_follow_each_other_and_sum_up_and_are_fair(rows: int, weights: list[float]) -> None:
    ranges = share_ranges(rows, weights)
    assert len(ranges) == len(weights)
    stops = [0, *(stop for _, stop in ranges)]
    assert [start for start, _ in ranges] == stops[:-1]
    assert stops[-1] == rows
    for (start, stop), weight in zip(ranges, weights, strict=True):
        assert abs((stop - start) - rows * weight / sum(weights)) < 1 + 1e-6
        assert stop == start or weight > 0
    assert share_ranges(rows, [weight * 2 for weight in weights]) == ranges


def test_ties_go_to_the_lower_index() -> None:
    assert share_ranges(65, [1, 1, 1]) == [(0, 22), (22, 44), (44, 65)]
    assert share_ranges(2, [1, 1, 1]) == [(0, 1), (1, 2), (2, 2)]
    assert share_ranges(32, [3, 1]) == [(0, 24), (24, 32)]


@pytest.mark.parametrize(("rows", "weights"), [(3, []), (3, [0, 0]), (3, [-1, 2]), (3, [float("nan")]), (-1, [1])])
def test_weights_that_share_nothing_are_refused(rows: int, weights: list[float]) -> None:
    with pytest.raises(ConfigError, match="cannot be shared out"):
        share_ranges(rows, weights)


# --------------------------------------------------------------------------------------------------------------- split


def put_together(parts: list[Any], whole: Any) -> Any:
    """The oracle: the batch again from its parts, by the table in the module."""
    if isinstance(whole, (torch.Tensor, np.ndarray)):
        if whole.ndim and sum(len(part) for part in parts) == len(whole):
            return torch.cat(parts) if isinstance(whole, torch.Tensor) else np.concatenate(parts)
        return parts[0]
    if isinstance(whole, dict):
        return type(whole)((key, put_together([part[key] for part in parts], whole[key])) for key in whole)
    if isinstance(whole, Item):
        return Item(*(put_together([getattr(part, f) for part in parts], getattr(whole, f)) for f in ("image", "note")))
    if isinstance(whole, (list, tuple)):
        if not isinstance(whole, Pair) and any(len(part) != len(whole) for part in parts):
            return sum(parts, type(whole)())
        items = [put_together([part[index] for part in parts], whole[index]) for index in range(len(whole))]
        return Pair(*items) if isinstance(whole, Pair) else type(whole)(items)
    return parts[0]


def assert_equal(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, np.ndarray):
        np.testing.assert_array_equal(one, other)
    elif isinstance(one, Item):
        assert_equal(vars(one), vars(other))
    elif isinstance(one, dict):
        assert list(one) == list(other)
        assert_equal(list(one.values()), list(other.values()))
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for mine, theirs in zip(one, other, strict=True):
            assert_equal(mine, theirs)
    else:
        assert one == other


@st.composite
def batches(draw: st.DrawFn) -> tuple[int, Any]:
    rows = draw(st.integers(6, 12))  # more than any container here has fields, so that nothing is ambiguous
    leaves = st.sampled_from(
        [
            torch.arange(rows * 3).view(rows, 3),
            torch.arange(rows),
            torch.tensor(3.0),
            torch.zeros(0),
            np.arange(rows * 2.0).reshape(rows, 2),
            [f"row {row}" for row in range(rows)],
            tuple({"id": row} for row in range(rows)),
            [list(range(row)) for row in range(rows)],
            "text",
            None,
            7,
        ]
    )
    inner = st.recursive(
        leaves,
        lambda children: st.one_of(
            st.lists(children, min_size=1, max_size=3),
            st.lists(children, min_size=1, max_size=3).map(tuple),
            st.dictionaries(st.sampled_from("abc"), children, max_size=3),
            st.dictionaries(st.sampled_from("abc"), children, max_size=3).map(OrderedDict),
            st.builds(Pair, children, children),
            st.builds(Item, children, children),
        ),
        max_leaves=6,
    )
    return rows, (torch.arange(rows), draw(inner))


@COMMON
@given(batches(), weights)
def test_parts_put_together_are_the_batch(drawn: tuple[int, Any], weights: list[float]) -> None:
    rows, batch = drawn
    assert num_rows(batch) == rows
    ranges = share_ranges(rows, weights)
    parts = split_rows(batch, ranges)
    assert [len(part[0]) for part in parts] == [stop - start for start, stop in ranges]
    filled = [part for part, (start, stop) in zip(parts, ranges, strict=True) if stop > start]
    assert_equal(put_together(filled, batch), batch)


def test_slices_of_tensors_are_views() -> None:
    images = torch.zeros(8, 2)
    parts = split_rows((images, torch.zeros(8)), [(0, 5), (5, 8)])
    parts[1][0][0] = 1.0
    assert images[5].tolist() == [1.0, 1.0]


HALVES = [(0, 1), (1, 2)]


def test_two_samples_of_two_stacked_fields_are_fields() -> None:
    images, labels = torch.zeros(2, 3), torch.tensor([4, 5])
    assert_equal(split_rows([images, labels], HALVES)[1], [images[1:], labels[1:]])
    with pytest.raises(
        ConfigError, match=r"inputs is a list of 2 elements in a batch of 2 samples.*inputs\.0, inputs\.1"
    ):
        split_rows(([images, images], labels), HALVES)
    named = BatchReading("cut: inputs.0, inputs.1, targets")
    assert named.read(([images, images], labels), None) == 2
    parts = RowSplitter(reading=named).split(([images, images], labels), HALVES, 2)
    assert_equal(parts[0], ([images[:1], images[:1]], labels[:1]))
    weights = torch.ones(10)
    assert_equal(split_rows((images, weights), HALVES)[0], (images[:1], weights))


def test_samples_that_were_not_stacked_are_given_out_one_by_one() -> None:
    images = (torch.zeros(3, 4, 4), torch.zeros(3, 5, 5))
    targets = ({"boxes": torch.zeros(1, 4)}, {"boxes": torch.zeros(7, 4)})
    parts = split_rows((images, targets), HALVES, rows=2)
    assert_equal(parts[1], ((images[1],), (targets[1],)))
    samples = [(torch.zeros(3, 4), 1), (torch.zeros(3, 5), 0)]
    assert_equal(split_rows(samples, HALVES, rows=2)[0], [samples[0]])


def test_what_once_had_another_length_is_never_taken_for_rows() -> None:
    weights = torch.ones(3)
    captions = [["a", "b", "c"], ["d", "e", "f"], ["g", "h", "i"], ["j", "k", "l"]]
    fields = [("a", "b", "c", "d"), ("e", "f", "g", "h"), ("i", "j", "k", "l")]
    reading, shorter = BatchReading(), (torch.zeros(3), weights, captions[:3], [field[:3] for field in fields])
    assert reading.read((torch.zeros(4), weights, captions, fields), 4) == 4 and reading.read(shorter, 3) == 3
    short = RowSplitter(reading=reading).split(shorter, [(0, 1), (1, 3)], 3)
    assert_equal(short[0], (torch.zeros(1), weights, captions[:1], [("a",), ("e",), ("i",)]))


def test_one_range_and_no_range_and_empty_ranges() -> None:
    batch = {"x": torch.arange(3), "flag": True}
    assert_equal(split_rows(batch, [(0, 3)])[0], batch)
    assert split_rows(batch, []) == []
    assert [len(part["x"]) for part in split_rows(batch, [(0, 0), (0, 3), (3, 3)])] == [0, 3, 0]


def test_the_users_own_function_is_used_and_counted() -> None:
    seq_first = torch.arange(12).view(3, 4)
    splitter = RowSplitter(lambda batch, ranges: [batch[:, start:stop] for start, stop in ranges])
    assert [tuple(part.shape) for part in splitter.split(seq_first, [(0, 1), (1, 4)], rows=4)] == [(3, 1), (3, 3)]
    with pytest.raises(ConfigError, match="gave 1 parts for 2 ranges"):
        RowSplitter(lambda batch, ranges: [batch]).split(seq_first, HALVES)


@pytest.mark.parametrize(
    ("batch", "rows", "message"),
    [
        ({"x": torch.zeros(5, 2)}, 2, "put the batch axis first"),
        (torch.tensor(1.0), 2, "put the batch axis first"),
        (torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)]), 2, "PackedSequence"),
        (torch.zeros(1), 1, "do not lie within"),
        (3, None, "does not tell how many samples"),
    ],
    ids=["time first", "scalar", "packed", "beyond", "number"],
)
def test_what_cannot_be_cut_is_said_so(batch: Any, rows: int | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        split_rows(batch, HALVES, rows)


@pytest.mark.parametrize(
    ("batch", "rows"),
    [
        (torch.zeros(4, 2), 4),
        ((torch.tensor(1.0), np.zeros((5, 2))), 5),
        ({"meta": None, "x": [torch.zeros(0, 3)]}, 0),
        ((["a", "b"], ["c", "d"]), 2),
        ([{"id": "a"}, {"id": "b"}, {"id": "c"}], 3),
        (Item(image=torch.zeros(6)), 6),
        ([], 0),
    ],
)
def test_rows_are_found(batch: Any, rows: int) -> None:
    assert num_rows(batch) == rows


def test_a_sparse_tensor_is_left_to_be_refused_with_a_sentence() -> None:
    sparse = torch.eye(4).to_sparse()
    parts = split_rows({"x": torch.ones(4, 2), "s": sparse}, [(0, 2), (2, 4)])
    assert all(part["s"] is sparse and part["x"].shape == (2, 2) for part in parts)


def test_an_ambiguous_first_batch_is_refused_and_asks() -> None:
    """Two sequences of two steps may be fields of two samples; three and one steps can only be one per sample."""
    x = torch.zeros(2, 4)
    ranges = [(0, 1), (1, 2)]
    with pytest.raises(
        ConfigError, match='one per sample, or 2 fields of all samples.*batch="cut: x .*; one per sample: s'
    ):
        RowSplitter().split({"x": x, "s": [torch.zeros(2), torch.zeros(2)]}, ranges, 2)
    splitter = RowSplitter()
    for _ in range(2):
        first, second = splitter.split({"x": x, "s": [torch.zeros(3), torch.ones(1)]}, ranges, 2)
        assert [len(t) for t in first["s"]] == [3] and [len(t) for t in second["s"]] == [1]
    again, _ = splitter.split({"x": x, "s": [torch.zeros(2), torch.zeros(2)]}, ranges, 2)
    assert len(again["s"]) == 1 and again["s"][0].shape == (2,)
