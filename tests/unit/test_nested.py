"""A batch that may travel may also be moved, cut, counted, weighed, frozen and split into micro-batches."""

from __future__ import annotations

import dataclasses
from collections import Counter, OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Callable
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from guava_nb.data.batch_reading import BatchReading
from guava_nb.data.codec import imported_class, pack, unpack
from guava_nb.data.frozen_batch import snapshot
from guava_nb.data.sample_count import count_rows, num_rows
from guava_nb.data.sizes import size_of
from guava_nb.data.split import RowSplitter, share_ranges
from guava_nb.nested import ARRAYS, children, leaves, map_leaves, marks_of, rebuild
from guava_nb.parallel.module_state import to_device
from guava_nb.parallel.pipeline.microbatches import cut_rows, micro_batch_sizes
from guava_nb.parallel.pipeline.schedule_cache import _signature
from guava_nb.protocol.messages import Tree
from guava_nb.replica.preprocess import cut, place
from guava_nb.replica.shard import rows_of_batch
from guava_nb.training.byte_budget import _lists

COMMON = settings(max_examples=60, deadline=None)
META, CPU = torch.device("meta"), torch.device("cpu")
Old = namedtuple("Old", "a b")  # noqa: PYI024 - as users write them


class Typed(NamedTuple):
    a: Any
    b: Any = None


@dataclasses.dataclass
class Item:
    a: Any
    b: Any = "same for all"


@dataclasses.dataclass(frozen=True)
class Frozen:
    a: Any
    b: Any = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    a: Any
    b: Any = None


@dataclasses.dataclass
class Partly:
    a: Any
    b: Any = None

    def __post_init__(self) -> None:
        del self.b


def objects(*values: Any) -> np.ndarray[Any, Any]:
    made = np.empty(len(values), object)
    for place_, value in enumerate(values):
        made[place_] = value
    return made


#: Every container that the codec carries, made of two parts. The second kind has no places by which rows could be cut.
CARRIED: dict[str, Callable[[Any, Any], Any]] = {
    "dict": lambda a, b: {"a": a, 7: b},
    "OrderedDict": lambda a, b: OrderedDict(b=b, a=a),
    "list": lambda a, b: [a, b],
    "tuple": lambda a, b: (a, b),
    "namedtuple": Old,
    "NamedTuple": Typed,
    "dataclass": Item,
    "frozen dataclass": Frozen,
    "dataclass with slots": Slotted,
    "dataclass with a field unset": lambda a, b: Partly(a),
}
UNPLACED: dict[str, Callable[[Any, Any], Any]] = {
    "set": lambda a, b: {a} if _hashable(a) else set(),
    "frozenset": lambda a, b: frozenset([a]) if _hashable(a) else frozenset(),
    "slice": lambda a, b: slice(a, b),
    "array of objects": objects,
}
#: What stays in this process, where a user's loader or model may use it.
LOCAL: dict[str, Callable[[Any, Any], Any]] = {
    "defaultdict": lambda a, b: defaultdict(list, a=a, b=b),
    "UserDict": lambda a, b: UserDict(a=a, b=b),
    "list of one's own": lambda a, b: MyList([a, b]),
    "Counter": lambda a, b: Counter({"a": a, "b": b}),
}


class MyList(list[Any]):
    pass


def _hashable(value: Any) -> bool:
    return isinstance(value, torch.Tensor | str | int | float | type(None))


ROWS = 11  # more than any container here has parts, so that nothing is ambiguous


def split_rows(batch: Any, ranges: Any) -> list[Any]:
    """Cut a batch as it is read when a loader gives it twice."""
    reading = BatchReading()
    count = [reading.read(batch, None) for _ in range(2)][1]
    return RowSplitter(reading=reading).split(batch, ranges, count)


def arrays_of_rows() -> st.SearchStrategy[Any]:
    return st.sampled_from(
        [torch.arange(ROWS * 3.0).view(ROWS, 3), torch.arange(ROWS), np.arange(ROWS * 2.0).reshape(ROWS, 2)]
    )


def values(kinds: dict[str, Callable[[Any, Any], Any]]) -> st.SearchStrategy[Any]:
    whole = st.sampled_from([torch.tensor(3.0), torch.zeros(2, 2), np.ones(3), "text", b"bytes", 7, None, True])
    return st.recursive(
        arrays_of_rows() | whole,
        lambda inner: st.one_of([st.builds(make, inner, inner) for make in kinds.values()]),
        max_leaves=5,
    )


