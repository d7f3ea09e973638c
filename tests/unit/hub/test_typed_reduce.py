"""Sums of bytes are torch's sums, in the order of the ranks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from guava_nb.errors import RemoteProtocolError
from guava_nb.hub.typed_reduce import DTYPES, REDUCTIONS, dtype_name, reduce_bytes

INTEGERS = ("uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64")
FLOATS = ("float32", "float64", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")


def to_bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(bytearray(tensor.contiguous().view(torch.uint8).numpy().tobytes()))


def back(dtype: str, view: memoryview) -> torch.Tensor:
    return torch.frombuffer(bytearray(view), dtype=torch.uint8).view(DTYPES[dtype])


def numbers(seed: int, dtype: str, ranks: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 5, (9,), generator=generator).to(DTYPES[dtype]) for _ in range(ranks)]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 1000), st.sampled_from(INTEGERS + FLOATS), st.integers(1, 4), st.sampled_from(sorted(REDUCTIONS)))
def test_reductions_are_those_of_torch(seed: int, dtype: str, ranks: int, reduction: str) -> None:
    if reduction in ("band", "bor", "bxor") and dtype in FLOATS:
        return
    parts = numbers(seed, dtype, ranks)
    result = back(dtype, reduce_bytes(reduction, dtype, [to_bytes(part) for part in parts]))
    wide = torch.stack([part.to(torch.float64) for part in parts])
    expected = {
        "sum": lambda: wide.sum(0),
        "avg": lambda: wide.sum(0) / ranks,
        "product": lambda: wide.prod(0),
        "min": lambda: wide.amin(0),
        "max": lambda: wide.amax(0),
    }.get(reduction)
    if expected is None:
        total = wide[0].long()
        for part in wide[1:].long():
            total = getattr(torch, {"band": "bitwise_and", "bor": "bitwise_or", "bxor": "bitwise_xor"}[reduction])(
                total, part
            )
        assert torch.equal(result.long(), total)
    elif dtype in INTEGERS:
        assert torch.equal(result.to(torch.int64), expected().trunc().long().to(DTYPES[dtype]).to(torch.int64))
    else:
        assert torch.equal(
            result.double(),
            expected().to(torch.float32 if dtype != "float64" else torch.float64).to(DTYPES[dtype]).double(),
        )


def test_half_types_are_rounded_once() -> None:
    parts = [torch.tensor([1.0]).bfloat16(), *[torch.tensor([2.0**-9]).bfloat16()] * 4]
    result = back("bfloat16", reduce_bytes("sum", "bfloat16", [to_bytes(part) for part in parts]))
    assert result.item() == torch.tensor(1.0 + 4 * 2.0**-9).bfloat16().item() != 1.0


def test_integers_wrap_as_in_torch() -> None:
    parts = [torch.tensor([2**63 - 1]), torch.tensor([1])]
    assert back("int64", reduce_bytes("sum", "int64", [to_bytes(part) for part in parts])).item() == -(2**63)


@pytest.mark.parametrize(("reduction", "expected"), [("sum", True), ("product", False), ("bxor", True), ("max", True)])
def test_truths(reduction: str, expected: bool) -> None:
    parts = [torch.tensor([True]), torch.tensor([False])]
    assert back("bool", reduce_bytes(reduction, "bool", [to_bytes(part) for part in parts])).item() is expected


def test_complex_and_nothing() -> None:
    parts = [torch.tensor([1 + 2j]), torch.tensor([3 - 1j])]
    assert back("complex64", reduce_bytes("sum", "complex64", [to_bytes(part) for part in parts])).item() == 4 + 1j
    assert len(reduce_bytes("sum", "float32", [memoryview(b""), memoryview(b"")])) == 0


def test_read_only_and_unaligned_memory_is_not_touched() -> None:
    fixed = bytes(torch.tensor([1.0, 2.0]).numpy().tobytes())
    shifted = memoryview(bytearray(b"x" + fixed))[1:]
    result = back("float32", reduce_bytes("sum", "float32", [memoryview(fixed), shifted]))
    assert result.tolist() == [2.0, 4.0]


@pytest.mark.parametrize(
    ("reduction", "dtype"), [("median", "float32"), ("sum", "float3"), ("band", "float32"), ("min", "complex64")]
)
def test_what_does_not_exist_is_refused(reduction: str, dtype: str) -> None:
    with pytest.raises(RemoteProtocolError):
        reduce_bytes(reduction, dtype, [memoryview(bytearray(8)), memoryview(bytearray(8))])


def test_names() -> None:
    assert dtype_name(torch.bfloat16) == "bfloat16"
    with pytest.raises(RemoteProtocolError, match="cannot travel"):
        dtype_name(torch.quint8)
