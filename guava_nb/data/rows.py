"""Rows of a batch as entries of their own: told apart, named by their content, and put together again.

Both ends of a row cache use this: one takes a batch apart and sends some of its rows, the other makes entries of what
came and builds the whole batch. Knows batches and bytes; knows neither workers nor stores of entries.

An entry is a 16-byte signature (what the leaves are), then for every leaf the row's bytes: of a tensor or array its
elements in row-major order, of a list a length (4 bytes, little endian) and the packed element. Its key is BLAKE2b of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import msgspec
import numpy as np
import torch

from guava_nb.data.classes import Resolve
from guava_nb.data.packing import pack
from guava_nb.data.split import RowSplitter, rewrite_marked
from guava_nb.data.tensors import axes_in_memory, dtype_name, laid_out, same_memory, tensor_bytes, tensor_from
from guava_nb.data.unpacking import unpack
from guava_nb.errors import ConfigError, RemoteProtocolError
from guava_nb.protocol.messages import Tree

__all__ = ["KEY_BYTES", "NotSeparable", "Received", "Rows", "key_of", "split_keys"]

KEY_BYTES = 16
_LENGTH_BYTES = 4
_SIGNATURE_BYTES = 16

_encode = msgspec.msgpack.Encoder().encode
_decode_tree = msgspec.msgpack.Decoder(Tree).decode


class NotSeparable(Exception):  # noqa: N818 - an answer, not an error: the batch is sent whole
    """Says why the rows of a batch cannot be kept one by one."""


def key_of(entry: bytes) -> bytes:
    """The key of an entry."""
    return blake2b(entry, digest_size=KEY_BYTES).digest()


def split_keys(joined: bytes) -> list[bytes]:
    """Keys that stand one after the other."""
    return [joined[at : at + KEY_BYTES] for at in range(0, len(joined), KEY_BYTES)]


@dataclass(frozen=True, slots=True)
class _Leaf:
    """One part with an entry per row: `kind` is "tensor", "array" or "list", `row_bytes` None for lists."""

    kind: str
    dtype: str
    row_shape: tuple[int, ...]
    row_bytes: int | None
    value: Any

    @classmethod
    def of(cls, value: Any) -> _Leaf:
        if isinstance(value, torch.Tensor):
            shape = tuple(value.shape[1:])
            return cls("tensor", dtype_name(value.dtype), shape, math.prod(shape, start=value.dtype.itemsize), value)
        if isinstance(value, np.ndarray):
            if value.dtype.hasobject:
                raise NotSeparable(f"it has a numpy array of Python objects (dtype {value.dtype})")
            shape = value.shape[1:]
            return cls("array", value.dtype.str, shape, math.prod(shape, start=value.dtype.itemsize), value)
        return cls("list", "", (), None, value)

    def rows(self, count: int) -> Sequence[Any]:
        """The bytes of each row as they stand in an entry."""
        if self.row_bytes is None:
            return [len(raw).to_bytes(_LENGTH_BYTES, "little") + raw for raw in self.value]
        if not self.row_bytes:
            return [b""] * count
        raw = self._bytes()
        return [raw[at : at + self.row_bytes] for at in range(0, count * self.row_bytes, self.row_bytes)]

    def pick(self, indices: Sequence[int]) -> Any:
        """The leaf with these rows only; neighbours are not copied."""
        first, count = (indices[0], len(indices)) if indices else (0, 0)
        if indices == range(first, first + count) or list(indices) == list(range(first, first + count)):
            return self.value[first : first + count]
        if self.row_bytes is None:
            return type(self.value)(self.value[i] for i in indices)
        if not self.row_bytes:
            return self.value[:count]
        # By bytes, since torch cannot index every dtype that can travel.
        flat = np.frombuffer(self._bytes(), np.uint8).reshape(-1, self.row_bytes)
        return self._of_bytes(flat[np.asarray(indices)].reshape(-1).data, count)

    def made_of(self, columns: Sequence[memoryview], resolve: Resolve | None) -> Any:
        """A leaf of the same kind with these rows."""
        if self.row_bytes is None:
            return type(self.value)(_unpacked(raw, resolve) for raw in columns)
        return self._of_bytes(bytearray().join(columns), len(columns))

    def _bytes(self) -> memoryview:
        if self.kind == "tensor":
            return tensor_bytes(self.value)
        return np.ascontiguousarray(self.value).reshape(-1).view(np.uint8).data

    def _of_bytes(self, raw: Any, count: int) -> Any:
        shape = (count, *self.row_shape)
        if self.kind == "tensor":
            return laid_out(tensor_from(self.dtype, shape, raw), axes_in_memory(self.value))
        return np.frombuffer(raw, np.dtype(self.dtype)).reshape(shape) if len(raw) else np.empty(shape, self.dtype)


def _packed(value: Any) -> bytes:
    tree, buffers = pack(value)
    record = _encode(tree)
    return b"".join([len(record).to_bytes(_LENGTH_BYTES, "little"), record, *buffers])


def _unpacked(raw: memoryview, resolve: Resolve | None) -> Any:
    start = _LENGTH_BYTES + int.from_bytes(raw[:_LENGTH_BYTES], "little")
    return unpack(_decode_tree(raw[_LENGTH_BYTES:start]), raw[start:], resolve)


def _signature(marks: bytes, slots: Sequence[int], leaves: Sequence[_Leaf]) -> bytes:
    kinds = [(leaf.kind, leaf.dtype, leaf.row_shape) for leaf in leaves]
    return blake2b(_encode((marks, tuple(slots), kinds)), digest_size=_SIGNATURE_BYTES).digest()


class Rows:
    """A batch taken apart, at the side that sends it.

    Args:
        batch: as the loader gave it; its memory is shared, so it must not change before the rows were sent.
        count: its rows.
        splitter: knows which parts have an entry per row.

    Attributes:
        keys: of each row.
        sizes: bytes of each row's entry.
        marks, slots: see `guava_nb.protocol.messages.CachedRows`.

    Raises:
        NotSeparable: its rows cannot be told apart.
        ConfigError: it cannot travel at all.
    """

    def __init__(self, batch: Any, count: int, splitter: RowSplitter) -> None:
        self.count = count
        self._leaves: list[_Leaf] = []
        self._slots: list[int] = []
        try:
            self.marks = splitter.row_marks(batch, count)
        except ConfigError as error:
            raise NotSeparable(str(error)) from error
        self._batch = rewrite_marked(batch, self.marks, self._note)
        self.slots = tuple(self._slots)
        if not self._leaves:
            raise NotSeparable("nothing in it has one entry per sample")
        self._name_rows()

    def _note(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            value = type(value)(_packed(item) for item in value)
        elif isinstance(value, torch.Tensor):
            value = value.detach()
        for number, leaf in enumerate(self._leaves):
            if same_memory(leaf.value, value):
                self._slots.append(number)
                return leaf.value
        self._slots.append(len(self._leaves))
        self._leaves.append(_Leaf.of(value))
        return value

    def _name_rows(self) -> None:
        signature = _signature(self.marks, self.slots, self._leaves)
        self.keys: list[bytes] = []
        self.sizes: list[int] = []
        for row in zip(*(leaf.rows(self.count) for leaf in self._leaves), strict=True):
            name = blake2b(signature, digest_size=KEY_BYTES)
            for raw in row:
                name.update(raw)
            self.keys.append(name.digest())
            self.sizes.append(_SIGNATURE_BYTES + sum(map(len, row)))

    def only(self, indices: Sequence[int]) -> Any:
        """The batch with these rows alone, and all that is not per row."""
        picked = [leaf.pick(indices) for leaf in self._leaves]
        slots = iter(self.slots)
        return rewrite_marked(self._batch, self.marks, lambda _: picked[next(slots)])


class Received:
    """The rows of a batch that came, at the side that gets it.

    Args:
        batch: what `Rows.only` gave, after its travel.
        sent: how many rows came.
        marks, slots: those of the `Rows`.

    Raises:
        RemoteProtocolError: these do not belong together.
    """

    def __init__(self, batch: Any, sent: int, marks: bytes, slots: Sequence[int]) -> None:
        self._batch, self._marks, self._slots, self._sent = batch, marks, tuple(slots), sent
        values: list[Any] = []
        rewrite_marked(batch, marks, lambda value: values.append(value))
        if len(values) != len(self._slots) or any(len(value) != sent for value in values):
            raise RemoteProtocolError(f"{sent} rows were announced for a batch that came with others")
        found: dict[int, Any] = {}
        for slot, value in zip(self._slots, values, strict=True):
            found.setdefault(slot, value)
        if sorted(found) != list(range(len(found))):
            raise RemoteProtocolError("the leaves of a row are not numbered from 0")
        try:
            self._leaves = [_Leaf.of(found[number]) for number in range(len(found))]
        except (NotSeparable, ConfigError) as error:
            raise RemoteProtocolError(f"a row came that cannot be kept: {error}") from error

    def entries(self) -> list[bytes]:
        """The entries of the rows that came."""
        signature = _signature(self._marks, self._slots, self._leaves)
        rows = zip(*(leaf.rows(self._sent) for leaf in self._leaves), strict=True)
        return [b"".join((signature, *row)) for row in rows]

    def as_came(self, resolve: Resolve | None = None) -> Any:
        """The batch of the rows that came, which are all of its rows and in order."""
        if all(leaf.row_bytes is not None for leaf in self._leaves):
            return self._batch
        return self.whole(self.entries(), resolve)

    def whole(self, entries: Sequence[bytes], resolve: Resolve | None = None) -> Any:
        """The batch whose rows are these entries; what is not per row is as it came.

        Raises:
            RemoteProtocolError: an entry is of another form.
        """
        columns = self._columns(entries)
        made = [leaf.made_of(column, resolve) for leaf, column in zip(self._leaves, columns, strict=True)]
        slots = iter(self._slots)
        return rewrite_marked(self._batch, self._marks, lambda _: made[next(slots)])

    def _columns(self, entries: Sequence[bytes]) -> list[list[memoryview]]:
        columns: list[list[memoryview]] = [[] for _ in self._leaves]
        sizes = [leaf.row_bytes for leaf in self._leaves]
        for entry in entries:
            raw, at = memoryview(entry), _SIGNATURE_BYTES
            for column, size in zip(columns, sizes, strict=True):
                if size is None:
                    size = int.from_bytes(raw[at : at + _LENGTH_BYTES], "little")
                    at += _LENGTH_BYTES
                column.append(raw[at : at + size])
                at += size
            if at != len(raw):
                raise RemoteProtocolError(f"a row of {len(raw)} bytes was kept where {at} are needed")
        return columns
