"""What a model, its loss and its step keep outside parameters and buffers: Python attributes, counters, globals.

Read before and after a forward, and put back, so that a batch that is only looked at leaves nothing behind. Knows Python's
objects; knows no batch and no worker. Of a module of the user's own it sees names that a function there declares `global`,
small containers, tensors, arrays and objects, iterators that count, attributes of classes, and what functions hold: attributes,
containers among their defaults, variables of the function around them. Which parameters take gradients is kept in Python
too. Of installed packages it sees nothing.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import dis
import functools
import hashlib
import itertools
import math
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from guava_nb.data.codec import tensor_bytes
from guava_nb.parallel.tensor.tensor_plan import divided_attributes
from guava_nb.parallel.unloaded import is_dtensor
from guava_nb.random_streams import STREAMS, place_in, put_back
from guava_nb.replica.one_step_check.namespaces import Cell, ClassAttributes, Slots, Switches, has_slots
from guava_nb.replica.one_step_check.set_aside import CACHE, Pulled
from guava_nb.spec.own_code import is_own, users_function

__all__ = ["Kept", "ModuleGlobals", "PythonState", "adopt", "changed_since", "digests", "is_alike", "is_apart"]

#: What a place holds: its numbers, texts and tensors, by their paths.
Kept = Mapping[str, Any]
#: Attributes that torch gives every module.
_TORCHS = frozenset(vars(nn.Module()))
#: Values that a global container may hold in order to be looked at.
_MOST_VALUES = 256
#: Modules and functions that are looked into.
_MOST_PLACES = 2000
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


@dataclass(frozen=True, slots=True)
class _Owner:
    """A namespace, and which of its names are looked at."""

    label: str
    values: MutableMapping[str, Any]
    has: Callable[[str, Any], bool]

    def items(self) -> list[tuple[str, str, Any]]:
        """Name, full name and value of each."""
        return [(key, f"{self.label}.{key}", value) for key, value in list(self.values.items()) if self.has(key, value)]


class PythonState:
    """What is kept now is where `restore` goes back to.

    Args:
        model: its parameters, buffers and modules are left alone.
        others: criterion, step and other functions, by what they are called in messages.
        seen: places that others look after; those found here are added.
    """

    def __init__(self, model: nn.Module, others: Mapping[str, object], seen: set[int] | None = None) -> None:
        self._fixed: dict[int, Any] = {
            id(one): one for one in (*model.modules(), *model.parameters(), *model.buffers())
        }
        self._owners = list(_owners(model, others, set() if seen is None else seen))
        memo, self._first = dict(self._fixed), dict[str, tuple[Any, Any]]()
        for owner in self._owners:
            for _, name, value in owner.items():
                with contextlib.suppress(Exception):  # what cannot be copied is not put back
                    self._first[name] = value, _copied(value, memo)
        self._kept_first = self.read()

    def __bool__(self) -> bool:
        """Whether there is any place to look at."""
        return bool(self._kept_first)

    def read(self) -> dict[str, Kept]:
        """Return what each place holds; tensors are copied."""
        found: dict[str, Kept] = {}
        for owner in self._owners:
            for _, name, value in owner.items():
                leaves: dict[str, Any] = {}
                _flatten(value, "", leaves, set(self._fixed))
                found[name] = leaves
        return found

    def moved(self, now: Mapping[str, Kept]) -> tuple[str, ...]:
        """Return the places that hold something else than at first."""
        return tuple(name for name, kept in now.items() if not is_alike(kept, self._kept_first.get(name), 0.0))

    def streams(self) -> dict[str, object]:
        """Return the places that hold a stream of random numbers of the user's own."""
        return {n: one for owner in self._owners for _, n, one in owner.items() if isinstance(one, STREAMS)}

    def restore(self, but: Set[str] = frozenset()) -> None:
        """Put back what was there at first, except in these places; an iterator, which none can set back, is a new one."""
        iterators = [name for name, (_, one) in self._first.items() if isinstance(one, Iterator)]
        moved = {*self.moved(self.read()), *iterators} - but
        for owner in self._owners:
            for key, name, value in owner.items():
                if name not in moved:
                    continue
                if name not in self._first:
                    if name not in self._kept_first:
                        del owner.values[key]
                    continue
                first, saved = self._first[name]
                owner.values[key] = _refilled(first if first is value else value, _copied(saved, dict(self._fixed)))


