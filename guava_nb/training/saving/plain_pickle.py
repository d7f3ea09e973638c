"""Builds plain data from the pickle in a file of `torch.save`, calling nothing but what its caller names.

`pickletools` only takes a pickle apart: what its instructions do stands here, and there are only those that plain data needs.
"""

from __future__ import annotations

import pickletools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

__all__ = ["NotPlain", "built"]

_CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
}
_VALUES = ("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE")
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_MARK = object()


class NotPlain(Exception):
    """A pickle holds more than plain data; its text says what."""


def built(description: bytes, find: Callable[[str], Any], storage: Callable[[Any], Any]) -> Any:
    """Return what a pickle describes.

    Args:
        find: gives what stands for a name such as "collections OrderedDict"; what it gives is called with plain data.
        storage: gives what stands for the persistent id of a tensor's memory.

    Raises:
        NotPlain: there is an instruction that plain data does not need.
        Exception: anything, of a damaged one.
    """
    stack: list[Any] = []
    memo: dict[Any, Any] = {}
    for instruction, argument, _ in pickletools.genops(description):
        name = instruction.name
        if name in _VALUES:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name]())
        elif name in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name == "GLOBAL":
            stack.append(find(str(argument)))
        elif name == "BINPERSID":
            stack.append(storage(stack.pop()))
        elif name == "MARK":
            stack.append(_MARK)
        elif name not in ("PROTO", "STOP"):
            _combine(name, stack)
    if len(stack) != 1:
        raise NotPlain("its description does not end")
    return stack[0]


def _combine(name: str, stack: list[Any]) -> None:
    if name in _TUPLES:
        stack[-_TUPLES[name] :] = [tuple(stack[-_TUPLES[name] :])]
    elif name == "TUPLE":
        stack.append(tuple(_since_mark(stack)))
    elif name in ("APPEND", "APPENDS"):
        items = [stack.pop()] if name == "APPEND" else _since_mark(stack)
        _top(stack, list).extend(items)
    elif name in ("SETITEM", "SETITEMS"):
        pairs = [stack.pop(-2), stack.pop()] if name == "SETITEM" else _since_mark(stack)
        _top(stack, dict).update(zip(pairs[::2], pairs[1::2], strict=True))
    elif name == "REDUCE":
        arguments = stack.pop()
        stack.append(stack.pop()(*arguments))
    elif name == "BUILD":  # what state_dict() notes in its OrderedDict beside the tensors is left out
        stack.pop()
        _top(stack, OrderedDict)
    else:
        raise NotPlain(f"its description holds the instruction {name}, which plain data does not need")


def _since_mark(stack: list[Any]) -> list[Any]:
    items: list[Any] = []
    while (item := stack.pop()) is not _MARK:
        items.append(item)
    return items[::-1]


def _top(stack: list[Any], kind: type[Any]) -> Any:
    if not isinstance(stack[-1], kind):
        raise NotPlain("it holds an object, and only tensors and plain data are read")
    return stack[-1]
