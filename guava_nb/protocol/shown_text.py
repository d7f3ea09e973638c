"""A peer's text without what a terminal obeys: cleaned where a record arrives, so that no place that shows it can forget to.

A terminal obeys control characters in what is written to it: a peer could move its cursor, set its title or fill its clipboard.
Pure.
"""

from __future__ import annotations

import re
import typing
from functools import cache
from typing import Any, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from guava_nb.protocol.messages import Factory, StoreAsk

__all__ = ["EXACT", "cleaned", "shown_text"]

#: Colours and weights stay, but for 8, which hides text: users print them. So do tabs and ends of lines. What turns the direction
#: of a line round, or ends it where no end is seen, does not: a text could be read as another one.
_PART = r"(?:[34]8;(?:5;[0-9]{1,3}|2(?:;[0-9]{1,3}){3})|(?!0*8[;m])[0-9]{1,3})"
_CONTROL = re.compile(
    rf"(\x1b\[(?:{_PART}(?:;{_PART}){{0,9}})?m)|[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]"
)
#: What stays as it came: a program's own keys, of which two must not become one, and arguments, with which a data set is built.
EXACT: frozenset[tuple[type[Struct], str]] = frozenset({(StoreAsk, "keys"), (Factory, "args")})

_Record = TypeVar("_Record", bound=Struct)


def shown_text(text: str, colours: bool = True) -> str:
    """Return a peer's text without what a terminal obeys, or without all but colours: U+FFFD stands in its place."""
    return _CONTROL.sub(lambda found: (colours and found[1]) or "\N{REPLACEMENT CHARACTER}", text)


def cleaned(record: _Record) -> _Record:
    """Return a record with all its texts as `shown_text` gives them, those of records within it too; `EXACT` names what stays.

    The very same record comes back where nothing had to change.
    """
    changes: dict[str, Any] = {}
    for name in _fields_with_text(type(record)):
        value = getattr(record, name)
        clean = _cleaned_value(value)
        if clean is not value:
            changes[name] = clean
    return replace(record, **changes) if changes else record


def _cleaned_value(value: Any) -> Any:
    """Return the very same object where nothing had to change."""
    if isinstance(value, str):
        return value if value.isprintable() else shown_text(value)
    if isinstance(value, Struct):
        return cleaned(value)
    if isinstance(value, tuple | list):
        parts = [_cleaned_value(part) for part in value]
        return value if all(map(_is, parts, value)) else type(value)(parts)
    if isinstance(value, dict):
        pairs = {_cleaned_value(key): _cleaned_value(part) for key, part in value.items()}
        is_same = all(map(_is, pairs, value)) and all(map(_is, pairs.values(), value.values()))
        return value if is_same and len(pairs) == len(value) else pairs
    return value


def _is(one: object, other: object) -> bool:
    return one is other


@cache
def _fields_with_text(record: type[Struct]) -> tuple[str, ...]:
    """Return the fields of a record that may hold text: all others are not looked at, such as lists of thousands of numbers."""
    hints = typing.get_type_hints(record)
    return tuple(
        name for name in record.__struct_fields__ if (record, name) not in EXACT and _may_hold_text(hints[name])
    )


def _may_hold_text(hint: Any) -> bool:
    if hint is str or hint is Any:
        return True
    if isinstance(hint, type) and issubclass(hint, Struct):
        return bool(_fields_with_text(hint))
    return any(map(_may_hold_text, typing.get_args(hint)))
