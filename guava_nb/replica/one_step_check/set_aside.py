"""What a check leaves as it was: the run's model, what names of the user's modules stand for, compiled modules, streams."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.nn import Parameter

from guava_nb.protocol.messages import Factory, RunSpec
from guava_nb.spec.factories import Resolve
from guava_nb.spec.own_code import is_own, users_function

__all__ = [
    "CACHE", "NO_MEMORY", "Pulled", "copied", "copying", "names_kept", "places_of_streams", "set_aside", "state_of_torch",
    "uncompiled", "whole_record", "with_places",
]  # fmt: skip

#: What a factory may note itself in.
_CONTAINERS = (list, dict, set, deque)
#: A function that `functools.lru_cache` or `functools.cache` made.
CACHE = functools._lru_cache_wrapper
_TEE: type = type(itertools.tee(())[0])
#: Iterators of Python's own from which code pulls by `next` and `for`.
_ITERATORS: tuple[type, ...] = (
    types.GeneratorType, itertools.cycle, itertools.chain, itertools.repeat, itertools.islice, _TEE, enumerate, map, filter,
    zip, type(iter([])), type(iter(())), type(iter(range(0))),
)  # fmt: skip
#: Numbers that a tensor or an array may have in order to be put back.
_MOST_NUMBERS = 1 << 20
NO_MEMORY = (torch.OutOfMemoryError, MemoryError)
#: Modules of the user's that are looked into.
_MOST_MODULES = 200


@contextlib.contextmanager
def set_aside(model: nn.Module) -> Iterator[Callable[[], bool]]:
    """Give gradients and buffers back as they were; gives what tells whether the model was used inside."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    for parameter, _ in gradients:
        parameter.grad = None

    def is_touched() -> bool:
        return any(parameter.grad is not None for parameter, _ in gradients)

    try:
        yield is_touched
    finally:
        if is_touched():
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)
        for parameter, gradient in gradients:
            parameter.grad = gradient


def copying(resolve: Resolve) -> Callable[[str], object]:
    """Find objects as the run does, but modules as copies: a criterion that is a module changes its dtype in place."""

    def find(name: str) -> object:
        found = resolve(name)
        return copy.deepcopy(found) if isinstance(found, nn.Module) else found

    return find


@contextlib.contextmanager
def names_kept(roots: Iterable[object]) -> Iterator[None]:
    """Let names and containers of the user's modules hold the same objects after as before, and tensors the same numbers.

    A factory that is called once more may note its model there, for a loss that reads its weights; the run's must stay.

    Args:
        roots: functions, classes and objects of the user's; their modules, and those that these import, are kept.
    """
    modules: dict[int, dict[str, Any]] = {}
    for root in roots:
        _find_modules(_globals_of(root), modules)
    kept = [(names, dict(names)) for names in modules.values()]
    twins = _twins_of(value for _, values in kept for value in values.values())
    classes = [one for names, _ in kept for one in names.values() if _is_of(one, names)]
    attributes = [(one, dict(vars(one))) for one in classes]
    held = [value for _, values in (*kept, *attributes) for name, value in values.items() if not name.startswith("__")]
    containers = [(value, copy.copy(value)) for value in held if type(value) in _CONTAINERS]
    unused = [value for value in held if isinstance(value, CACHE) and not sum(value.cache_info()[:2])]
    try:
        for names, values in kept:
            names.update({name: twins[id(value)].pulled for name, value in values.items() if id(value) in twins})
        with _numbers_kept(held):
            yield
    finally:
        for names, values in kept:
            values.update({name: twins[id(value)].left for name, value in values.items() if id(value) in twins})
            for name in names.keys() - values.keys():
                del names[name]
            names.update(values)
        for cache in unused:
            cache.cache_clear()
        for one, values in attributes:
            for name, value in values.items():
                if not name.startswith("__") and vars(one).get(name) is not value:
                    setattr(one, name, value)
        for value, content in containers:
            if not _holds_same(value, content):
                value.clear()
                (value.extend if isinstance(value, list | deque) else value.update)(content)


class Pulled:
    """An iterator that can be copied, and knows how many items were pulled."""

    def __init__(self, items: Iterator[Any], place: int = 0) -> None:
        self._items, self.place = items, place

    def __iter__(self) -> Pulled:
        return self

    def __next__(self) -> Any:
        item = next(self._items)
        self.place += 1
        return item

    def __deepcopy__(self, memo: Any) -> Pulled:
        return Pulled(copy.copy(self._items), self.place)


def with_places(model: nn.Module) -> nn.Module:
    """Let iterators that a model's modules keep know how far they were pulled; the model is given back."""
    for part in model.modules():
        for name, value in vars(part).items():
            if isinstance(value, _ITERATORS):
                vars(part)[name] = Pulled(itertools.tee(vars(part)[name])[0])
    return model


class _Twin:
    """An iterator, for instance a generator, from which a check may pull what the run still gets after it."""

    def __init__(self, iterator: Any) -> None:
        self._iterator: Iterator[Any] = iterator
        self._is_pulled, is_twin = False, isinstance(iterator, _TEE)  # of an earlier check
        pair: tuple[Iterator[Any], ...] = (copy.copy(iterator), iterator) if is_twin else itertools.tee(self._items())
        self.pulled, self._rest = Pulled(pair[0]), pair[1]

    def _items(self) -> Iterator[Any]:
        self._is_pulled = True
        yield from self._iterator

    @property
    def left(self) -> Iterator[Any]:
        """What goes on where the iterator stood: itself, where nothing was pulled."""
        return self._rest if self._is_pulled else self._iterator