class ModuleGlobals:
    """What globals of the user's imported modules held when a run had been built for the first time: each run begins with it."""

    def __init__(self) -> None:
        self._states, self._seen = list[PythonState](), set[int]()

    def note(self, roots: Iterable[object]) -> None:
        """Remember the modules behind what a run names, if they are new; shared cells are run anew for each run."""
        modules = [sys.modules.get(getattr(users_function(root), "__module__", None) or "") for root in roots]
        files = [module for module in modules if module is not None and not (module.__file__ or "<").startswith("<")]
        if state := PythonState(nn.Module(), {module.__name__: module for module in files}, self._seen):
            self._states.append(state)

    def restore(self) -> None:
        """Put it back."""
        for state in self._states:
            state.restore()


def digests(model: nn.Module | None, others: Mapping[str, object], optimizer: object = None) -> dict[str, bytes]:
    """Return a digest of what each place holds, for seeing later what has changed; b"" for what holds nothing.

    Args:
        model, others: as for `PythonState`.
        optimizer: what it keeps beside torch's own state, which a state dict carries.
    """
    parts = {} if model is None else {id(vars(part)): part for part in model.modules()}
    carried = {key for key, part in parts.items() if type(part).get_extra_state is not nn.Module.get_extra_state}
    owners = [
        one for one in _owners(nn.Module() if model is None else model, others, set()) if id(one.values) not in carried
    ]
    if model is not None:
        named = model.named_parameters()
        owners += [_Owner(f"model.{name}", vars(p), lambda key, value: key[:1] != "_") for name, p in named if vars(p)]
    if optimizer is not None and hasattr(optimizer, "__dict__"):
        owners.append(_Owner("optimizer", vars(optimizer), _is_beside_state))
    fixed = set() if model is None else {id(one) for one in (*model.modules(), *model.parameters(), *model.buffers())}
    found: dict[str, bytes] = {}
    for owner in owners:
        for _, name, value in owner.items():
            leaves: dict[str, Any] = {}
            _flatten(value, "", leaves, set(fixed))
            found[name] = b"" if leaves in ({}, {"": None}) else _digest(leaves)
    return found


def changed_since(first: Mapping[str, bytes], now: Mapping[str, bytes]) -> tuple[str, ...]:
    """Return the places that held something and hold something else now, then those that were filled since, in brackets."""
    moved = [name for name, digest in now.items() if first.get(name) and digest != first[name]]
    return (*moved, *(f"({name})" for name, digest in now.items() if digest and not first.get(name)))


def _is_beside_state(key: str, value: Any) -> bool:
    own = key in ("state", "param_groups", "defaults") or key.startswith("_")
    return not own and not isinstance(value, torch.optim.Optimizer)


def _digest(leaves: Mapping[str, Any]) -> bytes:
    found = hashlib.blake2b(digest_size=8)
    for path, value in leaves.items():
        data = bytes(tensor_bytes(value)) if isinstance(value, Tensor) else repr(value).encode()
        found.update(path.encode() + data)
    return found.digest()


def adopt(own: nn.Module, other: nn.Module) -> None:
    """Take over the buffers, whole parameters and plain attributes that another module of the same structure has by now.

    The other one may be a rank's part: what its plan divided (a number of heads) is not taken over.
    """
    theirs, memo = dict(other.named_modules()), dict[int, Any]()  # what several modules share stays one thing
    with torch.no_grad():
        for name, module in own.named_modules():
            found = theirs.get(name)
            if found is None or type(found).__qualname__.removeprefix("FSDP") != type(module).__qualname__:
                continue
            for mine, its in ((module._buffers, found._buffers), (module._parameters, found._parameters)):
                for key, value in mine.items():
                    new = its.get(key)
                    if value is not None and type(new) in (Tensor, nn.Parameter) and new.shape == value.shape:
                        value.copy_(new)
                    if isinstance(value, nn.Parameter) and isinstance(new, nn.Parameter):
                        value.requires_grad_(new.requires_grad)
            passed_over = _TORCHS | divided_attributes(found)
            for key, value in vars(found).items():
                if key not in passed_over and (key in vars(module) or isinstance(value, _PLAIN)) and _is_small(value):
                    with contextlib.suppress(Exception):  # what cannot be copied stays as it was built
                        vars(module)[key] = _copied(value, memo)


