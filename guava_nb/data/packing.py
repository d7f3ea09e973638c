"""From a nested value to a `Tree` and the buffers of its payload. See `guava_nb.data.node_kinds` for the format.

This is on the path of every training step: one dictionary look-up by exact type per value, and nothing is copied that
torch can show as bytes.
"""

from __future__ import annotations

import enum
from collections import OrderedDict, UserDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec
import numpy as np
import torch

from guava_nb.data import node_kinds
from guava_nb.data.classes import class_name, is_dataclass_type, is_namedtuple_type
from guava_nb.data.tensors import axes_in_memory, dtype_name, same_memory, tensor_bytes
from guava_nb.errors import ConfigError
from guava_nb.nested import children
from guava_nb.protocol.messages import TensorSpec, Tree

__all__ = ["pack"]

# Why a value cannot travel, and what its owner can do: sentences only.


class Refused(Exception):  # noqa: N818  it never leaves this room: `pack` makes a ConfigError of it
    """A value that cannot travel, and the way to it from the root.

    Attributes:
        reason: a clause that says what to do.
        trail: subscripts from the root to the value.
    """

    def __init__(self, value: Any, reason: str) -> None:
        super().__init__(reason)
        cls = type(value)
        self.type_name = cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
        self.reason = reason
        self.trail = ""

    def inside(self, subscript: str) -> Refused:
        """The same refusal seen from the container that holds it."""
        self.trail = subscript + self.trail
        return self

    def sentence(self, name: str) -> str:
        """The whole message, with `name` for the root."""
        return f"{name}{self.trail} is a {self.type_name}, which cannot travel to a worker: {self.reason}"


def hint(value: Any) -> str:
    """What to do about a value of a kind that does not travel."""
    for kinds, advice in _ADVICE:
        if isinstance(value, kinds):
            return advice
    if type(value).__module__.partition(".")[0] == "PIL":
        return "turn images into tensors in the dataset's transform"
    if type(value).__module__.partition(".")[0] == "torch_geometric":
        return (
            "the graphs of a batch are joined, and what joins them names places in the whole batch: let the data set and "
            "collate_fn give a list of dicts, one per graph, and join them on the worker, in step"
        )
    if callable(value):
        return "code does not travel inside a batch; define it in a %%guava_share cell"
    return "turn it into tensors, numbers, strings, lists or dicts in collate_fn, or make its class a dataclass"


_ADVICE: tuple[tuple[Any, str], ...] = (
    (enum.Enum, "send its .value in collate_fn"),
    (torch.Tensor, "send value.as_subclass(torch.Tensor), or value.full_tensor() of a distributed one"),
    (np.ndarray, "send numpy.asarray(value); a masked or structured array as a dict of plain ones"),
    (torch.Generator, "random state does not travel inside a batch; send a seed"),
    (Mapping, "send dict(value) from collate_fn"),
    (tuple, "send tuple(value) from collate_fn"),
    ((list, set, frozenset, str, bytes, int, float), "send the plain value instead of the subclass"),
)


_PADDING = [memoryview(bytes(n)) for n in range(node_kinds.ALIGNMENT_BYTES)]
_MIN_INT, _MAX_INT = -(1 << 63), (1 << 64) - 1
_encode = msgspec.msgpack.Encoder().encode

_Node = Any


def pack(value: Any, name: str = "batch") -> tuple[Tree, list[memoryview]]:
    """Describe a nested value and collect its bytes.

    A tensor that occurs twice is sent once and is one tensor again on the other side. Gradients, and attributes of
    dataclasses that are no fields, stay behind; `nn.Parameter` arrives as a tensor.

    Args:
        value: any nesting of tensors, numpy arrays and scalars, str, bytes, bytearray, numbers, bool, None, dict, list,
            tuple, set, slice, namedtuple, dataclass, torch.Size, torch.dtype, torch.device. A `UserDict`, such as a
            tokenizer's `BatchEncoding`, arrives as a dict.
        name: what to call the value in an error.

    Returns:
        The record, and buffers whose concatenation is the payload. They show the value's own memory where possible: do
        not write to its tensors before the buffers have been sent.

    Raises:
        ConfigError: something in it cannot travel; the message names its place, its type and what to do.
    """
    packer = _Packer()
    try:
        structure = _encode(packer.node(value))
    except Refused as refused:
        raise ConfigError(refused.sentence(name)) from None
    except RecursionError:
        raise ConfigError(
            f"{name} cannot travel to a worker: it contains itself, or is nested too deeply; flatten it in collate_fn"
        ) from None
    if len(structure) > node_kinds.INLINE_STRUCTURE_BYTES:
        structure = packer.move_away(structure, name)
    return Tree(structure, tuple(packer.specs)), packer.buffers


