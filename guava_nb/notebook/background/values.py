"""Questions and answers as files: plain values, tensors, arrays and this package's own records, by the codec of batches.

Nothing is pickled: a value of any other class is refused by name.
"""

from __future__ import annotations

import importlib
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from guava_nb.data.classes import class_name, class_resolver, is_dataclass_type
from guava_nb.data.codec import pack, unpack
from guava_nb.errors import ConfigError
from guava_nb.protocol.messages import Tree
from guava_nb.systems import put_in_place

__all__ = ["RunName", "read_value", "write_value"]

_LENGTH = struct.Struct("<Q")
_OURS = "guava_nb."


@dataclass(frozen=True)
class RunName:
    """A run of the background session, which stays there.

    Attributes:
        methods: names of what is called; all else is read.
    """

    run_id: str
    methods: tuple[str, ...]


@dataclass(frozen=True)
class _Own:
    """An object of a class of this package, by its attributes."""

    kind: str
    attributes: dict[str, Any]


@dataclass(frozen=True)
class _PathText:
    text: str


def write_value(path: Path, value: Any, name_of_run: Callable[[Any], RunName | None] = lambda value: None) -> None:
    """Write a value to a file that is not there yet.

    Args:
        name_of_run: gives the name under which an object stays where it is; None where it travels.

    Raises:
        ConfigError: something in it cannot travel; its place and class are named.
    """
    tree, buffers = pack(_plain(value, name_of_run), "the value")
    record = msgspec.msgpack.encode(tree)
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        file.write(_LENGTH.pack(len(record)) + record)
        for buffer in buffers:
            file.write(buffer)
    put_in_place(partial, path)


def read_value(path: Path, run_of: Callable[[RunName], Any] = lambda name: name) -> Any:
    """Read what `write_value` wrote; `run_of` makes what stands here for a run that stayed there."""
    content = memoryview(bytearray(path.read_bytes()))
    (length,) = _LENGTH.unpack_from(content)
    at = _LENGTH.size + length
    tree = msgspec.msgpack.decode(content[_LENGTH.size : at], type=Tree)
    return _rebuilt(unpack(tree, content[at:], _class_of), run_of)


def _plain(value: Any, name_of_run: Callable[[Any], RunName | None]) -> Any:
    if (name := name_of_run(value)) is not None:
        return name
    if isinstance(value, Path):
        return _PathText(str(value))
    if type(value) in (dict, list, tuple):
        parts = value.items() if type(value) is dict else value
        return type(value)(_plain(part, name_of_run) for part in parts)
    kind = type(value)
    if kind.__module__.startswith(_OURS) and hasattr(value, "__dict__") and not is_dataclass_type(kind):
        return _Own(class_name(kind), {name: _plain(part, name_of_run) for name, part in vars(value).items()})
    return value


def _rebuilt(value: Any, run_of: Callable[[RunName], Any]) -> Any:
    if isinstance(value, RunName):
        return run_of(value)
    if isinstance(value, _PathText):
        return Path(value.text)
    if type(value) in (dict, list, tuple):
        parts = value.items() if type(value) is dict else value
        return type(value)(_rebuilt(part, run_of) for part in parts)
    if isinstance(value, _Own):
        kind = _own_class(value.kind)
        made: Any = object.__new__(kind)
        vars(made).update({name: _rebuilt(part, run_of) for name, part in value.attributes.items()})
        return made
    return value


def _own_class(name: str) -> type:
    module, _, qualname = name.partition(":")
    found = getattr(importlib.import_module(module), qualname, None) if module.startswith(_OURS) else None
    if not isinstance(found, type):
        raise ConfigError(
            f"the background session sent a {name}, which this notebook does not know: it runs another version of guava_nb. "
            "%guava_down, then %guava_up --background"
        )
    return found


def _class_of(name: str) -> type:
    if name.startswith(_OURS):
        importlib.import_module(name.partition(":")[0])
    return class_resolver(None)(name)
