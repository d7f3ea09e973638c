"""Records whose every text has something that a terminal obeys, found by their types: a new field is among them by itself."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from enum import Enum
from typing import Any

import msgspec

from guava_nb.protocol.shown_text import EXACT

__all__ = ["HOSTILE", "hostile", "obeyed"]

#: Fills a clipboard, sets a title, clears a screen, writes over a line.
HOSTILE = "a\x1b]52;c;bHM=\x07b\x1b]0;x\x07c\x1b[2Jd\x9b31;1He\rf\x7f"


def hostile(record: type[Any], text: str = HOSTILE) -> Any:
    """Make a record of this type with `text` wherever a text may stand."""
    hints = typing.get_type_hints(record)
    return record(**{name: _value(hints[name], text) for name in record.__struct_fields__})


def _value(hint: Any, text: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is str or hint is Any:
        return text
    if origin in (types.UnionType, typing.Union):
        return _value(next((arg for arg in args if arg is not type(None)), args[0]), text)
    if origin is tuple:
        return (_value(args[0], text),) if args[-1] is Ellipsis else tuple(_value(arg, text) for arg in args)
    if origin is dict:
        return {_value(args[0], text): _value(args[1], text)}
    if issubclass(hint, Enum):
        return next(iter(hint))
    if issubclass(hint, msgspec.Struct):
        return hostile(hint, text)
    return {int: 0, float: 0.0, bool: False, bytes: b""}[hint]


def obeyed(value: Any, path: str = "") -> list[str]:
    """Return the places of all texts in a value with control characters; ends of lines and fields in `EXACT` may stay."""
    return list(_obeyed(value, path))


def _obeyed(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, str) and any(ord(char) < 32 or 127 <= ord(char) < 160 for char in value.replace("\n", "")):
        yield path
    elif isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            if (type(value), name) not in EXACT:
                yield from _obeyed(getattr(value, name), f"{path}.{name}")
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _obeyed(part, f"{path}[]")
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from _obeyed(key, f"{path}{{}}")
            yield from _obeyed(part, f"{path}[]")
