"""From a `Tree` and its payload back to the value. See `guava_nb.data.node_kinds` for the format.

The bytes come from another machine: whatever they are, the outcome is a value or an error of `guava_nb.errors`, and no
memory is taken beyond a small multiple of what was received.
"""

from __future__ import annotations

import dataclasses
import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import torch

from guava_nb.data import node_kinds
from guava_nb.data.classes import Resolve, is_dataclass_type, is_namedtuple_type
from guava_nb.data.tensors import MAX_AXES, tensor_from, unpermuted
from guava_nb.errors import ConfigError, GuavaError, RemoteProtocolError
from guava_nb.nested import rebuild
from guava_nb.protocol.messages import TensorSpec, Tree

__all__ = ["unpack"]

_ATOMS = frozenset({type(None), bool, int, float, str, bytes})
_decode = msgspec.msgpack.Decoder().decode
# What damaged bytes can raise in the readers below; anything else is a bug of ours and must be seen.
_DAMAGE = (
    msgspec.DecodeError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    RuntimeError,
    TypeError,
    ValueError,
)


def unpack(tree: Tree, payload: Any, resolve: Resolve | None = None) -> Any:
    """Build the value again.

    Args:
        tree: the record.
        payload: the bytes that came with it. Tensors and arrays share this memory and can be written to; a read-only
            payload is copied once.
        resolve: finds the class of a dataclass or namedtuple by its "module:qualname" (`imported_class`,
            `class_resolver(module)`). None looks nothing up: a dataclass arrives as dict, a namedtuple as tuple.

    Raises:
        RemoteProtocolError: record and payload do not describe a value.
        ConfigError: a class is unknown here, or has other fields than at the sender.
    """
    view = memoryview(payload)
    if view.readonly and view.nbytes:
        view = memoryview(bytearray(view))
    unpacker = _Unpacker(tree.tensors, view, resolve)
    try:
        return unpacker.node(unpacker.root(tree.structure))
    except GuavaError:
        raise
    except _DAMAGE as error:
        raise RemoteProtocolError(
            f"a value of {len(tree.structure)} + {view.nbytes} bytes arrived damaged ({type(error).__name__}: {error})"
        ) from error


class _Unpacker:
    """Holds what the readers need: the tensors' places, the payload, and how to find classes."""

    __slots__ = ("made", "payload", "permuted", "resolve", "specs")

    def __init__(self, specs: tuple[TensorSpec, ...], payload: memoryview, resolve: Resolve | None) -> None:
        self.specs = specs
        self.payload = payload
        self.resolve = resolve
        self.made: dict[int, torch.Tensor] = {}
        self.permuted: dict[tuple[int, ...], torch.Tensor] = {}

    def root(self, structure: bytes) -> Any:
        """The decoded structure, from the payload when it lies there."""
        node = _decode(structure)
        if type(node) is list and node and node[0] == node_kinds.FAR_STRUCTURE:
            raw = self.raw(node[1])
            if raw.nbytes > node_kinds.MAX_STRUCTURE_BYTES:
                raise RemoteProtocolError(
                    f"a structure of {raw.nbytes} bytes arrived, the limit is {node_kinds.MAX_STRUCTURE_BYTES}"
                )
            return _decode(raw)
        return node

    def node(self, node: Any) -> Any:
        """The value of one node."""
        if type(node) is list:
            return _READERS[node[0]](self, node)
        if type(node) in _ATOMS:
            return node
        raise ValueError(f"a bare {type(node).__name__} has no meaning")

    def node_kinds(self, node: list[Any], start: int = 1) -> list[Any]:
        """The values of a node's children."""
        return [self.node(child) for child in node[start:]]

    def tensor(self, index: int) -> torch.Tensor:
        """The tensor of this index, the same object each time."""
        made = self.made.get(index)
        if made is None:
            spec = self.specs[index]
            made = tensor_from(spec.dtype, spec.shape, self.payload, spec.offset)
            if made.nbytes != spec.nbytes:
                raise ValueError(f"{spec.nbytes} bytes are announced for {spec.dtype} {spec.shape}")
            self.made[index] = made
        return made

    def permuted_tensor(self, index: int, *order: int) -> torch.Tensor:
        """The tensor of this index whose axes lie in memory in this order, the same object each time."""
        key = (index, *order)
        if key not in self.permuted:
            self.permuted[key] = unpermuted(self.tensor(index), order)
        return self.permuted[key]

    def raw(self, index: int) -> memoryview:
        """The bytes of this index."""
        spec = self.specs[index]
        if spec.dtype != "uint8" or not 0 <= spec.offset <= spec.offset + spec.nbytes <= self.payload.nbytes:
            raise ValueError("plain bytes lie outside of what was received")
        return self.payload[spec.offset : spec.offset + spec.nbytes]


def _dict(unpacker: _Unpacker, node: list[Any]) -> dict[Any, Any]:
    values = unpacker.node_kinds(node)
    if len(values) % 2:
        raise ValueError("a key without a value")
    return dict(zip(values[::2], values[1::2], strict=True))