class _Packer:
    """Collects the tensors of one value while its structure is built."""

    __slots__ = ("buffers", "nbytes", "seen", "specs")

    def __init__(self) -> None:
        self.buffers: list[memoryview] = []
        self.specs: list[TensorSpec] = []
        self.nbytes = 0
        self.seen: dict[int, tuple[torch.Tensor, int]] = {}  # by address; holding the tensor keeps it from being reused

    def node(self, value: Any) -> _Node:
        """The structure of one value."""
        packer = _PACKERS.get(type(value))
        return packer(self, value) if packer is not None else _pack_by_kind(self, value)

    def add(self, dtype: str, shape: tuple[int, ...], view: memoryview) -> int:
        """Put bytes into the payload at an aligned offset; returns their index."""
        nbytes = view.nbytes
        if nbytes:
            padding = -self.nbytes % node_kinds.ALIGNMENT_BYTES
            if padding:
                self.buffers.append(_PADDING[padding])
                self.nbytes += padding
            self.buffers.append(view)
        self.specs.append(TensorSpec(dtype, shape, self.nbytes, nbytes))
        self.nbytes += nbytes
        return len(self.specs) - 1

    def add_bytes(self, raw: memoryview) -> int:
        """Put plain bytes into the payload."""
        return self.add("uint8", (raw.nbytes,), raw)

    def move_away(self, structure: bytes, name: str) -> bytes:
        """Put a big structure into the payload; returns the small one that points there."""
        if len(structure) > node_kinds.MAX_STRUCTURE_BYTES:
            raise ConfigError(
                f"{name} holds {len(structure) >> 20} MiB of Python objects, the limit is "
                f"{node_kinds.MAX_STRUCTURE_BYTES >> 20} MiB: turn lists of numbers into tensors in collate_fn"
            )
        return _encode([node_kinds.FAR_STRUCTURE, self.add_bytes(memoryview(structure))])


def _int(_packer: _Packer, value: int) -> _Node:
    if _MIN_INT <= value <= _MAX_INT:
        return value
    return [node_kinds.BIG_INT, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)]


def _str(_packer: _Packer, value: str) -> _Node:
    if value.isascii():
        return value
    try:
        value.encode()
    except UnicodeEncodeError:  # for instance a file name that is not valid UTF-8
        return [node_kinds.ODD_STRING, value.encode("utf-8", "surrogatepass")]
    return value


def _bytes(packer: _Packer, value: bytes) -> _Node:
    if len(value) <= node_kinds.INLINE_BYTES:
        return value
    return [node_kinds.LONG_BYTES, packer.add_bytes(memoryview(value))]


def _sequence(tag: int) -> Callable[[_Packer, Iterable[Any]], _Node]:
    def pack_items(packer: _Packer, value: Iterable[Any]) -> _Node:
        node: list[_Node] = [tag]
        try:
            for item in value:
                node.append(packer.node(item))
        except Refused as refused:
            raise refused.inside(f"[{len(node) - 1}]") from None
        return node

    return pack_items


def _mapping(tag: int) -> Callable[[_Packer, dict[Any, Any]], _Node]:
    def pack_pairs(packer: _Packer, value: dict[Any, Any]) -> _Node:
        node: list[_Node] = [tag]
        for key, item in value.items():
            if type(key) not in _KEY_TYPES and not isinstance(key, (tuple, np.generic)):
                raise Refused(key, "as a key of a dict it cannot travel; use str, int or tuple keys")
            node.append(packer.node(key))
            try:
                node.append(packer.node(item))
            except Refused as refused:
                raise refused.inside(f"[{key!r}]") from None
        return node

    return pack_pairs


