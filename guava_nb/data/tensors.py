"""Tensors as raw bytes and back, without copying where torch allows it.

Knows torch's element types and memory layout; knows nothing of nesting, records or the wire. The bytes are the
elements in row-major order, little endian, exactly `numel * itemsize` of them: bfloat16 and fp8 never pass through
numpy's types.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from guava_nb.errors import ConfigError, RemoteProtocolError

__all__ = [
    "DTYPES", "MAX_AXES", "axes_in_memory", "dtype_name", "laid_out", "same_memory", "tensor_bytes", "tensor_from", "unpermuted",
]  # fmt: skip

# Going through numpy takes half the time of reinterpreting in torch; these have the same bytes in both.
_NUMPY_NAMES = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
_OTHER_NAMES = (
    *("complex32", "complex64", "complex128", "bfloat16", "uint16", "uint32", "uint64"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
)

#: torch's name without the prefix -> dtype, for every type whose bytes can travel and that this torch has.
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in (*_NUMPY_NAMES, *_OTHER_NAMES) if hasattr(torch, name)
}
#: Most axes a tensor of torch can have.
MAX_AXES = 64

_NAME_OF: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}
_ITEM_BYTES: dict[str, int] = {name: dtype.itemsize for name, dtype in DTYPES.items()}
_NUMPY_DTYPES: dict[str, np.dtype[Any]] = {name: np.dtype(name) for name in _NUMPY_NAMES}
_NUMPY_READABLE = frozenset(DTYPES[name] for name in _NUMPY_NAMES)

if sys.byteorder != "little":  # The wire is little endian and nothing here swaps.
    raise ImportError("guava_nb runs on little-endian machines only; this one is big endian")


def dtype_name(dtype: torch.dtype) -> str:
    """Name of an element type as it stands in a `TensorSpec`.

    Raises:
        ConfigError: the type has no plain bytes (quantized and sub-byte types).
    """
    name = _NAME_OF.get(dtype)
    if name is None:
        raise ConfigError(f"a tensor of {dtype} cannot travel: its elements are not whole bytes; convert it before")
    return name


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The elements of a tensor as flat bytes in row-major order.

    The view shares the tensor's memory when it is contiguous and on the CPU: do not write to the tensor before the
    bytes have been sent. Otherwise a contiguous CPU copy is made, which the view keeps alive.

    Args:
        tensor: any strided tensor, on any device, with or without gradient.

    Returns:
        A one-dimensional view of `numel * itemsize` bytes.

    Raises:
        ConfigError: the tensor is sparse, quantized, on the meta device, or of a type without plain bytes.
    """
    array = _as_numpy(tensor)
    if array is not None and array.flags.c_contiguous:
        return array.data.cast("B") if array.size else memoryview(b"")
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        raise ConfigError(f"a {_kind(tensor)} tensor has no plain memory that could travel; make it dense first")
    if tensor.numel() == 0:
        return memoryview(b"")
    plain = _plain(tensor)
    # Not reshape(-1): that keeps the odd stride of an axis of size 1, and such a tensor cannot be seen as bytes.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy().data


def tensor_from(dtype: str, shape: Sequence[int], view: Any, offset: int = 0) -> torch.Tensor:
    """A tensor on received bytes: no copy when the memory is writable and aligned.

    Args:
        dtype: name from `DTYPES`.
        shape: sizes of the axes; () is a scalar.
        view: bytes-like; the tensor keeps it alive and, when it is writable, shares its memory.
        offset: first byte of the tensor in `view`.

    Raises:
        RemoteProtocolError: unknown type, negative size, or fewer bytes than the shape needs.
    """
    item_bytes = _ITEM_BYTES.get(dtype)
    if item_bytes is None:
        raise RemoteProtocolError(
            f"a tensor of type {dtype[:40]!r} arrived, which torch {torch.__version__} does not have"
        )
    nbytes = math.prod(shape[:MAX_AXES]) * item_bytes
    if len(shape) > MAX_AXES or offset < 0 or offset + nbytes > len(view) or (shape and min(shape) < 0):
        raise RemoteProtocolError(
            f"a {dtype} tensor of shape {tuple(shape[:8])} at {offset} does not fit into {len(view)} bytes received"
        )
    if nbytes == 0:
        return torch.empty(tuple(shape), dtype=DTYPES[dtype])
    if memoryview(view).readonly:
        view, offset = bytearray(memoryview(view)[offset : offset + nbytes]), 0
    if dtype in _NUMPY_DTYPES:
        made = torch.from_numpy(np.ndarray(tuple(shape), _NUMPY_DTYPES[dtype], view, offset))
        if not made.data_ptr() % item_bytes:
            return made
    raw = torch.frombuffer(view, dtype=torch.uint8, count=nbytes, offset=offset)
    if raw.data_ptr() % item_bytes:
        raw = raw.clone()  # vector kernels may fault on such an address; a new one is aligned
    return raw.view(DTYPES[dtype]).view(tuple(shape))


def axes_in_memory(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Return the axes of a tensor of any shape from the outermost in memory to the innermost; None where that is their own order.

    Tells `channels_last` and transposed tensors, of which one without elements counts too. Gaps between elements do not.
    """
    if tensor.ndim < 2 or (tensor.ndim < 4 and tensor.numel() and tensor.is_contiguous()):
        return None
    strides = tensor.stride()
    order = sorted(range(tensor.ndim), key=lambda axis: -strides[axis])
    return None if order == list(range(tensor.ndim)) or 0 in strides else tuple(order)


def unpermuted(tensor: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """Return the view whose `permute(order)` is this tensor, which may be of any shape.

    Raises:
        ValueError: these are not all of its axes, each once.
    """
    if sorted(order) != list(range(tensor.ndim)):
        raise ValueError(f"{list(order[:8])} is no order of {tensor.ndim} axes")
    return tensor.permute(sorted(range(len(order)), key=order.__getitem__))


def laid_out(tensor: torch.Tensor, order: Sequence[int] | None) -> torch.Tensor:
    """Return a tensor of any shape with its axes in memory in this order, the elements the same; None: as it is."""
    return tensor if order is None else unpermuted(tensor.permute(tuple(order)).contiguous(), order)


def same_memory(one: Any, other: Any) -> bool:
    """Whether two values are tensors on one memory that have the same values.

    Tensors that are lazily conjugated or negated share memory with the original and differ from it.
    """
    if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)):
        return False
    return (
        one.data_ptr() == other.data_ptr()
        and one.dtype == other.dtype
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.device == other.device
        and one.is_conj() == other.is_conj()
        and one.is_neg() == other.is_neg()
        and one.numel() > 0
    )


def _as_numpy(tensor: torch.Tensor) -> np.ndarray[Any, Any] | None:
    """The tensor's memory as an array, the fastest way to its bytes; None where there is none."""
    if tensor.dtype not in _NUMPY_READABLE:
        return None
    try:
        return tensor.numpy()
    except (RuntimeError, TypeError):
        return None  # with gradient, on a device, sparse, or lazily negated


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Contiguous, on the CPU, without gradient and without pending conjugation or negation."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    if not tensor.is_cpu:
        tensor = tensor.cpu()
    if tensor.is_neg() or tensor.is_conj():
        tensor = tensor.resolve_neg().resolve_conj()
    if tensor.is_contiguous():
        return tensor
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "ComplexHalf support is experimental")
        return tensor.contiguous()


def _kind(tensor: torch.Tensor) -> str:
    """What makes a tensor unfit to travel, in one word."""
    if tensor.is_meta:
        return "meta"
    return "quantized" if tensor.is_quantized else str(tensor.layout).removeprefix("torch.")
