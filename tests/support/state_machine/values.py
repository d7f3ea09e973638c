"""Draws any record with values for its fields: some that fit what the run is doing, some that fit nothing."""

from __future__ import annotations

import random
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any

import msgspec
import torch

from guava_nb.data.codec import pack
from guava_nb.protocol.messages import FlatTensor, Message, Tree
from guava_nb.protocol.tensor_bounds import ITEM_BYTES

__all__ = ["Drawn", "draw", "mutated"]

_INTEGERS = (-(1 << 63), -1, 0, 1, 2, 3, 7, 1 << 31, (1 << 63) - 1)
_FLOATS = (float("nan"), float("inf"), float("-inf"), -1.0, 0.0, 5e-324, 0.5, 3.0, 1e308)
_STRINGS = (
    "",
    "w0",
    "user",
    "\x1b[2J\r\n",
    "é\u202e",
    "ValueError",
    "SystemExit",
    "127.0.0.1",
    "no address",
    "x" * 5000,
)
_BYTES = (b"", b"\0", b"\1", b"\xff" * 16, bytes(range(64)), b"\x93\x01\x02")
#: Values that a state or a metric might be, and that it is not.
_TREES: tuple[Any, ...] = (
    {}, [], [1, 2], 13, {"model": 3}, {"model": {}}, {"model": {"weight": torch.zeros(2)}, "optimizer": "none"},
    {"model": [1], "optimizer": {"state": {}, "param_groups": []}}, {"value": 13, "step": 1_000_000},
)  # fmt: skip


@dataclass(frozen=True)
class Drawn:
    """A record, and the bytes that come with it."""

    message: Message
    payload: bytes = b""


@cache
def _hints(record: type) -> dict[str, Any]:
    return {name: hint for name, hint in typing.get_type_hints(record).items() if name in record.__struct_fields__}  # type: ignore[attr-defined]


def draw(record: type[Message], luck: random.Random, fitting: Mapping[str, Sequence[Any]]) -> Drawn:
    """Draw a record of this type.

    Args:
        luck: decides.
        fitting: by name of a field, values that fit the run at this moment.
    """
    maker = _Maker(luck, fitting)
    return Drawn(maker.record(record), maker.payload)


def mutated(given: Drawn, luck: random.Random, fitting: Mapping[str, Sequence[Any]]) -> Drawn:
    """Return a record of a worker's own with one field that is wrong."""
    maker = _Maker(luck, fitting)
    hints = _hints(type(given.message))
    name = luck.choice(sorted(hints))
    value = maker.of(hints[name], name)
    changed = msgspec.structs.replace(given.message, **{name: value})
    return Drawn(changed, maker.payload if isinstance(value, Tree | FlatTensor) else given.payload)


class _Maker:
    def __init__(self, luck: random.Random, fitting: Mapping[str, Sequence[Any]]) -> None:
        self._luck, self._fitting, self.payload = luck, fitting, b""

    def record(self, record: type[Any]) -> Any:
        return record(**{name: self.of(hint, name) for name, hint in _hints(record).items()})

    def of(self, hint: Any, name: str = "") -> Any:
        fitting = self._fitting.get(name, ())
        if fitting and hint in _PLAIN and self._luck.random() < 0.8:
            return self._luck.choice(fitting)
        return self._wild(hint, name)

    def _wild(self, hint: Any, name: str) -> Any:
        luck, origin = self._luck, typing.get_origin(hint)
        if hint in _PLAIN:
            return luck.choice(_PLAIN[hint])
        if origin in (typing.Union, types.UnionType):
            return self.of(luck.choice(typing.get_args(hint)), name)
        if hint is Tree:
            return self._tree()
        if hint is FlatTensor:
            return self._flat()
        if origin is tuple:
            return self._tuple(typing.get_args(hint))
        if origin is dict:
            key, value = typing.get_args(hint)
            return {self.of(key): self.of(value) for _ in range(luck.randrange(3))}
        if isinstance(hint, type) and issubclass(hint, Enum):
            return luck.choice(list(hint))
        if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
            return self.record(hint)
        raise TypeError(f"no values are known for {hint}: add them here")

    def _tuple(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if args[1:] == (...,):
            return tuple(self.of(args[0]) for _ in range(self._luck.choice((0, 0, 1, 2, 3, 40))))
        return tuple(map(self.of, args))

    def _tree(self) -> Tree:
        if self._luck.random() < 0.4:
            return Tree(self._luck.choice(_BYTES))
        tree, buffers = pack(self._luck.choice(_TREES))
        self.payload = b"".join(bytes(buffer) for buffer in buffers)
        return tree

    def _flat(self) -> FlatTensor:
        dtype = self._luck.choice(("float32", "float64", "float64", *ITEM_BYTES))
        numel = self._luck.choice((*self._fitting.get("numel", ()), 0, 1, 7))
        self.payload = bytes(self._luck.choice((0, 0, 255)) for _ in range(1)) * (ITEM_BYTES[dtype] * numel)
        return FlatTensor(dtype, numel)


_PLAIN: dict[Any, Sequence[Any]] = {
    int: _INTEGERS,
    float: _FLOATS,
    str: _STRINGS,
    bytes: _BYTES,
    bool: (False, True),
    type(None): (None,),
    Any: (0, "a", None),
}
