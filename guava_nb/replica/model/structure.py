"""What two models of one class may have unlike although their state dicts fit: all that a state dict does not carry.

Knows modules and their attributes; knows nothing of runs. Two objects that were made separately are compared by what they
hold: a function by its code, an object by its class and attributes, a tensor that is no parameter by its values.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from guava_nb.parallel.state.local_tensors import tensors_of
from guava_nb.replica.model.shared_memory import overlaps

__all__ = ["first_difference"]

#: Compared by their names, or of torch's own making at each call.
_TORCHS = {"_parameters", "_buffers", "_modules", "_compiled_call_impl", "_is_torch_compile"}


def first_difference(given: nn.Module, built: nn.Module, *, any_float: bool, hidden: bool) -> str:
    """Return the first thing that two models have unlike, "" where they would compute and train alike.

    Whether a parameter takes a gradient, and values that a state dict carries, are not compared. Where the whole of `given`
    is in evaluation mode, neither are training flags: training switches the whole model.

    Args:
        given, built: their state dicts have the same names and shapes.
        any_float: floating dtypes may differ, because the run has one for all.
        hidden: values of buffers that the state dict leaves out must be equal, too.
    """
    return next(_differences(given, built, any_float, hidden), "")


def _differences(given: nn.Module, built: nn.Module, any_float: bool, hidden: bool) -> Iterator[str]:
    ours, theirs = (dict(model.named_modules(remove_duplicate=False)) for model in (given, built))
    pairs = _Pairs(given, built)
    for name in [*ours, *(name for name in theirs if name not in ours)]:
        place = f"module {name!r}" if name else "the model itself"
        if name not in theirs or name not in ours:
            yield f"{place} is there only {'in the registered model' if name in ours else 'in the one that is built'}"
            return
        yield from _of_module(place, ours[name], theirs[name], pairs, flags=given.training)
    yield from _of_tensors(given, built, pairs, any_float, hidden)


def _of_module(place: str, ours: nn.Module, theirs: nn.Module, pairs: _Pairs, flags: bool) -> Iterator[str]:
    if type(ours).__qualname__ != type(theirs).__qualname__:
        yield _told(place, type(ours).__name__, type(theirs).__name__)
    if not pairs.same(type(ours), type(theirs)):
        yield f"{place} is of a class {type(ours).__name__} whose code is not that of the class that is built now"
    mine, other = vars(ours), vars(theirs)
    for key in dict.fromkeys([*mine, *other]):
        derived = (
            f"{key}_orig" in ours._parameters or f"{key}_v" in ours._parameters
        )  # by weight_norm, before each forward
        if key in _TORCHS or derived or (key == "training" and not flags):
            continue
        if key not in mine or key not in other:
            yield _told(f"{place}, attribute {key!r}", *(_shown(d.get(key, _ABSENT)) for d in (mine, other)))
        elif key.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called")) and isinstance(mine[key], Mapping):
            hooks = list(mine[key].values()), list(other[key].values())  # the keys are numbers of handles
            if not pairs.same(*hooks):
                yield _told(f"{place}, {key.strip('_').replace('_', ' ')}", *map(_shown, hooks))
        elif not pairs.same(mine[key], other[key]):
            yield _told(f"{place}, attribute {key!r}", _shown(mine[key]), _shown(other[key]))


def _of_tensors(given: nn.Module, built: nn.Module, pairs: _Pairs, any_float: bool, hidden: bool) -> Iterator[str]:
    ours, theirs = tensors_of(given), tensors_of(built)
    persistent = given.state_dict().keys()
    first = (
        {id(tensor): name for name, tensor in reversed(ours.items())},
        {id(tensor): name for name, tensor in reversed(theirs.items())},
    )
    for name in (name for name in ours if name in theirs):
        mine, other = ours[name], theirs[name]
        tied = first[0][id(mine)], first[1][id(other)]
        if tied[0] != tied[1]:
            yield _told(name, *("a tensor of its own" if one == name else f"the same tensor as {one}" for one in tied))
        if mine.dtype != other.dtype and not (any_float and mine.is_floating_point() and other.is_floating_point()):
            yield _told(f"the dtype of {name}", *(str(one.dtype).removeprefix("torch.") for one in (mine, other)))
        for key in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            hooks = [list((getattr(one, key, None) or {}).values()) for one in (mine, other)]
            if not pairs.same(*hooks):
                yield _told(f"gradient hooks of {name}", *map(_shown, hooks))
        if hidden and name not in persistent and not _equal(mine, other.to(mine.dtype) if any_float else other):
            yield f"the values of buffer {name}, which no state dict carries, are not those that are built"

    ours_shared, theirs_shared = (set(overlaps(model)) for model in (given, built))
    for pair in sorted(ours_shared ^ theirs_shared):
        told = ("two tensors in the same memory", "in memory of their own")
        yield _told(f"the pair {pair[0]} and {pair[1]}", *(told if pair in ours_shared else told[::-1]))


_ABSENT = object()


def _shown(value: Any) -> str:
    if value is _ABSENT:
        return "nothing"
    if isinstance(value, Tensor | np.ndarray):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, list) and all(callable(one) for one in value):
        return " and ".join(getattr(one, "__qualname__", type(one).__name__) for one in value) or "none"
    if isinstance(value, type | types.FunctionType | types.MethodType | types.BuiltinFunctionType):
        return value.__qualname__
    text = repr(value)
    return text if len(text) <= 60 and " at 0x" not in text else f"another {type(value).__name__}"


def _told(what: str, ours: str, theirs: str) -> str:
    return f"{what} is {ours} in the registered model and {theirs} in the one that is built"


def _equal(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have one shape, one dtype and the same elements, NaN beside NaN too."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a, b.to(a.device)) or bool(
        torch.isclose(a, b.to(a.device), rtol=0, atol=0, equal_nan=True).all()
    )


class _Pairs:
    """Compares what two models hold; what was compared already, or is being compared, counts as the same."""

    def __init__(self, given: nn.Module, built: nn.Module) -> None:
        self._places = [
            {
                id(one): name
                for name, one in reversed([*tensors_of(m).items(), *m.named_modules(remove_duplicate=False)])
            }
            for m in (given, built)
        ]
        self._seen: dict[tuple[int, int], tuple[Any, Any]] = {}  # holds the objects, so that no id is used again

    def same(self, a: Any, b: Any) -> bool:
        """Whether two values are alike for a forward that reads them."""
        if a is b or (id(a), id(b)) in self._seen:
            return True
        places = self._places[0].get(id(a)), self._places[1].get(id(b))
        if places != (None, None):
            return places[0] == places[1]
        self._seen[id(a), id(b)] = a, b
        if self._alike(a, b):
            return True
        del self._seen[id(a), id(b)]
        return False

    def _alike(self, a: Any, b: Any) -> bool:
        if isinstance(a, bool | int | float | complex) and isinstance(b, bool | int | float | complex):
            return bool(a == b) or (a != a and b != b)
        if isinstance(a, type) and isinstance(b, type):
            return self._classes(a, b)
        if type(a).__qualname__ != type(b).__qualname__:
            return False
        match a:
            case Tensor():
                return _equal(a, b)
            case np.ndarray():
                return bool(a.shape == b.shape and a.tobytes() == b.tobytes())
            case str() | bytes() | None | torch.dtype() | torch.device() | types.CodeType():
                return bool(a == b)
            case Mapping():
                return self._all(list(a.items()), list(b.items()))
            case Set():
                return len(a) == len(b) and (a == b or self._all(sorted(a, key=repr), sorted(b, key=repr)))
            case Sequence():
                return self._all(a, b)
            case functools.partial():
                return self._all((a.func, a.args, a.keywords), (b.func, b.args, b.keywords))
            case types.MethodType():
                return self._all((a.__func__, a.__self__), (b.__func__, b.__self__))
            case types.FunctionType():
                return self._functions(a, b)
        return self._objects(a, b)

    def _all(self, a: Sequence[Any], b: Sequence[Any]) -> bool:
        return len(a) == len(b) and all(map(self.same, a, b))

    def _objects(self, a: Any, b: Any) -> bool:
        if isinstance(a, weakref.ref | types.ModuleType):
            return True
        if hasattr(a, "__dict__") and not callable(getattr(type(a), "__get__", None)):
            return self._classes(type(a), type(b)) and self._all(list(vars(a).items()), list(vars(b).items()))
        if slots := [name for cls in type(a).__mro__ for name in _slots(cls)]:
            values = [[getattr(one, name, None) for name in slots] for one in (a, b)]
            return self._classes(type(a), type(b)) and self._all(*values)
        # Without attributes and without an equality of its own nothing can be told apart: locks, generators.
        return vars(object)["__eq__"] is type(a).__eq__ or bool(a == b)

    def _functions(self, a: types.FunctionType, b: types.FunctionType) -> bool:
        cells = [[_cell(cell) for cell in f.__closure__ or ()] for f in (a, b)]
        return (
            _same_code(a.__code__, b.__code__)
            and self.same(a.__defaults__, b.__defaults__)
            and self.same(a.__kwdefaults__, b.__kwdefaults__)
            and self._all(*cells)
        )

    def _classes(self, a: type, b: type) -> bool:
        """Whether two classes of one name have the same code: an instance may be older than its shared cell."""
        if a is b:
            return True
        if a.__qualname__ != b.__qualname__ or len(a.__mro__) != len(b.__mro__):
            return False
        for one, other in zip(a.__mro__, b.__mro__, strict=True):
            if one is not other and not self._all(_members(one), _members(other)):
                return False
        return True


def _slots(cls: type) -> Sequence[str]:
    slots = vars(cls).get("__slots__", ()) if cls.__module__ != "builtins" else ()
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _members(cls: type) -> list[tuple[str, Any]]:
    own = {name: value for name, value in vars(cls).items() if not (name.startswith("__") and name != "__init__")}
    return [(name, getattr(value, "__func__", getattr(value, "fget", value))) for name, value in own.items()]


def _cell(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _same_code(a: types.CodeType, b: types.CodeType) -> bool:
    """Whether two functions do the same, wherever their text stands."""
    if a.co_code != b.co_code or a.co_names != b.co_names or len(a.co_consts) != len(b.co_consts):
        return False
    return all(
        _same_code(x, y) if isinstance(x, types.CodeType) and isinstance(y, types.CodeType) else x == y
        for x, y in zip(a.co_consts, b.co_consts, strict=True)
    )
