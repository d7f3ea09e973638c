"""Whether the tensors that a record describes fit the payload that follows it.

Knows element sizes and arithmetic; knows nothing of torch, so that a peer's lengths are judged before anything is
allocated or handed to a tensor library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import get_args, get_type_hints

from guava_nb.errors import FrameTooLarge, RemoteProtocolError
from guava_nb.protocol.messages import MESSAGE_KINDS, FlatTensor, Message, TensorSpec, Tree

__all__ = ["ITEM_BYTES", "MAX_AXES", "check_tensors"]

#: Bytes of one element, by torch's name of the dtype without the prefix.
ITEM_BYTES: dict[str, int] = {
    "bool": 1,
    "uint8": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
}
#: Most axes a tensor may have on the wire. Without a bound, the product of a shape of a million axes takes hours.
MAX_AXES = 64

_MAX_BYTES = (1 << 63) - 1


def _item_bytes(dtype: str) -> int:
    size = ITEM_BYTES.get(dtype)
    if size is None:
        raise RemoteProtocolError(f"a record names the element type {dtype[:40]!r}, which this version does not know")
    return size


def _check_spec(spec: TensorSpec, payload_bytes: int) -> None:
    item = _item_bytes(spec.dtype)
    if len(spec.shape) > MAX_AXES:
        raise RemoteProtocolError(
            f"a record describes a tensor of {len(spec.shape)} axes; at most {MAX_AXES} may travel"
        )
    # `extent` ignores empty axes: tensor libraries compute strides from it and overflow where it does not fit 63 bits.
    numel, extent = 1, item
    for size in spec.shape:
        if size < 0:
            raise RemoteProtocolError(f"a record describes a tensor with an axis of size {size}")
        numel *= size
        extent *= size or 1
        if extent > _MAX_BYTES:
            raise RemoteProtocolError("a record describes a tensor whose size does not fit 63 bits")
    if spec.nbytes != numel * item:
        raise RemoteProtocolError(
            f"a record describes a {spec.dtype} tensor of {numel} elements "
            f"in {spec.nbytes} bytes; it takes {numel * item}"
        )
    if spec.offset < 0 or spec.offset + spec.nbytes > payload_bytes:
        raise RemoteProtocolError(
            f"a record describes a tensor at bytes {spec.offset} to {spec.offset + spec.nbytes} "
            f"of a payload of {payload_bytes} bytes"
        )


def _check_tree(tree: Tree, payload_bytes: int) -> None:
    for spec in tree.tensors:
        _check_spec(spec, payload_bytes)


def _check_flat(flat: FlatTensor, payload_bytes: int) -> None:
    wanted = flat.numel * _item_bytes(flat.dtype)
    if flat.numel < 0 or wanted != payload_bytes:
        raise RemoteProtocolError(
            f"a record describes a flat {flat.dtype} tensor of {flat.numel} elements, "
            f"but its payload has {payload_bytes} bytes"
        )


_CHECK_OF_TYPE: dict[object, Callable[..., None]] = {Tree: _check_tree, FlatTensor: _check_flat}


def _tensor_fields(record: type[Message]) -> tuple[tuple[str, Callable[..., None]], ...]:
    """Names of fields that describe a payload, optional ones included, with what checks them."""
    hints: Iterable[tuple[str, object]] = get_type_hints(record).items()
    plain = [(name, next((kind for kind in get_args(hint) if kind in _CHECK_OF_TYPE), hint)) for name, hint in hints]
    return tuple((name, _CHECK_OF_TYPE[kind]) for name, kind in plain if kind in _CHECK_OF_TYPE)


# Found from the records' own annotations, so that a new record is checked without anyone remembering to.
_FIELDS: dict[type[Message], tuple[tuple[str, Callable[..., None]], ...]] = {
    record: _tensor_fields(record) for record in MESSAGE_KINDS.values()
}


def check_tensors(message: Message, payload_bytes: int) -> None:
    """Check that every tensor which `message` describes lies inside its payload.

    Args:
        message: a record of `MESSAGE_KINDS`.
        payload_bytes: length in bytes of the payload that follows the record.

    Raises:
        RemoteProtocolError: an unknown dtype, a negative or overflowing size, `nbytes` that is not elements times
            element size, or a tensor that reaches beyond the payload.
        FrameTooLarge: a payload that no field of the record describes.
    """
    described = False
    for name, check in _FIELDS[type(message)]:
        value = getattr(message, name)
        if value is not None:
            described = True
            check(value, payload_bytes)
    if payload_bytes and not described:
        raise FrameTooLarge(f"{type(message).__name__} announces a payload of {payload_bytes} bytes; it has none")