def _twins_of(values: Iterable[Any]) -> dict[int, _Twin]:
    """Twins of those values that are iterators of Python's own, by their identity; an `itertools.count` is copied elsewhere."""
    return {id(one): _Twin(one) for one in values if isinstance(one, _ITERATORS)}


@contextlib.contextmanager
def _numbers_kept(held: Iterable[Any]) -> Iterator[None]:
    """Let tensors and arrays, also inside containers, objects and modules, have the same numbers after as before."""
    tensors, arrays = dict[int, Tensor](), dict[int, np.ndarray[Any, Any]]()
    for value in held:
        for one in _numbers_in(value):
            if isinstance(one, np.ndarray) and one.size <= _MOST_NUMBERS and one.flags.writeable:
                arrays[id(one)] = one
            elif isinstance(one, Parameter) or _is_few(one):  # a teacher that the step moves has many
                tensors[id(one)] = one
    kept = [(one, one._version, one.detach().clone()) for one in tensors.values()]
    copies = [(one, one.copy()) for one in arrays.values()]
    try:
        yield
    finally:
        for tensor, version, before in kept:
            if tensor._version != version:
                with torch.no_grad():
                    tensor.copy_(before)
        for array, content in copies:
            array[...] = content


def _numbers_in(value: Any, depth: int = 3) -> Iterator[Any]:
    """Tensors and arrays in a value: in containers and attributes of the user's objects, so many levels deep, and in modules."""
    if isinstance(value, Tensor | np.ndarray):
        yield value
    elif isinstance(value, nn.Module):
        yield from (*value.parameters(), *value.buffers())
    elif depth and isinstance(value, dict | list | tuple | deque):
        for one in list(value.values() if isinstance(value, dict) else value):
            yield from _numbers_in(one, depth - 1)
    elif depth and hasattr(value, "__dict__") and not isinstance(value, type | FunctionType | ModuleType):
        yield from _numbers_in(vars(value) if is_own(_globals_of(type(value)) or {}) else (), depth - 1)


def _is_few(one: Any) -> bool:
    return type(one) is Tensor and one.numel() <= _MOST_NUMBERS and not (one.requires_grad or one.is_inference())


def _holds_same(value: Any, content: Any) -> bool:
    if len(value) != len(content):
        return False
    pairs = zip(value.items(), content.items(), strict=True) if isinstance(value, dict) else None
    if pairs is not None:
        return all(a[0] is b[0] and a[1] is b[1] for a, b in pairs)
    return all(a is b for a, b in zip(value, content, strict=True))


def _find_modules(names: dict[str, Any] | None, found: dict[int, dict[str, Any]]) -> None:
    if names is None or id(names) in found or not is_own(names) or len(found) >= _MOST_MODULES:
        return
    if names.get("__name__") == "__main__":  # of a notebook that is a worker itself: its user may go on in it meanwhile
        return
    found[id(names)] = names
    for value in list(names.values()):
        _find_modules(_globals_of(value), found)


def _globals_of(value: object) -> dict[str, Any] | None:
    """The namespace of the module that a value is or comes from; None for what comes from none that can be told."""
    value = users_function(value)
    if isinstance(value, type(sys)):
        return vars(value)
    if hasattr(value, "__globals__"):
        return value.__globals__  # type: ignore[no-any-return]
    cls = value if isinstance(value, type) else type(value)
    module = sys.modules.get(cls.__module__)
    return None if module is None else vars(module)


def _is_of(value: Any, names: dict[str, Any]) -> bool:
    return isinstance(value, type) and value.__module__ == names.get("__name__")


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """Run compiled modules as they are written: compiling for a few samples would take minutes."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def places_of_streams() -> dict[str, Any]:
    """Where the streams of Python and NumPy are that user code draws from without torch."""
    numpys: Any = np.random.get_state()  # a tuple with an array, compared as bytes: to write it out takes milliseconds
    return {"Python's random": random.getstate(), "NumPy's random": (numpys[1].tobytes(), *numpys[2:])}


def state_of_torch(device: torch.device) -> list[bytes]:
    """Where torch's streams of random numbers are, on the CPU and on a device."""
    states = [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]
    return [state.numpy().tobytes() for state in states]


def whole_record(spec: RunSpec, precision: str) -> RunSpec:
    """The same run as one whole replica that never takes a step."""
    return replace(
        spec, precision=precision, parallel=None, sync_batchnorm=False, optimizer=Factory("SGD", {"lr": 0.0}),
        scheduler=None, optimizer_site="workers", max_grad_norm=None, metrics=(), tokens=None,
        rounds=None,
    )  # fmt: skip


def copied(model: nn.Module | None) -> nn.Module | None:
    """Copy a model; None where there is none, or it cannot be copied: then it is built once more."""
    try:
        return copy.deepcopy(model)
    except NO_MEMORY:
        raise
    except Exception:
        return None