def _tensor(packer: _Packer, value: torch.Tensor) -> _Node:
    try:
        address = value.data_ptr()
    except RuntimeError:  # sparse tensors have no address
        raise Refused(value, "it has no plain memory; make it dense first") from None
    order = axes_in_memory(value)
    known = packer.seen.get(address)
    if known is not None and same_memory(known[0], value):
        index = known[1]
    else:
        try:
            plain = value if order is None else value.permute(order)
            index = packer.add(dtype_name(value.dtype), tuple(plain.shape), tensor_bytes(plain))
        except ConfigError as error:
            raise Refused(value, str(error)) from None
        packer.seen[address] = value, index
    return [node_kinds.TENSOR, index] if order is None else [node_kinds.PERMUTED_TENSOR, index, *order]


def _array(packer: _Packer, value: np.ndarray[Any, Any]) -> _Node:
    if value.dtype.hasobject:
        if value.dtype.kind != "O":
            raise Refused(value, hint(value))
        flat = np.ndarray.flatten(value).tolist()
        return [node_kinds.OBJECT_ARRAY, list(value.shape), *_PACK_LIST(packer, flat)[1:]]
    text = _numpy_dtype(value, value.dtype)
    raw = np.ascontiguousarray(value).reshape(-1).view(np.uint8).data if value.size else memoryview(b"")
    return [node_kinds.ARRAY, packer.add_bytes(raw), text, list(value.shape)]


def _scalar(_packer: _Packer, value: np.generic) -> _Node:
    array = np.asarray(value)
    return [node_kinds.SCALAR, _numpy_dtype(value, array.dtype), array.tobytes()]


def _numpy_dtype(value: Any, dtype: np.dtype[Any]) -> str:
    """The text that gives this dtype back; structured and foreign ones (bfloat16 of other libraries) have none."""
    if dtype.hasobject or dtype.itemsize == 0 or np.dtype(dtype.str) != dtype:
        raise Refused(value, f"its numpy dtype {dtype} cannot travel; send plain arrays or torch tensors")
    return str(dtype.str)


def _fields(packer: _Packer, tag: int, value: Any) -> _Node:
    present = children(value) or []
    node: list[_Node] = [tag, class_name(type(value)), [name for name, _ in present]]
    for name, item in present:
        try:
            node.append(packer.node(item))
        except Refused as refused:
            raise refused.inside(f".{name}") from None
    return node


def _pack_by_kind(packer: _Packer, value: Any) -> _Node:
    """Values whose exact type is not in the table."""
    cls = type(value)
    if is_namedtuple_type(cls):
        return _fields(packer, node_kinds.NAMEDTUPLE, value)
    if is_dataclass_type(cls):
        return _fields(packer, node_kinds.DATACLASS, value)
    if isinstance(value, np.generic):
        return _scalar(packer, value)
    if isinstance(value, np.memmap):
        return _array(packer, value.view(np.ndarray))
    if isinstance(value, UserDict):  # what the collate functions of Hugging Face return
        return _mapping(node_kinds.DICT)(packer, value.data)
    raise Refused(value, hint(value))


_PACK_LIST = _sequence(node_kinds.LIST)
_PACKERS: dict[type, Callable[[_Packer, Any], _Node]] = {
    torch.Tensor: _tensor,
    torch.nn.Parameter: _tensor,
    **dict.fromkeys((type(None), bool, float), lambda _, value: value),
    int: _int,
    str: _str,
    bytes: _bytes,
    bytearray: lambda packer, value: [node_kinds.BYTEARRAY, packer.add_bytes(memoryview(value))],
    complex: lambda _, value: [node_kinds.COMPLEX, value.real, value.imag],
    slice: lambda packer, value: [node_kinds.SLICE, *map(packer.node, (value.start, value.stop, value.step))],
    list: _PACK_LIST,
    tuple: _sequence(node_kinds.TUPLE),
    set: _sequence(node_kinds.SET),
    frozenset: _sequence(node_kinds.FROZENSET),
    dict: _mapping(node_kinds.DICT),
    OrderedDict: _mapping(node_kinds.ORDERED_DICT),
    torch.Size: lambda _, value: [node_kinds.SIZE, *value],
    torch.dtype: lambda _, value: [node_kinds.DTYPE, str(value).removeprefix("torch.")],
    torch.device: lambda _, value: [node_kinds.DEVICE, str(value)],
    np.ndarray: _array,
}
_KEY_TYPES = frozenset(
    {type(None), bool, int, float, complex, str, bytes, tuple, frozenset, torch.Size, torch.dtype, torch.device}
)
