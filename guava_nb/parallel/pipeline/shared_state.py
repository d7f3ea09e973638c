"""What layers of several stages share beside parameters: buffers, containers, objects. A change of one never reaches the others.

Each rank has a copy of its own, so what one stage writes there another one does not read. What does not change, such as a
configuration or a table of positions, is no matter, and what is filled for the first time may be a cache.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from guava_nb.errors import ConfigError

__all__ = ["SharedState"]

#: Attributes that torch gives every module.
_TORCHS = frozenset(vars(nn.Module()))
_PLAIN = (bool, int, float, complex, str, bytes)
#: Values that are looked at in one place, one inside another, and elements of a tensor that are compared by value.
_MOST_VALUES, _DEPTH, _MOST_ELEMENTS = 256, 4, 1 << 16


class SharedState:
    """Watches what a rank's stages share with those of others.

    Args:
        stages: modules of all stages, by rank.
        rank: whose are watched.
    """

    def __init__(self, stages: Mapping[int, Sequence[nn.Module]], rank: int) -> None:
        places = {r: list(_places(modules)) for r, modules in stages.items()}
        elsewhere = {id(names[key]) for r, found in places.items() if r != rank for _, names, key in found}
        self._places = [one for one in places[rank] if id(one[1][one[2]]) in elsewhere]
        self._before: list[dict[str, Any]] = []

    def begin(self) -> None:
        """Note what is there before a batch."""
        self._before = [_content(names[key]) for _, names, key in self._places if key in names]

    def check(self) -> None:
        """Look at it after the batch.

        Raises:
            ConfigError: the forward changed what was there.
        """
        for (name, names, key), before in zip(self._places, self._before, strict=False):
            now = _content(names.get(key))
            if any(path in now and not _is_same(value, now[path]) for path, value in before.items()):
                raise ConfigError(
                    f"the forward changes {name}, which layers of several stages share, and each stage has a copy of its own: "
                    "what one writes there the others would not read. Hand it on as an output of the layer, keep these layers "
                    "in one stage (pipeline_split=, --split), or take a mode without stages"
                )


def _places(modules: Sequence[nn.Module]) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Names of what may be shared, each with the namespace and the name there."""
    for stage in modules:
        for prefix, module in stage.named_modules():
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    yield f"buffer {prefix}.{key}".replace(" .", " "), module._buffers, key
            for key, value in vars(module).items():
                if key not in _TORCHS and _can_change(value):
                    yield f"{prefix}.{key}".lstrip("."), vars(module), key


def _can_change(value: Any) -> bool:
    if isinstance(value, nn.Module | nn.Parameter | type) or callable(value):
        return False
    return isinstance(value, Tensor | list | dict | set | deque) or hasattr(value, "__dict__")


def _content(value: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    _collect(value, "", found, _DEPTH)
    return found


def _collect(value: Any, path: str, found: dict[str, Any], depth: int) -> None:
    if len(found) >= _MOST_VALUES or value is None or isinstance(value, nn.Module):
        return
    if isinstance(value, _PLAIN):
        found[path] = value
    elif isinstance(value, Tensor):
        found[path] = value.detach().clone() if value.numel() <= _MOST_ELEMENTS else (id(value), value._version)
    elif depth:
        for key, inside in _inside(value):
            _collect(inside, f"{path}.{key}", found, depth - 1)


def _inside(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, dict):
        return list(value.items())[:_MOST_VALUES]
    if isinstance(value, list | tuple | set | deque):
        return list(enumerate(value))[:_MOST_VALUES]
    return list(vars(value).items())[:_MOST_VALUES] if hasattr(value, "__dict__") else []


def _is_same(before: Any, now: Any) -> bool:
    if isinstance(before, Tensor) and isinstance(now, Tensor):
        return before.shape == now.shape and torch.equal(before, now.to(before.device))
    return type(before) is type(now) and bool(before == now)
