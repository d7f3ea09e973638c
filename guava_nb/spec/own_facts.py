"""What a run's code reads of the user's own modules: plain values, attributes of classes, and which functions stand where.

Workers import modules anew and run shared cells anew. What a script or a notebook changed there afterwards (a field of a
configuration module, a method that was replaced) they do not have; two lists of these facts show it. Only names that reachable
code reads are listed; globals that it sets itself (counters) are marked, and what it fills (caches) is left out. Knows Python's
objects; runs nothing.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import dis
import functools
import hashlib
import math
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from guava_nb.protocol.messages import RunSpec
from guava_nb.spec.own_code import is_own, users_function

__all__ = [
    "HASH",
    "Facts",
    "facts_of",
    "is_alike",
    "is_same_code",
    "module_of",
    "moved",
    "reads",
    "roots_of",
    "shown",
    "unlike",
]

#: Place in the user's code to what is there, as text.
Facts = Mapping[str, str]
#: Fields of a run's record that name the user's code.
ROLES = ("model", "criterion", "step", "optimizer", "scheduler", "preprocess", "augment", "tokens")
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
#: Facts, and characters of one, at most.
_MOST_FACTS, _MOST_TEXT = 2000, 200
#: Modules whose names differ here and at a worker, though they hold the same cells.
_CELLS = ("__main__", "guava_shared")
_MUTATORS = frozenset(
    {"append", "add", "update", "setdefault", "extend", "pop", "insert", "clear", "remove", "appendleft", "discard"}
)
_DEVICES = ("cuda", "cpu", "mps", "xpu")
_CODE = "#"  # before the version of Python and the hash of a function's code
#: The place of what Python's hash() gives for a text.
HASH = "hash('text')"
_SET = "~"  # before the place of a global that reachable code sets itself
#: Instructions that a call has or has not, by what the compiler knows of the callee; and names of one thing.
_OF_A_CALL = frozenset({"CACHE", "PUSH_NULL", "PRECALL", "EXTENDED_ARG", "NOP", "RESUME"})
_ALIKE = {"LOAD_METHOD": "LOAD_ATTR", "CALL_METHOD": "CALL", "CALL_FUNCTION": "CALL"}
#: Numbers of a tensor that are compared, and shown.
_MOST_NUMBERS, _MOST_SHOWN = 1 << 16, 6
_MOST_OF_MODULE = 1 << 10  # of each of its tensors


@dataclass(frozen=True)
class _Reads:
    """What a function, and those inside it, does with names."""

    names: frozenset[str]  # globals and attributes
    loaded: frozenset[str]  # those that are read, and not only set
    keys: frozenset[str]  # texts that stand in it
    called: frozenset[str]  # globals
    written: frozenset[str]  # globals that it sets
    filled: frozenset[str]  # globals that it may change in place, if they are containers
    stored: frozenset[str]  # attributes that it sets


def facts_of(roots: Mapping[str, object]) -> dict[str, str]:
    """Return what the code behind these objects reads.

    Args:
        roots: model, loss, step, optimizer and so on, by what they are called in messages.
    """
    return _Walk(roots).facts()


def reads(roots: Mapping[str, object], name: str) -> bool:
    """Whether the code behind these objects reads a name."""
    return name in _Walk(roots).names


def loads(roots: Mapping[str, object], name: str) -> bool:
    """Whether that code uses what is under a name, and does not only set it."""
    return name in _Walk(roots).loaded


def roots_of(
    spec: RunSpec, resolve: Callable[[str], object], given: Mapping[str, object] | None = None
) -> dict[str, object]:
    """Return what a run's record names, as far as it is not torch's own.

    Args:
        spec: of the run.
        resolve: finds shared and importable objects.
        given: what the user gave in place of names, by role.
    """
    found: dict[str, object] = {}
    for role in ROLES:
        factory = getattr(spec, role)
        if factory is not None and not factory.name.startswith("@"):
            with contextlib.suppress(Exception):  # one of torch's names, or it is told where it is used
                found[role] = resolve(factory.name)
    return {**found, **{role: one for role, one in (given or {}).items() if role in found and not isinstance(one, str)}}


def unlike(ours: Facts, theirs: Facts) -> list[str]:
    """Return the places that both know and that hold something else; code is compared under one version of Python only."""
    return [place for place in _differing(ours, theirs) if not place.startswith(_SET)]


def moved(ours: Facts, theirs: Facts) -> dict[str, tuple[str, str]]:
    """Return globals that the code itself sets and that both have at other values: what they are on each side."""
    return {p.removeprefix(_SET): (ours[p], theirs[p]) for p in _differing(ours, theirs) if p.startswith(_SET)}


def module_of(place: str) -> str:
    """Return the first part of the module that a place is in; of a shared cell, its name there."""
    return place.removeprefix(_SET).partition(".")[0]


def _differing(ours: Facts, theirs: Facts) -> list[str]:
    return [place for place, text in ours.items() if place in theirs and not is_alike(text, theirs[place])]


def shown(text: str) -> str:
    """Return a fact as a message says it."""
    return text.partition(_CODE)[0]


def is_alike(a: str, b: str) -> bool:
    """Whether two facts of one place say the same."""
    (what, _, code), (other, _, its) = a.partition(_CODE), b.partition(_CODE)
    if what != other:
        return False
    return code.partition(":")[0] != its.partition(":")[0] or code == its


class _Walk:
    def __init__(self, roots: Mapping[str, object]) -> None:
        self._roots = {role: users_function(found) for role, found in roots.items()}
        self._functions: dict[str, types.FunctionType] = {}
        self._classes: dict[str, type] = {}
        self._seen, self._size = set[int](), -1
        self._names, self._keys, self._stored, self.loaded = set[str](), set[str](), set[str](), set[str]()
        self._written, self._filled = set[str](), set[str]()
        self._modules: dict[int, types.ModuleType] = {}
        while (
            self._has_grown()
        ):  # every function that is reached may read more names of modules that were reached before
            self._again()

    @property
    def names(self) -> set[str]:
        """What the code reads: globals and attributes."""
        return self._names

    def _has_grown(self) -> bool:
        size = len(self._names) + len(self._functions) + len(self._modules)
        grown, self._size = size != self._size, size
        return grown

    def _again(self) -> None:
        self._seen.clear()
        for found in self._roots.values():
            self._visit(found)
        for module in list(self._modules.values()):
            for name in self._names & vars(module).keys():
                self._visit(vars(module)[name])

    def _visit(self, value: Any) -> None:
        value = users_function(value)
        if id(value) in self._seen or len(self._seen) > 10 * _MOST_FACTS:
            return
        self._seen.add(id(value))
        if isinstance(value, types.FunctionType) and is_own(value.__globals__):
            self._of_function(value)
        elif isinstance(value, type) and _is_own_class(value):
            self._of_class(value)
        elif isinstance(value, types.ModuleType) and is_own(vars(value)):
            self._modules[id(value)] = value
        elif _is_own_class(type(value)):
            self._visit(type(value))

    def _of_function(self, function: types.FunctionType) -> None:
        self._functions[_place(function)] = function
        reads = _reads(function.__code__)
        self._names |= reads.names
        self._keys |= reads.keys
        self.loaded |= reads.loaded | reads.keys  # getattr(self, "name") reads it, too
        module = _module(function.__module__)
        self._written |= {f"{module}{name}" for name in reads.written}
        self._filled |= {f"{module}{name}" for name in reads.filled}
        if function.__name__ != "__init__":
            self._stored |= reads.stored
        for name in reads.called:
            self._visit(function.__globals__.get(name))
        for cell in function.__closure__ or ():
            try:
                self._visit(cell.cell_contents)
            except ValueError:  # not filled yet
                continue

    def _of_class(self, found: type) -> None:
        for cls in found.__mro__:
            if _is_own_class(cls):
                self._classes[_place(cls)] = cls
                for value in list(vars(cls).values()):
                    self._visit(_inside(value))

    # ------------------------------------------------------------------------------------------------------- the list

    def facts(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for place, text in self._all():
            if len(found) == _MOST_FACTS:
                break
            found.setdefault(place, text[:_MOST_TEXT])
        return found

    def _all(self) -> Iterator[tuple[str, str]]:
        for role, root in self._roots.items():
            if (isinstance(root, types.FunctionType) and is_own(root.__globals__)) or _is_own_class(root):
                yield role, _text(root)
        for place, cls in self._classes.items():
            for name, value in list(vars(cls).items()):
                if isinstance(_inside(value), types.FunctionType) or (
                    name in self._names and not name.startswith("__")
                ):
                    yield from self._of_value(f"{place}.{name}", name, _inside(value))
        for place, function in self._functions.items():
            yield from self._of_globals(function)
            for name, value in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
                try:
                    yield from self._of_value(f"{place}.{name}", name, value.cell_contents)
                except ValueError:
                    continue
        for module in self._modules.values():
            for name in sorted(self._names & vars(module).keys()):
                yield from self._of_value(f"{_module(module.__name__)}{name}", name, vars(module)[name])

    def _of_globals(self, function: types.FunctionType) -> Iterator[tuple[str, str]]:
        called = _reads(function.__code__).called
        if "hash" in called and "hash" not in function.__globals__:  # of texts it differs from process to process
            yield HASH, repr(hash("text"))
        for name in sorted(called):
            if name in function.__globals__:
                place = f"{_module(function.__globals__['__name__'])}{name}"
                yield from self._of_value(place, name, function.__globals__[name])

    def _of_value(self, place: str, name: str, value: Any) -> Iterator[tuple[str, str]]:
        if place in self._written:
            if isinstance(value, bool | int | float):
                yield f"{_SET}{place}", repr(value)
            return
        if name in self._stored:
            return
        if isinstance(value, _PLAIN):
            if not _is_machines(value):
                yield place, repr(value)
        elif isinstance(value, Tensor | np.ndarray):
            if place not in self._filled and (text := _numbers(value)):
                yield place, text
        elif isinstance(value, nn.Module):
            if place not in self._filled and (text := _weights(value)):
                yield place, text
        elif isinstance(value, types.FunctionType | types.BuiltinFunctionType | type):
            yield place, _text(value)
        elif place in self._filled and isinstance(value, dict | list):
            return
        elif isinstance(value, Mapping):
            wanted = self._names | self._keys
            for key, one in list(value.items()):
                if isinstance(key, str) and key in wanted:
                    yield from self._of_value(f"{place}[{key!r}]", key, one)
        elif isinstance(value, list | tuple):
            for number, one in enumerate(value[:100]):
                yield from self._of_value(f"{place}[{number}]", "", one)
            yield f"len({place})", str(len(value))
        elif _is_namespace(value):
            for key, one in list(vars(value).items()):
                if key in self._names:
                    yield from self._of_value(f"{place}.{key}", key, one)


# -------------------------------------------------------------------------------------------------------------- objects


def is_same_code(one: object, other: object) -> bool:
    """Whether two functions, or two classes, are of one name and text."""
    if isinstance(one, types.FunctionType) and isinstance(other, types.FunctionType):
        return _text(one) == _text(other)
    if not (isinstance(one, type) and isinstance(other, type)) or one.__qualname__ != other.__qualname__:
        return False
    ours, theirs = ({name: _inside(v) for name, v in vars(cls).items()} for cls in (one, other))
    return all(
        is_same_code(value, theirs.get(name)) for name, value in ours.items() if isinstance(value, types.FunctionType)
    )


def _inside(value: Any) -> Any:
    """What a class attribute holds: the function of a static method, a class method or a property."""
    return users_function(getattr(value, "__func__", None) or getattr(value, "fget", None) or value)


def _is_own_class(cls: Any) -> bool:
    module = sys.modules.get(cls.__module__) if isinstance(cls, type) else None
    return module is not None and is_own(vars(module))


def _is_namespace(value: Any) -> bool:
    if isinstance(value, types.SimpleNamespace) or type(value).__name__ == "Namespace":
        return True
    return (dataclasses.is_dataclass(value) or _is_own_class(type(value))) and hasattr(value, "__dict__")


def _numbers(value: Tensor | np.ndarray) -> str:
    """Describe a tensor or an array on the CPU; "" for one that cannot be read without a wait, or has no plain numbers."""
    array = value
    if isinstance(value, Tensor):
        if value.device.type != "cpu" or value.layout is not torch.strided or value.is_quantized or value.requires_grad:
            return ""
        array = value.resolve_conj().resolve_neg().contiguous().reshape(-1)[:_MOST_NUMBERS].view(torch.uint8).numpy()
    elif value.dtype.hasobject:
        return ""
    digest = hashlib.blake2b(np.ascontiguousarray(array).reshape(-1)[: 16 * _MOST_NUMBERS].tobytes(), digest_size=6)
    content = str(value.tolist()) if math.prod(value.shape) <= _MOST_SHOWN else f"with digest {digest.hexdigest()}"
    return f"{type(value).__name__} {value.dtype}{[*value.shape]} {content}"


def _weights(module: nn.Module) -> str:
    """Describe a module by the beginnings of its parameters and buffers; "" where they cannot be read without a wait."""
    tensors = [value for value in module.state_dict().values() if isinstance(value, Tensor)]
    found = [_numbers(value.detach().reshape(-1)[:_MOST_OF_MODULE]) for value in tensors]
    digest = hashlib.blake2b("".join(found).encode(), digest_size=6).hexdigest()
    return f"{type(module).__name__} with digest {digest}" if found and all(found) else ""


def _is_machines(value: Any) -> bool:
    """Whether a text names a place or a device, which every machine has its own of."""
    return isinstance(value, str) and ("/" in value or "\\" in value or value.startswith(_DEVICES))


def _module(name: str) -> str:
    return "" if name in _CELLS else f"{name}."


def _place(value: Any) -> str:
    return f"{_module(value.__module__)}{value.__qualname__}"


def _text(value: Any) -> str:
    """Name a function or a class; a function of the user's own with its code."""
    if not isinstance(value, types.FunctionType) or not is_own(value.__globals__):
        return getattr(value, "__qualname__", "") or value.__name__
    code = value.__code__
    named = value.__qualname__ if code.co_name == value.__name__ else f"{value.__qualname__} in {code.co_name}"
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    return f"{named}({', '.join(code.co_varnames[: code.co_argcount])}){_CODE}{version}:{_hash(code)}"


