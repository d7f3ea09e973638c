"""Random state of a process as plain data: torch's and numpy's default streams, Python's, and given generators.

Beside it what objects keep by themselves: attributes, counters, streams of their own. Knows three libraries' state formats; knows
nothing of loaders or checkpoints. A plain state holds tensors, numbers and text only, so `torch.load(weights_only=True)` reads it
back and `pack` takes it.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import json
import random
import sys
import types
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from guava_nb.errors import CheckpointError
from guava_nb.random_streams import STREAMS, place_in, put_back

__all__ = ["KeptByObjects", "RandomState"]

#: Entries of a container, bytes of an array, and objects that are looked at.
_MOST_ENTRIES, _MOST_BYTES, _MOST_OBJECTS = 256, 1 << 16, 2000


@dataclass(frozen=True, slots=True)
class RandomState:
    """What `take` found; cheap to take (some 30 microseconds), turned into plain data only when it is saved."""

    torch_state: torch.Tensor
    numpy_state: Any
    python_state: Any
    stream_places: dict[str, Any]

    @classmethod
    def take(cls, streams: Mapping[str, Any]) -> RandomState:
        """The state of this moment.

        Args:
            streams: those beside the default ones, by a name that means the same when putting back.
        """
        return cls(
            torch.get_rng_state(),
            np.random.get_state(),  # the stream that data sets draw from
            random.getstate(),
            {name: place_in(stream) for name, stream in streams.items()},
        )

    def put(self, streams: Mapping[str, Any]) -> None:
        """Go back to this state; streams without a place here are left alone."""
        torch.set_rng_state(self.torch_state)
        np.random.set_state(self.numpy_state)
        random.setstate(self.python_state)
        for name, stream in streams.items():
            with contextlib.suppress(TypeError, ValueError, KeyError, RuntimeError):  # one of another kind has its name
                put_back(stream, self.stream_places.get(name))

    def to_plain(self) -> dict[str, Any]:
        """Tensors, numbers and text that hold the same."""
        kind, keys, position, has_gauss, gauss = self.numpy_state
        version, words, python_gauss = self.python_state
        return {
            "torch": self.torch_state,
            "numpy": [str(kind), torch.tensor(keys.tolist()), int(position), int(has_gauss), float(gauss)],
            "python": [version, torch.tensor(words), python_gauss],
            "generators": {name: _plain(place) for name, place in self.stream_places.items()},
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> RandomState:
        """The inverse of `to_plain`.

        Raises:
            CheckpointError: it is not what `to_plain` gives.
        """
        try:
            kind, keys, position, has_gauss, gauss = plain["numpy"]
            version, words, python_gauss = plain["python"]
            return cls(
                plain["torch"],
                (kind, np.array(keys.tolist(), dtype=np.uint32), position, has_gauss, gauss),
                (version, tuple(words.tolist()), python_gauss),
                {n: json.loads(one) if isinstance(one, str) else one for n, one in plain["generators"].items()},
            )
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise CheckpointError(f"the saved random state is damaged: {error!r}") from error

    def is_same(self, other: RandomState, leaves_out: tuple[str, ...] = ()) -> bool:
        """Whether no number was drawn between the two; streams whose name begins so do not count."""
        one, two = (state.numpy_state for state in (self, other))
        return (
            torch.equal(self.torch_state, other.torch_state)
            and self.python_state == other.python_state
            and (one[2:] == two[2:] and np.array_equal(one[1], two[1]))
            and self.stream_places.keys() == other.stream_places.keys()
            and all(
                _is_at(p, other.stream_places[n]) for n, p in self.stream_places.items() if not n.startswith(leaves_out)
            )
        )


def _plain(place: Any) -> Any:
    """A tensor, or JSON of what numpy's and Python's streams give."""
    return place if isinstance(place, torch.Tensor) else json.dumps(place, default=lambda array: array.tolist())


def _is_at(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else _plain(one) == _plain(other)


class KeptByObjects:
    """What objects keep at this moment, and what they lead to: compared with a later moment, or put back.

    Large containers and arrays are not looked into; of a large tensor it is seen that it was written into.

    Args:
        roots: the objects, by what they are called.
    """

    def __init__(self, roots: Mapping[str, object]) -> None:
        self._spaces: list[tuple[str, Any, Any]] = []
        self._globals: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._streams: dict[str, tuple[Any, Any]] = {}
        self._arrays: dict[str, tuple[Any, Any, int]] = {}
        self._seen: dict[int, object] = {}
        for name, root in roots.items():
            self._look(name, root)

    def changed_since(self, before: KeptByObjects) -> set[str]:
        """Return the names of what held something else then; streams do not count."""
        found, spaces = set[str](), {id(space): copied for _, space, copied in before._spaces}
        for name, space, now in self._spaces:
            first = spaces.get(id(space))
            if first is None:  # a new object: the attribute that holds it has changed
                continue
            if isinstance(now, dict):
                found |= {f"{name}.{key}" for key in now.keys() | first.keys() if not _is_same(now, first, key)}
            elif len(now) != len(first) or any(not _is_equal(*pair) for pair in zip(now, first, strict=True)):
                found.add(name)
        for names, written in self._globals:
            first = next((one for space, one in before._globals if space is names and one.keys() == written.keys()), {})
            found |= {key for key in first if not _is_same(written, first, key)}
        for name, (array, saved, version) in self._arrays.items():
            then = before._arrays.get(name)
            if then is not None and then[0] is array and (version != then[2] or not _holds(saved, then[1])):
                found.add(name)
        return found

    def streams(self) -> dict[str, Any]:
        """The objects' own streams of random numbers, by what leads to them."""
        return {name: stream for name, (stream, _) in self._streams.items()}

    def replaced_since(self, before: KeptByObjects) -> set[str]:
        """Return the names of what held another value then: what counts or remembers, and no cache that has filled."""
        found, then = set[str](), {id(space): copied for _, space, copied in before._spaces}
        for name, space, now in self._spaces:
            first = then.get(id(space))
            if isinstance(now, dict) and first is not None:
                found |= {f"{name}.{key}" for key in now.keys() & first.keys() if first[key] is not None}
            elif isinstance(space, deque | types.CellType):
                found.add(name)
        found |= {key for _, written in self._globals for key in written}
        return found & self.changed_since(before)

    def put_back(self) -> None:
        """Let everything be as it was at this moment."""
        for _, space, copied in self._spaces:
            if isinstance(space, dict):
                if space.keys() != copied.keys() or any(space[key] is not copied[key] for key in copied):
                    space.clear()
                    space.update(copied)
            elif isinstance(space, types.CellType):
                space.cell_contents = copied[0]
            elif list(space) != copied:
                space.clear()
                space.extend(copied)
        for names, written in self._globals:
            names.update(written)
        for stream, place in self._streams.values():
            put_back(stream, place)
        for array, saved, _ in self._arrays.values():
            if saved is not None and not _holds(array, saved):
                with torch.no_grad():
                    array[...] = saved

    def _look(self, name: str, value: Any) -> None:
        if id(value) in self._seen or len(self._seen) > _MOST_OBJECTS or isinstance(value, type | types.ModuleType):
            return
        self._seen[id(value)] = value
        if isinstance(value, STREAMS):
            self._streams[name if name not in self._streams else f"{name}.{len(self._streams)}"] = (
                value,
                place_in(value),
            )
        elif isinstance(value, torch.Tensor):
            is_small = value.numel() * value.element_size() <= _MOST_BYTES and value.layout is torch.strided
            self._arrays[name] = value, value.detach().clone() if is_small else None, value._version
        elif isinstance(value, np.ndarray):
            self._arrays[name] = value, value.copy() if value.nbytes <= _MOST_BYTES else None, 0
        else:
            for inner, part in list(self._parts(name, value)):
                self._look(inner, part)

    def _parts(self, name: str, value: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(value, dict | list | deque) and len(value) <= _MOST_ENTRIES:
            yield from self._entries(name, value)
        elif isinstance(value, types.MethodType):
            yield name, value.__self__
        elif isinstance(value, functools.partial):
            yield from ((name, one) for one in (value.func, *value.args, *value.keywords.values()))
        elif isinstance(value, types.FunctionType):
            for key, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=False):
                with contextlib.suppress(ValueError):  # nothing is in it yet
                    self._spaces.append((f"{name}.{key}", cell, [cell.cell_contents]))
                    yield f"{name}.{key}", cell.cell_contents
            names = value.__globals__
            if written := {k: names[k] for k in _written(value.__code__) if k in names}:
                self._globals.append((names, written))
                yield from written.items()
            read = {k: names[k] for k in value.__code__.co_names if k in names and k not in written}
            yield from ((k, one) for k, one in read.items() if _leads_on(one, names))
        elif hasattr(value, "__dict__"):
            yield from self._entries(name, vars(value))
            yield from ((name, one) for cls in type(value).__mro__ if _is_own(cls.__module__) for one in vars(cls).values()
                        if isinstance(one, types.FunctionType))  # fmt: skip

    def _entries(self, name: str, space: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(space, dict):
            copied: Any = dict(space)
            yield from ((f"{name}.{key}", one) for key, one in copied.items())
        else:
            copied = list(space)
            yield from (
                (f"{name}.{k}", one)
                for k, one in enumerate(copied)
                if hasattr(one, "__dict__") or isinstance(one, STREAMS)
            )
        self._spaces.append((name, space, copied))


@functools.lru_cache(maxsize=1024)
def _is_own(module: str) -> bool:
    """Whether a module is neither installed nor Python's own."""
    place = getattr(sys.modules.get(module), "__file__", None) or ""
    return "-packages" not in place and module.partition(".")[0] not in sys.stdlib_module_names


def _leads_on(value: Any, names: dict[str, Any]) -> bool:
    """Whether a global that a function reads is a stream, or a function beside it that may read one."""
    return isinstance(value, STREAMS) or (isinstance(value, types.FunctionType) and value.__globals__ is names)


@functools.lru_cache(maxsize=1024)
def _written(code: types.CodeType) -> frozenset[str]:
    """Names of globals that a function sets."""
    return frozenset(one.argval for one in dis.get_instructions(code) if one.opname == "STORE_GLOBAL")


def _is_same(now: dict[Any, Any], first: dict[Any, Any], key: Any) -> bool:
    return key in now and key in first and _is_equal(now[key], first[key])


def _is_equal(one: Any, other: Any) -> bool:
    is_plain = isinstance(one, bool | int | float | complex | str | bytes) and type(one) is type(other)
    return one is other or (is_plain and one == other)


def _holds(array: Any, saved: Any) -> bool:
    if array is None or saved is None:
        return array is saved
    return torch.equal(array, saved) if isinstance(array, torch.Tensor) else np.array_equal(array, saved)