def batches(kinds: dict[str, Callable[[Any, Any], Any]]) -> st.SearchStrategy[Any]:
    """Inputs and targets, of which at least the first have rows."""
    return st.tuples(arrays_of_rows(), values(kinds))


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    elif isinstance(one, np.ndarray) and one.dtype != object:
        np.testing.assert_array_equal(one, other)
    elif isinstance(one, set | frozenset):
        assert len(one) == len(other)
    elif (inside := children(one)) is not None:
        again = children(other)
        assert again is not None and [key for key, _ in inside] == [key for key, _ in again]
        for (_, mine), (_, theirs) in zip(inside, again, strict=True):
            assert_same(mine, theirs)
    else:
        assert one == other


def structure(value: Any) -> Any:
    """Classes and keys, without what the leaves are."""
    inside = None if isinstance(value, set | frozenset) else children(value)
    return type(value) if inside is None else (type(value), [(key, structure(child)) for key, child in inside])


EVERY = {**CARRIED, **UNPLACED}


# ------------------------------------------------------------------------------------------------------------ the walker


@pytest.mark.parametrize("name", [*EVERY, *LOCAL])
def test_a_container_is_walked_mapped_and_built_again(name: str) -> None:
    one, two = torch.arange(3), torch.tensor(4.0)
    value = {**EVERY, **LOCAL}[name](one, two)
    assert any(leaf is one for leaf in leaves(value))
    assert all(leaf is one or leaf is two for leaf in leaves(value))
    mapped = map_leaves(value, lambda tensor: tensor.to(torch.float64))
    assert type(mapped) is type(value)
    assert [t.dtype for t in leaves(mapped)] == [torch.float64] * len(list(leaves(value)))
    if not isinstance(value, set | frozenset):
        assert mapped is not value and structure(mapped) == structure(value)
    assert all(leaf is one or leaf is two for leaf in leaves(value)), "the original stays"


@COMMON
@given(values({**EVERY, **LOCAL}))
def test_building_a_value_of_its_own_children_gives_an_equal_one(value: Any) -> None:
    inside = children(value)
    if inside is not None:
        assert_same(rebuild(value, [child for _, child in inside]), value)
    assert_same(map_leaves(value, lambda leaf: leaf), value)


def test_what_is_beside_the_fields_stays_and_values_are_no_containers() -> None:
    item = Item(torch.ones(2))
    item.cache = "kept"  # type: ignore[attr-defined]
    assert map_leaves(item, torch.neg).cache == "kept"
    made = map_leaves(defaultdict(list, a=torch.ones(1)), torch.neg)
    assert made["nothing yet"] == []
    assert map_leaves(MappingProxyType({"a": torch.ones(1)}), torch.neg) == {"a": torch.tensor([-1.0])}
    for plain in (torch.Size([2, 3]), "text", b"x", Item, 3, None, torch.ones(2), np.ones(2)):
        assert children(plain) is None
    assert [key for key, _ in children(Typed(1, 2)) or ()] == ["a", "b"]
    assert type(map_leaves(torch.ones(2, 2).max(0), torch.neg)).__name__ == "max"


# ------------------------------------------------------------------------------------------------- what becomes of a batch


@COMMON
@given(batches(EVERY))
def test_a_batch_travels(batch: Any) -> None:
    tree, buffers = pack(batch)
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(tree), type=Tree)
    assert_same(unpack(again, bytearray(b"".join(buffers)), imported_class), batch)


@COMMON
@given(batches({**EVERY, **LOCAL}))
def test_a_batch_is_moved(batch: Any) -> None:
    for moved in (place(batch, META), to_device(batch, META)):
        assert structure(moved) == structure(batch)
        assert all(tensor.is_meta for tensor in leaves(moved))
        assert [t.shape for t in leaves(moved)] == [t.shape for t in leaves(batch)]
    assert place(batch, CPU) is batch
    double = place(batch, CPU, double=True)
    assert all(t.dtype in (torch.float64, torch.int64) for t in leaves(double))


@COMMON
@given(batches({**CARRIED, **LOCAL}), st.lists(st.integers(0, 5), min_size=1, max_size=4).filter(any))
def test_a_batch_is_cut_into_shares_and_put_together_again(batch: Any, weights: list[int]) -> None:
    ranges = share_ranges(ROWS, weights)
    parts = split_rows(batch, ranges)
    _assert_parts(parts, [stop - start for start, stop in ranges], batch)


@COMMON
@given(batches({**CARRIED, **LOCAL}), st.integers(1, ROWS))
def test_a_batch_is_cut_into_micro_batches(batch: Any, count: int) -> None:
    sizes = micro_batch_sizes(ROWS, count)
    _assert_parts(cut_rows(batch, ROWS, sizes), sizes, batch)
    reading = BatchReading()
    reading.read(batch, ROWS)
    pieces = cut(batch, marks_of(batch, reading.axes(ROWS)), ROWS, count)
    _assert_parts([piece for piece, _ in pieces], [rows_of_batch(piece) for piece, _ in pieces], batch)
    assert [rows for _, rows in pieces] == [rows_of_batch(piece) for piece, _ in pieces]