@functools.lru_cache(maxsize=4096)
def _hash(code: types.CodeType) -> str:
    """Hash what a function does, however it was compiled.

    A call `module.function()` has other instructions where the import stands in the same unit: Python 3.11 and 3.12 look for it.
    A notebook compiles statement by statement, a module and a shared cell at a worker are compiled whole.
    """
    steps = [one for one in dis.get_instructions(code) if one.opname not in _OF_A_CALL]
    places = [one.offset for one in steps]
    jumps = {*dis.hasjrel, *dis.hasjabs}
    done = [
        (_ALIKE.get(one.opname, one.opname),
         str(bisect.bisect_left(places, one.argval)) if one.opcode in jumps else _const(one.argval))
        for one in steps
    ]  # fmt: skip
    return hashlib.blake2b(repr(done).encode(), digest_size=8).hexdigest()


def _const(value: Any) -> str:
    if isinstance(value, types.CodeType):
        return _hash(value)
    return repr(sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)


@functools.lru_cache(maxsize=4096)
def _reads(code: types.CodeType) -> _Reads:
    steps = [(one.opname, one.argval) for one in dis.get_instructions(code)]
    called = {name for op, name in steps if op in ("LOAD_GLOBAL", "LOAD_NAME")}
    written = {name for op, name in steps if op == "STORE_GLOBAL"}
    filled = called if any(op in ("STORE_SUBSCR", "DELETE_SUBSCR") for op, _ in steps) else set[str]()
    filled = filled | {
        name
        for (op, name), (_, attribute) in zip(steps, steps[1:], strict=False)
        if op == "LOAD_GLOBAL" and attribute in _MUTATORS
    }
    own = _Reads(
        frozenset(code.co_names), frozenset(name for op, name in steps if op.startswith("LOAD_") and isinstance(name, str)),
        frozenset(one for one in code.co_consts if isinstance(one, str)), frozenset(called),
        frozenset(written), frozenset(filled), frozenset(name for op, name in steps if op == "STORE_ATTR"),
    )  # fmt: skip
    return _joined([own, *(_reads(one) for one in code.co_consts if isinstance(one, types.CodeType))])


def _joined(parts: Iterable[_Reads]) -> _Reads:
    fields = [field.name for field in dataclasses.fields(_Reads)]
    found = list(parts)
    return _Reads(*(frozenset[str]().union(*(getattr(one, name) for one in found)) for name in fields))