def is_alike(one: Kept, other: Kept | None, tolerance: float) -> bool:
    """Whether two places hold the same, up to rounding."""
    if other is None or one.keys() != other.keys():
        return False
    return all(_same(value, other[path], tolerance) for path, value in one.items())


def is_apart(whole: Kept, pieces: Sequence[Kept], tolerance: float) -> bool:
    """Whether what pieces of a batch left is, put together, what the whole batch left: one entry per sample."""
    if any(piece.keys() != whole.keys() for piece in pieces):
        return False
    return all(
        all(_same(value, piece[path], tolerance) for piece in pieces)
        or _joins(value, [piece[path] for piece in pieces], tolerance)
        for path, value in whole.items()
    )


def _joins(whole: Any, parts: Sequence[Any], tolerance: float) -> bool:
    if not all(isinstance(one, Tensor) and one.ndim == whole.ndim for one in parts if isinstance(whole, Tensor)):
        return False
    for axis in range(whole.ndim) if isinstance(whole, Tensor) else ():
        sizes = [[*one.shape[:axis], *one.shape[axis + 1 :]] for one in (whole, *parts)]
        if all(size == sizes[0] for size in sizes) and _same(whole, torch.cat(list(parts), axis), tolerance):
            return True
    return False


def _same(a: Any, b: Any, tolerance: float) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        return torch.equal(a, b) or bool(torch.isclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True).all())
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance) or (a != a and b != b)
    return type(a) is type(b) and bool(a == b)


# ------------------------------------------------------------------------------------------------------------- the places


def _owners(model: nn.Module, others: Mapping[str, object], seen: set[int]) -> Iterator[_Owner]:
    yield from _of_module("model", model, seen)
    for label, found in others.items():
        yield from _of_object(label, found, seen)


def _of_module(label: str, module: nn.Module, seen: set[int]) -> Iterator[_Owner]:
    yield _Owner(label, Switches(module), lambda key, value: bool(value))
    for name, part in module.named_modules():
        yield _Owner(f"{label}.{name}" if name else label, vars(part), _is_of_user)
        yield from _of_globals(getattr(getattr(type(part), "forward", None), "__globals__", {}), seen)


def _is_of_user(key: str, value: Any) -> bool:
    """Whether an attribute of a module is neither torch's nor what our layers that are shared out keep there."""
    is_ours = type(value).__module__.startswith("guava_nb.") and not isinstance(value, Pulled)
    return key not in _TORCHS and not is_ours


def _of_object(label: str, found: object, seen: set[int]) -> Iterator[_Owner]:
    while isinstance(found, functools.partial | types.MethodType):
        found = found.func if isinstance(found, functools.partial) else found.__func__
    if isinstance(found, nn.Module):
        yield from _of_module(label, found, seen)
        for name, part in found.named_modules():
            yield _Owner(f"{label}.{name}" if name else label, part._buffers, lambda key, value: True)
    elif isinstance(found, types.FunctionType):
        yield from _of_function(found, seen)
        yield from _of_globals(found.__globals__, seen)
    elif isinstance(found, types.ModuleType):
        yield from _of_globals(vars(found), seen)