def _assert_parts(parts: list[Any], sizes: list[int], whole: Any) -> None:
    """Each part has the structure of the whole, and its arrays of rows in their order; all else is the same object."""
    assert len(parts) == len(sizes)
    columns = [list(leaves(part, ARRAYS)) for part in parts]
    for place_, leaf in enumerate(leaves(whole, ARRAYS)):
        pieces = [column[place_] for column in columns]
        if leaf.ndim and len(leaf) == ROWS:
            assert [len(piece) for piece in pieces] == sizes
            joined = torch.cat([torch.as_tensor(piece) for piece in pieces])
            assert torch.equal(joined, torch.as_tensor(leaf))
        else:
            assert all(piece is leaf for piece in pieces)
    for part in parts:
        assert structure(part) == structure(whole)


@COMMON
@given(batches({**EVERY, **LOCAL}))
def test_rows_are_counted(batch: Any) -> None:
    assert num_rows(batch) == count_rows(batch) == rows_of_batch(batch) == ROWS


@COMMON
@given(batches({**EVERY, **LOCAL}))
def test_a_frozen_copy_shares_nothing_that_can_change(batch: Any) -> None:
    frozen = snapshot(batch)
    assert structure(frozen) == structure(batch)
    before = [leaf.tolist() for leaf in leaves(frozen, ARRAYS)]
    owned = {id(leaf) for leaf in leaves(batch, ARRAYS)}
    assert not owned & {id(leaf) for leaf in leaves(frozen, ARRAYS)}
    assert len({id(leaf) for leaf in leaves(frozen, ARRAYS)}) == len(owned)  # what occurs twice stays one
    saved = [(leaf, leaf.clone() if isinstance(leaf, torch.Tensor) else leaf.copy()) for leaf in leaves(batch, ARRAYS)]
    try:
        for leaf in leaves(batch, ARRAYS):
            leaf[...] = leaf if leaf.dtype == object else 99
        for leaf, old in zip(leaves(frozen, ARRAYS), before, strict=True):
            assert leaf.dtype == object or leaf.tolist() == old
    finally:  # hypothesis draws the same arrays again
        for leaf, old in saved:
            leaf[...] = old


@COMMON
@given(batches({**CARRIED, **LOCAL}))
def test_the_size_is_that_of_all_leaves(batch: Any) -> None:
    expected = sum(leaf.nbytes for leaf in leaves(batch, ARRAYS)) + sum(map(len, leaves(batch, (str, bytes))))
    assert size_of(batch) == expected
    assert size_of([batch, batch]) == 2 * expected


@COMMON
@given(batches({**CARRIED, **LOCAL}))
def test_a_pipeline_knows_a_shape_again_whatever_the_numbers_are(batch: Any) -> None:
    other = map_leaves(batch, lambda tensor: tensor + 1)
    assert _signature(other) == _signature(batch)
    assert hash(_signature(batch)) == hash(_signature(other))


# -------------------------------------------------------------------------------------------------------- special values


def test_per_sample_lists_go_with_their_rows_into_micro_batches() -> None:
    """Otherwise a criterion would meet the targets of all samples with the outputs of some."""
    boxes = [torch.zeros(number, 4) for number in range(4)]
    names = ("a", "b", "c", "d")
    parts = cut_rows({"boxes": boxes, "names": names, "mask": torch.ones(4, 2)}, 4, [3, 1])
    assert [len(part["boxes"]) for part in parts] == [3, 1] and parts[1]["boxes"][0] is boxes[3]
    assert [part["names"] for part in parts] == [("a", "b", "c"), ("d",)]
    assert [part["x"].tolist() for part in cut_rows({"x": np.arange(4)}, 4, [3, 1])] == [[0, 1, 2], [3]]


def test_elements_of_a_set_are_not_cut() -> None:
    chosen = frozenset({"a", "b"})
    parts = split_rows((torch.arange(4), chosen, {torch.arange(4)}), [(0, 1), (1, 4)])
    assert all(part[1] is chosen and [len(tensor) for tensor in part[2]] == [4] for part in parts)


def test_a_packed_sequence_keeps_its_lengths_on_the_cpu() -> None:
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    for moved in (place([packed], META)[0], to_device([packed], META)[0]):
        assert isinstance(moved, PackedSequence) and moved.data.is_meta and moved.batch_sizes.device == CPU
    assert place(packed, CPU, double=True).data.dtype == torch.float64


def test_lists_with_an_element_per_sample_are_found_in_every_container() -> None:
    for name, make in {**CARRIED, **LOCAL}.items():
        assert _lists(make(["a"] * 5, None), 5) == 1, name
