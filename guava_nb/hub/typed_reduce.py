"""Reductions over received bytes, in the order of the ranks.

Floating-point addition is not associative: contributions are added in the order of their ranks, never of their arrival,
so the same numbers give the same bits whatever the network did. Half types are added in float32 (complex32 in
complex64) and rounded once at the end; float64 stays float64; integers wrap around as they do in torch.
Knows torch's kernels; knows nothing of groups or sessions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from guava_nb.errors import RemoteProtocolError

__all__ = ["DTYPES", "REDUCTIONS", "dtype_name", "reduce_bytes"]

_NAMES = (
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
)
#: torch's name without the prefix -> dtype, for every type whose bytes can travel and that this torch has.
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _NAMES if hasattr(torch, name)}
_NAME_OF = {dtype: name for name, dtype in DTYPES.items()}

#: Names of the reductions, as they stand in a `Piece`.
REDUCTIONS = frozenset({"sum", "avg", "product", "min", "max", "band", "bor", "bxor"})

_Binary = Callable[[torch.Tensor, torch.Tensor], object]
_IN_PLACE: dict[str, _Binary] = {
    "sum": lambda total, part: total.add_(part),
    "avg": lambda total, part: total.add_(part),
    "product": lambda total, part: total.mul_(part),
    "min": lambda total, part: torch.minimum(total, part, out=total),
    "max": lambda total, part: torch.maximum(total, part, out=total),
    "band": lambda total, part: total.bitwise_and_(part),
    "bor": lambda total, part: total.bitwise_or_(part),
    "bxor": lambda total, part: total.bitwise_xor_(part),
}
# A sum of truths is "any", a product is "all": what the same reduction over 0 and 1 says when it is read as a truth.
_FOR_BOOL = {"sum": "bor", "avg": "bor", "max": "bor", "product": "band", "min": "band"}
_UFUNCS: dict[str, np.ufunc] = {
    "sum": np.add,
    "avg": np.add,
    "product": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}
#: numpy takes a tenth of torch's time for a few numbers and the same for many; torch has few kernels for unsigned ones.
_NUMPY = {
    name: np.dtype(name)
    for name in ("float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
}


def dtype_name(dtype: torch.dtype) -> str:
    """Name of an element type on the wire.

    Raises:
        RemoteProtocolError: its elements are not whole bytes.
    """
    name = _NAME_OF.get(dtype)
    if name is None:
        raise RemoteProtocolError(f"a tensor of {dtype} cannot travel: its elements are not whole bytes")
    return name


def reduce_bytes(reduction: str, dtype: str, parts: Sequence[memoryview]) -> memoryview:
    """Reduce equally long byte views, first to last.

    Args:
        reduction: one of `REDUCTIONS`.
        dtype: name of the element type.
        parts: one per rank, in the order of ranks. The memory of the first may become the result.

    Returns:
        The bytes of the result.

    Raises:
        RemoteProtocolError: an unknown reduction or type, or one that has no such reduction.
    """
    if reduction not in REDUCTIONS or dtype not in DTYPES:
        raise RemoteProtocolError(f"there is no reduction {reduction[:20]!r} of {dtype[:20]!r}")
    if not len(parts[0]):
        return parts[0]
    if dtype in _NUMPY:
        return _reduce_plain(reduction, _NUMPY[dtype], parts)
    if dtype == "bool":
        reduction = _FOR_BOOL.get(reduction, reduction)
    try:
        total = _accumulate(_IN_PLACE[reduction], [_tensor(dtype, part) for part in parts])
        if reduction == "avg":
            total.div_(len(parts), rounding_mode=None if _is_real(total.dtype) else "trunc")
    except RuntimeError as problem:
        raise RemoteProtocolError(f"{dtype} has no reduction {reduction!r}: {problem}") from problem
    return total.to(DTYPES[dtype]).view(torch.uint8).numpy().data


def _accumulate(add: _Binary, parts: list[torch.Tensor]) -> torch.Tensor:
    """Reduce tensors of one shape in the order of ranks, into the memory of the first or a wider copy of it."""
    wide = _wide(parts[0].dtype)
    total = parts[0].to(wide) if wide is not None else parts[0]
    for part in parts[1:]:
        add(total, part.to(total.dtype))
    return total


def _wide(dtype: torch.dtype) -> torch.dtype | None:
    """In what a type is accumulated, where not in itself."""
    if dtype is DTYPES.get("complex32"):
        return torch.complex64
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else None


def _is_real(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _tensor(dtype: str, part: memoryview) -> torch.Tensor:
    """Return received bytes as a tensor, `[elements]`; it shares their memory where that is aligned and writable."""
    view = memoryview(bytearray(part)) if part.readonly else part
    raw = torch.frombuffer(view, dtype=torch.uint8)
    # A chunk lies where its allocation begins, hence aligned; a slice of something else may not be.
    return (raw.clone() if raw.data_ptr() % DTYPES[dtype].itemsize else raw).view(DTYPES[dtype])


def _reduce_plain(reduction: str, dtype: np.dtype[Any], parts: Sequence[memoryview]) -> memoryview:
    reduce = _UFUNCS[reduction]
    first = parts[0]
    total = np.frombuffer(bytearray(first) if first.readonly else first, dtype)
    try:
        with np.errstate(all="ignore"):  # an overflow is the sender's affair; torch's own backends say nothing either
            for part in parts[1:]:
                reduce(total, np.frombuffer(part, dtype), out=total)
    except (TypeError, ValueError) as problem:
        raise RemoteProtocolError(f"{dtype} has no reduction {reduction!r} of these parts: {problem}") from problem
    if reduction == "avg":
        if dtype.kind == "f":
            total /= len(parts)
        else:  # towards zero, as torch divides
            total[...] = np.trunc(total / len(parts)) if dtype.itemsize < 8 else _truncated(total, len(parts))
    return total.data.cast("B")


def _truncated(total: np.ndarray[Any, np.dtype[Any]], count: int) -> np.ndarray[Any, np.dtype[Any]]:
    """Divide 64-bit integers towards zero; a float would lose their low bits."""
    quotient = total // np.array(count, total.dtype)
    remainder = total - quotient * np.array(count, total.dtype)
    rounded: np.ndarray[Any, np.dtype[Any]] = quotient + ((total < 0) & (remainder != 0)).astype(total.dtype)
    return rounded