def _of_function(function: types.FunctionType, seen: set[int]) -> Iterator[_Owner]:
    if id(function) in seen:
        return
    seen.add(id(function))
    yield _Owner(function.__name__, function.__dict__, lambda key, value: key != "__wrapped__")
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    given = function.__defaults__ or ()
    defaults = {**dict(zip(names[len(names) - len(given) :], given, strict=False)), **(function.__kwdefaults__ or {})}
    if held := {name: one for name, one in defaults.items() if _is_filled(one)}:  # these are filled in place
        yield _Owner(function.__name__, held, lambda key, value: True)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        with contextlib.suppress(ValueError):  # not filled yet
            if isinstance(inner := cell.cell_contents, types.FunctionType) and is_own(inner.__globals__):
                yield from _of_function(inner, seen)
            elif isinstance(inner, _PLAIN) or _is_filled(inner):
                yield _Owner(function.__name__, Cell(name, cell), lambda key, value: True)


def _is_filled(value: Any) -> bool:
    """Whether a value changes where it is, and is small."""
    is_plain = type(value) is np.ndarray or (type(value) is Tensor and not value.requires_grad)
    is_small = (is_plain or isinstance(value, dict | list | set | deque)) and _is_small(value)
    is_unused = isinstance(value, CACHE) and not sum(value.cache_info()[:2])  # another one cannot be put back
    return is_small or is_unused or isinstance(value, (itertools.count, Pulled, *STREAMS))


def _is_of_class(key: str, value: Any) -> bool:
    return not key.startswith("__") and (isinstance(value, _PLAIN) or _is_filled(value))


def _of_globals(names: dict[str, Any], seen: set[int]) -> Iterator[_Owner]:
    """The globals of a module of the user's own that its functions change, and attributes of its functions and objects."""
    if id(names) in seen or not is_own(names) or len(seen) > _MOST_PLACES:
        return
    seen.add(id(names))
    module = names.get("__name__", "")
    functions = [one for value in list(names.values()) for one in _functions_of(value, module)]
    changed = {name for one in functions for name in _written(one.__code__)}
    for key, value in names.items():
        if not key.startswith("__") and _is_filled(value):
            changed.add(key)
    yield _Owner(module, names, lambda key, value: key in changed)
    for function in functions:
        yield from _of_function(function, seen)
    for value in list(names.values()):
        if isinstance(value, type) and value.__module__ == module:
            yield _Owner(f"{module}.{value.__qualname__}", ClassAttributes(value), _is_of_class)
    for other in {id(one): one for one in map(_namespace_of, list(names.values())) if one is not None}.values():
        yield from _of_globals(other, seen)
    for key, value in list(names.items()):
        if isinstance(value, nn.Module):
            for part_name, part in value.named_modules(prefix=f"{module}.{key}"):
                for tensors in (part._buffers, part._parameters):  # the step may move a teacher's
                    yield _Owner(part_name, tensors, lambda key, value: value is not None and _is_small(value))
        elif getattr(type(value), "__module__", "") == module and _has_attributes(value) and _is_small(value):
            for kept in (vars(value) if hasattr(value, "__dict__") else {}, Slots(value)):
                yield _Owner(f"{module}.{key}", kept, lambda key, value: True)


def _namespace_of(value: Any) -> dict[str, Any] | None:
    """The module that a value is, or that a function or a class comes from."""
    if isinstance(value, types.ModuleType):
        return vars(value)
    if isinstance(value, types.FunctionType):
        return value.__globals__
    return vars(sys.modules[value.__module__]) if isinstance(value, type) and value.__module__ in sys.modules else None


def _functions_of(value: Any, module: str) -> Iterator[types.FunctionType]:
    value = value.__wrapped__ if isinstance(value, CACHE) else value
    if isinstance(value, types.FunctionType) and value.__module__ == module:
        yield value
    elif isinstance(value, type) and value.__module__ == module:
        yield from (one for one in vars(value).values() if isinstance(one, types.FunctionType))


@functools.lru_cache(maxsize=4096)
def _written(code: types.CodeType) -> frozenset[str]:
    """Names that a function, or one inside it, declares global and sets."""
    own = {one.argval for one in dis.get_instructions(code) if one.opname == "STORE_GLOBAL"}
    return frozenset(own.union(*(_written(inside) for inside in code.co_consts if isinstance(inside, types.CodeType))))


# --------------------------------------------------------------------------------------------------------------- values


