"""What passes between two stages: records and flat tensors; no processes, no group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from guava_nb.errors import CollectiveError, ConfigError
from guava_nb.parallel.pipeline.stage_messages import (
    Boundary,
    TensorSpec,
    decode,
    encode,
    pack,
    put_together,
    slots_of,
    take_apart,
    unpack,
)

CPU = torch.device("cpu")
quick = settings(max_examples=80, deadline=None)


# ------------------------------------------------------------------------------------------------------------- records

DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.complex128,
    torch.int64,
    torch.uint8,
    torch.bool,
]


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    dtype = draw(st.sampled_from(DTYPES))
    value = torch.arange(max(1, torch.Size(shape).numel())).float().sub(2)[: torch.Size(shape).numel()].view(shape)
    return value.to(dtype)


leaves = st.one_of(
    tensors(),
    st.none(),
    st.booleans(),
    st.integers(-(2**60), 2**60),
    st.floats(allow_nan=False),
    st.text(max_size=4),
    st.just(torch.Size([2, 3])),
    st.just(torch.float16),
    st.just(slice(0, 4, None)),
)
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.one_of(st.text(max_size=3), st.integers(-5, 5)), inner, max_size=3),
    ),
    max_leaves=8,
)


def same(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor):
        return first.dtype == second.dtype and first.shape == second.shape and torch.equal(first, second)
    if type(first) is not type(second):
        return False
    if isinstance(first, dict):
        return list(first) == list(second) and all(same(first[key], second[key]) for key in first)
    if type(first) in (list, tuple):
        return len(first) == len(second) and all(map(same, first, second))
    return bool(first == second)


@quick
@given(values, st.booleans())
def test_a_value_passes_as_a_record_and_flat_tensors(value: Any, gradient: bool) -> None:
    record, parts = take_apart(value, gradient)
    again = decode(encode(record))
    assert again == record
    slots = slots_of([record, again])
    flats = pack(parts, record, slots, CPU)
    assert [flat.shape for flat in flats] == [(slot.length,) for slot in slots]
    assert all(flat.is_floating_point() for flat in flats)
    assert same(put_together(again, unpack(flats, again), CPU), value)


def test_shorter_micro_batches_use_the_slots_of_the_longest() -> None:
    long, short = (take_apart((torch.ones(rows, 2), torch.arange(rows)), True) for rows in (3, 2))
    slots = slots_of([long[0], short[0]])
    assert [slot.length for slot in slots] == [6, 6]
    leaf = short[1][0].requires_grad_()
    flats = pack(short[1], short[0], slots, CPU)
    assert [flat.numel() for flat in flats] == [6, 6]
    back = unpack(flats, short[0])
    back[0].sum().backward()
    assert torch.equal(leaf.grad, torch.ones(2, 2))
    assert torch.equal(back[1], torch.arange(2))


def test_what_cannot_pass_is_refused() -> None:
    with pytest.raises(ConfigError, match="a set would pass from one pipeline stage to the next"):
        take_apart([{1, 2}], True)
    other = take_apart([torch.zeros(2, dtype=torch.float64)], True)[0]
    with pytest.raises(ConfigError, match="returns other tensors"):
        slots_of([take_apart([torch.zeros(3)], True)[0], other])


@pytest.mark.parametrize(
    "record",
    [
        b"",
        b"\xc1nonsense",
        encode(Boundary(["tensor"], (TensorSpec("object", (1,), False),))),
        encode(Boundary(["tensor"], (TensorSpec("float32", (-1,), False),))),
    ],
)
def test_bytes_that_are_no_record_are_refused(record: bytes) -> None:
    with pytest.raises(CollectiveError):
        decode(record)


@pytest.mark.parametrize("tree", [["class", "os.system"], 3, ["dict", ["a"], []], ["dtype", "os"]])
def test_trees_of_unknown_kind_are_refused(tree: Any) -> None:
    with pytest.raises(CollectiveError, match="unknown kind"):
        put_together(Boundary(tree, ()), [], CPU)
