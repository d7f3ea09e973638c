"""A peer's text without what a terminal obeys: cleaned where a record arrives, so that no place that shows it can forget to.

A terminal obeys control characters in what is written to it: a peer could move its cursor, set its title, fill its clipboard,
hide a text or turn its order around. Pure.
"""

from __future__ import annotations

import re
import typing
from functools import cache
from typing import Any, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from guava_nb.protocol.messages import CrashReport, Factory, Log, StoreAsk

__all__ = ["COLOURED", "EXACT", "cleaned", "shown_text"]

#: An order for colours or weight; what a terminal obeys otherwise, and marks that end a line or turn the order of letters around.
#: Tabs and ends of lines stay.
_CONTROL = re.compile(r"\x1b\[([0-9;]{0,40})m|[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
#: Orders that hide nothing: reset, bold on and off, and letters in colours that are seen on white and on black. No background,
#: for letters of the same colour would be hidden; no concealment.
_HARMLESS = frozenset(["", "0", "1", "22", "39", *map(str, (*range(31, 37), *range(90, 97)))])
_RESET = "\x1b[0m"
#: What workers printed: users print colours.
COLOURED: frozenset[tuple[type[Struct], str]] = frozenset({(Log, "lines"), (CrashReport, "tail")})
#: What stays as it came: a program's own keys, of which two must not become one, and arguments, with which a data set is built.
EXACT: frozenset[tuple[type[Struct], str]] = frozenset({(StoreAsk, "keys"), (Factory, "args")})

_Record = TypeVar("_Record", bound=Struct)


def shown_text(text: str, coloured: bool = False) -> str:
    """Return a peer's text without what a terminal obeys: orders for colours are left out, for all else U+FFFD stands there.

    Args:
        coloured: bold letters and plain colours of letters stay; a line that has them and does not end them gets a reset.
    """
    if not coloured:
        return _CONTROL.sub(_plain, text)
    return "\n".join(_ended(_CONTROL.sub(_plain_or_colour, line)) for line in text.split("\n"))


def _plain(found: re.Match[str]) -> str:
    return "\N{REPLACEMENT CHARACTER}" if found[1] is None else ""


def _plain_or_colour(found: re.Match[str]) -> str:
    return found[0] if found[1] is not None and _HARMLESS.issuperset(found[1].split(";")) else _plain(found)


def _ended(line: str) -> str:
    _, order, rest = line.rpartition("\x1b[")
    return line + _RESET if order and rest.partition("m")[0] not in ("", "0") else line


def cleaned(record: _Record) -> _Record:
    """Return a record with all its texts as `shown_text` gives them, those of records within it too; `EXACT` names what stays.

    The very same record comes back where nothing had to change.
    """
    changes: dict[str, Any] = {}
    for name in _fields_with_text(type(record)):
        value = getattr(record, name)
        clean = _cleaned_value(value, (type(record), name) in COLOURED)
        if clean is not value:
            changes[name] = clean
    return replace(record, **changes) if changes else record


def _cleaned_value(value: Any, coloured: bool = False) -> Any:
    """Return the very same object where nothing had to change."""
    if isinstance(value, str):
        return value if value.isprintable() else shown_text(value, coloured)
    if isinstance(value, Struct):
        return cleaned(value)
    if isinstance(value, tuple | list):
        parts = [_cleaned_value(part, coloured) for part in value]
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
