"""What passes between two stages: records and flat tensors; no processes, no group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from guava_nb.errors import CollectiveError, ConfigError
from guava_nb.parallel.pipeline.boundary_wire import showing_dependence
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
from guava_nb.wire_formats.registry import WIRE_FORMATS
from guava_nb.wire_formats.wire_format import WireFormat

CPU = torch.device("cpu")
EXACT = WIRE_FORMATS["fp32"]
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
    slots = slots_of([record, again], EXACT)
    flats = pack(parts, record, slots, CPU, EXACT)
    assert [flat.shape for flat in flats] == [(slot.length,) for slot in slots]
    assert all(flat.is_floating_point() for flat in flats)
    assert same(put_together(again, unpack(flats, again, EXACT), CPU), value)


def test_shorter_micro_batches_use_the_slots_of_the_longest() -> None:
    long, short = (take_apart((torch.ones(rows, 2), torch.arange(rows)), True) for rows in (3, 2))
    slots = slots_of([long[0], short[0]], EXACT)
    assert [slot.length for slot in slots] == [6, 6]
    leaf = short[1][0].requires_grad_()
    flats = pack(short[1], short[0], slots, CPU, EXACT)
    assert [flat.numel() for flat in flats] == [6, 6]
    back = unpack(flats, short[0], EXACT)
    back[0].sum().backward()
    assert torch.equal(leaf.grad, torch.ones(2, 2))
    assert torch.equal(back[1], torch.arange(2))


def test_what_cannot_pass_is_refused() -> None:
    with pytest.raises(ConfigError, match="a set would pass from one pipeline stage to the next"):
        take_apart([{1, 2}], True)
    other = take_apart([torch.zeros(2, dtype=torch.float64)], True)[0]
    with pytest.raises(ConfigError, match="returns other tensors"):
        slots_of([take_apart([torch.zeros(3)], True)[0], other], EXACT)


LOSSY = [name for name in WIRE_FORMATS if name != "fp32"]


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_what_depends_on_parameters_travels_in_the_wire_format_and_so_does_its_gradient(
    name: str, dtype: torch.dtype
) -> None:
    wire = WIRE_FORMATS[name]
    long, short = (torch.randn(rows, 70, dtype=dtype).requires_grad_() for rows in (4, 3))
    records = [take_apart((value, torch.arange(9)), True)[0] for value in (long, short)]
    slots = slots_of(records, wire)
    assert decode(encode(records[1])) == records[1] and all(not record.tensors[1].from_parameters for record in records)
    real = torch.view_as_real(short) if dtype.is_complex else short
    numel, exact_bytes = long.numel() * (2 if dtype.is_complex else 1), long.numel() * dtype.itemsize
    assert slots[0].length * slots[0].torch_dtype.itemsize <= max(wire.encoded_bytes(numel) + 3, exact_bytes)

    flats = pack((short, torch.arange(9)), records[1], slots, CPU, wire)
    arrived = flats[0].detach().requires_grad_()  # as torch's stage receives it
    value, numbers = unpack([arrived, flats[1]], records[1], wire)
    is_shorter = wire.encoded_bytes(4096) < 4096 * dtype.to_real().itemsize
    expected = rounded(wire, real) if is_shorter else real.detach()
    assert torch.equal(torch.view_as_real(value) if dtype.is_complex else value, expected)
    assert torch.equal(numbers, torch.arange(9)) and value.dtype == dtype

    back = torch.randn(real.shape, dtype=real.dtype)
    value.backward(torch.view_as_complex(back) if dtype.is_complex else back)
    flats[0].backward(arrived.grad)
    gradient = torch.view_as_real(short.grad) if dtype.is_complex else short.grad
    assert torch.equal(gradient, rounded(wire, back) if is_shorter else back)


def rounded(wire: WireFormat, value: Tensor) -> Tensor:
    flat = value.detach().reshape(-1)
    return wire.decode(wire.encode(flat), flat.numel(), flat.dtype).to(value.dtype).view_as(value)


@pytest.mark.parametrize("name", LOSSY)
def test_values_that_are_not_finite_stay_visible(name: str) -> None:
    wire, value = WIRE_FORMATS[name], torch.randn(300).requires_grad_()
    record, _ = take_apart(value, True)
    slots = slots_of([record], wire)
    (back,) = unpack(pack([value.detach().clone().fill_(float("nan"))], record, slots, CPU, wire), record, wire)
    assert not back.isfinite().any()


def test_frozen_layers_pass_what_depends_on_them_and_masks_as_they_are() -> None:
    wire, line = WIRE_FORMATS["int8"], nn.Linear(4, 6).requires_grad_(False)
    mask = torch.full((6, 6), float("-inf")).triu(1)
    with showing_dependence(line, wire):
        record, _ = take_apart((line(torch.ones(2, 4)), mask), gradient=False)
    assert [spec.from_parameters for spec in record.tensors] == [True, False]
    assert not any(p.requires_grad for p in line.parameters())
    with showing_dependence(line, WIRE_FORMATS["fp32"]):
        assert not line(torch.ones(2, 4)).requires_grad
    flats = pack((line(torch.ones(2, 4)), mask), record, slots_of([record], wire), CPU, wire)
    assert not flats[0].requires_grad and torch.equal(unpack(flats, record, wire)[1], mask)


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
