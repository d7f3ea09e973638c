"""Every record has the bytes that the wire version promises: a change of `golden_records.txt` is a change of the wire.

Each line of the file holds a number, a record's name, and the bytes of one such record; each of its fields has its own value.
`python -m tests.unit.protocol.test_messages_golden` writes the lines that the file does not have yet, to be put there.
"""

from __future__ import annotations

import types
import typing
from enum import Enum
from pathlib import Path

import msgspec
import pytest

from guava_nb.protocol.messages import MESSAGE_KINDS, Message

LINES = (Path(__file__).parent / "golden_records.txt").read_text(encoding="ascii").splitlines()
GOLDEN = {int(kind): (name, bytes.fromhex(text)) for kind, name, text in map(str.split, LINES)}


def sample(hint: typing.Any, name: str) -> typing.Any:
    """A value of a field's type that tells the field's name, so that two fields in the wrong order are seen."""
    if hint is typing.Any:
        return name
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return sample(args[0], name)
    if origin is tuple:
        return (sample(args[0], name),) if args[-1] is Ellipsis else tuple(sample(arg, name) for arg in args)
    if origin is dict:
        return {sample(args[0], name): sample(args[1], name)}
    if issubclass(hint, Enum):
        return next(iter(hint))
    if issubclass(hint, msgspec.Struct):
        return filled(hint)
    plain = {int: len(name), float: len(name) + 0.5, bool: True, bytes: name.encode(), str: name}
    return plain[hint]


def filled(record: type[msgspec.Struct]) -> msgspec.Struct:
    hints = typing.get_type_hints(record)
    return record(**{name: sample(hints[name], name) for name in record.__struct_fields__})


def line_of(record: type[Message]) -> str:
    return f"{record.NUMBER} {record.__name__} {msgspec.msgpack.encode(filled(record)).hex()}"


@pytest.mark.parametrize(("kind", "record"), MESSAGE_KINDS.items(), ids=lambda value: getattr(value, "__name__", value))
def test_a_record_has_its_bytes(kind: int, record: type[Message]):
    name, golden = GOLDEN[kind]
    whole = filled(record)
    assert (name, golden) == (record.__name__, msgspec.msgpack.encode(whole))
    assert msgspec.msgpack.decode(golden, type=record) == whole


def test_every_record_has_a_line():
    assert list(GOLDEN) == sorted(MESSAGE_KINDS)


def test_no_two_records_have_one_number():
    numbered = [record for record in Message.__subclasses__() if "NUMBER" in vars(record)]
    assert sorted(record.NUMBER for record in numbered) == sorted(MESSAGE_KINDS)


def test_the_lines_that_are_written_for_people_are_those_of_the_file():
    assert [line_of(record) for _, record in sorted(MESSAGE_KINDS.items())] == LINES


if __name__ == "__main__":
    lacking = [line for _, record in sorted(MESSAGE_KINDS.items()) if (line := line_of(record)) not in LINES]
    print("\n".join(lacking) or "golden_records.txt has the line of every record")