def _flatten(value: Any, path: str, found: dict[str, Any], seen: set[int], most: float = math.inf) -> None:
    """Put the plain values and tensors in a value, by their paths, into `found`."""
    if isinstance(value, _PLAIN):
        found[path] = value
        return
    if id(value) in seen or len(found) > most:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        value = value.to_local() if is_dtensor(value) else value
        found[path] = value.detach().to_dense().clone() if value.layout is not torch.strided else value.detach().clone()
    elif isinstance(value, np.ndarray):
        found[path] = value.tobytes()
    elif isinstance(value, itertools.count):
        found[path] = repr(value)
    elif isinstance(value, CACHE):
        found[path] = value.cache_info().misses  # one that only remembers stays where it is from the second forward on
    elif isinstance(value, STREAMS):
        place = place_in(value)
        found[path] = place if isinstance(place, Tensor) else repr(place)
    elif isinstance(value, nn.Module):
        inside = {**value.state_dict(), **{k: v for k, v in vars(value).items() if k not in _TORCHS}}
        _flatten(inside, path, found, seen, most)
    elif isinstance(value, Mapping):
        for key, one in list(value.items()):
            _flatten(one, f"{path}.{key}", found, seen, most)
    elif isinstance(value, list | tuple | deque):
        for place, one in enumerate(list(value)):
            _flatten(one, f"{path}.{place}", found, seen, most)
    elif isinstance(value, Set):
        found[path] = repr(sorted(map(repr, value)))
    elif _has_attributes(value):
        _flatten({**getattr(value, "__dict__", {}), **Slots(value)}, path, found, seen, most)


def _has_attributes(value: Any) -> bool:
    """Whether attributes of a value are the user's: what spreads a module over ranks holds tensors whose memory is given back."""
    is_code = isinstance(value, type | types.FunctionType | types.ModuleType)
    is_torchs = type(value).__module__.startswith("torch.distributed")
    return (hasattr(value, "__dict__") or has_slots(value)) and not is_code and not is_torchs


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """Copy a value; a tensor that was computed from parameters without its history, since torch copies none."""
    if isinstance(value, Tensor) and not value.is_leaf:
        return memo.setdefault(id(value), value.detach().clone())
    if isinstance(value, torch.Generator):
        return value.clone_state()
    if isinstance(value, itertools.count):  # Python will not copy these any more
        start, step = (*map(ast.literal_eval, repr(value)[len("count(") : -1].split(",")), 1)[:2]
        return itertools.count(start, step)
    return copy.deepcopy(value, memo)


def _is_small(value: Any) -> bool:
    """Whether a value holds few plain values and no module, so that it may be copied and put back."""
    found: dict[str, Any] = {}
    if isinstance(value, list | dict | set | deque) and len(value) > _MOST_VALUES:
        return False
    if isinstance(value, Tensor | np.ndarray):
        return math.prod(value.shape) <= 1 << 16 and value.dtype != object
    if isinstance(value, nn.Module | type | types.FunctionType | types.ModuleType):
        return False
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple | deque) else ()
    if any(
        isinstance(one, nn.Module) or (isinstance(one, Tensor | np.ndarray) and not _is_filled(one)) for one in inside
    ):
        return False
    _flatten(value, "", found, set(), _MOST_VALUES)
    return len(found) <= _MOST_VALUES


def _refilled(value: Any, saved: Any) -> Any:
    """Give an object its content back in place, because others may hold it too; return what cannot be filled as a copy."""
    if type(value) is not type(saved):
        return saved
    if isinstance(value, dict | set):
        value.clear()
        value.update(saved)
    elif isinstance(value, list | deque):
        value.clear()
        value.extend(saved)
    elif isinstance(value, Tensor) and value.shape == saved.shape:
        with torch.no_grad():
            value.detach().copy_(saved)
    elif isinstance(value, np.ndarray) and value.shape == saved.shape and value.flags.writeable:
        value[...] = saved
    elif isinstance(value, STREAMS):
        put_back(value, place_in(saved))
    elif isinstance(value, CACHE):
        value.cache_clear()
    else:
        return saved
    return value