def _array(unpacker: _Unpacker, node: list[Any]) -> np.ndarray[Any, Any]:
    _, index, text, shape = node
    dtype, raw = _numpy_dtype(text), unpacker.raw(index)
    if raw.nbytes != _numel(shape) * dtype.itemsize:
        raise ValueError(f"{raw.nbytes} bytes for an array of {dtype} {shape}")
    if not raw.nbytes:
        return np.empty(tuple(shape), dtype)
    flat: np.ndarray[Any, Any] = np.frombuffer(raw, dtype)
    return flat.reshape(tuple(shape))


def _object_array(unpacker: _Unpacker, node: list[Any]) -> Any:
    values = unpacker.node_kinds(node, 2)
    if _numel(node[1]) != len(values):
        raise ValueError(f"{len(values)} elements for an array of {node[1]}")
    return rebuild(np.empty(tuple(node[1]), object), values)


def _scalar(_unpacker: _Unpacker, node: list[Any]) -> Any:
    dtype = _numpy_dtype(node[1])
    if dtype.itemsize != len(node[2]):
        raise ValueError(f"{len(node[2])} bytes for a {dtype}")
    return np.frombuffer(node[2], dtype)[0]


def _numel(shape: list[int]) -> int:
    if len(shape) > MAX_AXES:  # the product of a million sizes takes hours
        raise ValueError(f"an array of {len(shape)} axes")
    return math.prod(shape)


def _numpy_dtype(text: Any) -> np.dtype[Any]:
    dtype = np.dtype(text) if type(text) is str else None
    if dtype is None or dtype.hasobject or not dtype.itemsize:
        raise ValueError(f"{str(text)[:40]!r} is no type of plain bytes")
    return dtype


def _dtype(_unpacker: _Unpacker, node: list[Any]) -> torch.dtype:
    found = getattr(torch, node[1], None)
    if not isinstance(found, torch.dtype):
        raise RemoteProtocolError(f"torch {torch.__version__} here has no dtype {str(node[1])[:40]!r}")
    return found


def _namedtuple(unpacker: _Unpacker, node: list[Any]) -> Any:
    _, name, fields = node[:3]
    values = tuple(unpacker.node_kinds(node, 3))
    if unpacker.resolve is None:
        return values
    cls: Any = unpacker.resolve(name)
    if not is_namedtuple_type(cls) or list(cls._fields) != fields or len(values) != len(fields):
        raise ConfigError(
            f"the namedtuple {name} has fields {fields} at the sender and others here: share its new text"
        )
    # Not cls(*values): a class may override __new__, and nothing of a class runs here.
    return tuple.__new__(cls, values)


def _dataclass(unpacker: _Unpacker, node: list[Any]) -> Any:
    _, name, fields = node[:3]
    values = dict(zip(fields, unpacker.node_kinds(node, 3), strict=True))
    if unpacker.resolve is None:
        return values
    cls: Any = unpacker.resolve(name)
    if not is_dataclass_type(cls) or not values.keys() <= {field.name for field in dataclasses.fields(cls)}:
        raise ConfigError(f"the dataclass {name} has fields {fields} at the sender and others here: share its new text")
    made = object.__new__(cls)
    for field, value in values.items():
        object.__setattr__(made, field, value)  # works for frozen classes, and no __init__ runs
    return made


_READERS: dict[int, Callable[[_Unpacker, list[Any]], Any]] = {
    node_kinds.TENSOR: lambda unpacker, node: unpacker.tensor(node[1]),
    node_kinds.PERMUTED_TENSOR: lambda unpacker, node: unpacker.permuted_tensor(*node[1:]),
    node_kinds.LIST: _Unpacker.node_kinds,
    node_kinds.TUPLE: lambda unpacker, node: tuple(unpacker.node_kinds(node)),
    node_kinds.DICT: _dict,
    node_kinds.ORDERED_DICT: lambda unpacker, node: OrderedDict(_dict(unpacker, node)),
    node_kinds.SET: lambda unpacker, node: set(unpacker.node_kinds(node)),
    node_kinds.FROZENSET: lambda unpacker, node: frozenset(unpacker.node_kinds(node)),
    node_kinds.BIG_INT: lambda _, node: int.from_bytes(node[1], "little", signed=True),
    node_kinds.COMPLEX: lambda _, node: complex(node[1], node[2]),
    node_kinds.SLICE: lambda unpacker, node: slice(*unpacker.node_kinds(node)),
    node_kinds.SIZE: lambda _, node: torch.Size(node[1:]),
    node_kinds.DTYPE: _dtype,
    node_kinds.DEVICE: lambda _, node: torch.device(node[1]),
    node_kinds.ARRAY: _array,
    node_kinds.OBJECT_ARRAY: _object_array,
    node_kinds.SCALAR: _scalar,
    node_kinds.NAMEDTUPLE: _namedtuple,
    node_kinds.DATACLASS: _dataclass,
    node_kinds.LONG_BYTES: lambda unpacker, node: bytes(unpacker.raw(node[1])),
    node_kinds.BYTEARRAY: lambda unpacker, node: bytearray(unpacker.raw(node[1])),
    node_kinds.ODD_STRING: lambda _, node: node[1].decode("utf-8", "surrogatepass"),
}
