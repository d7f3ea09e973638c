"""Which parameters a forward, a loss or a step writes into: by `.data`, in place, or as `nn.Embedding(max_norm=...)` does.

Knows tensors; knows no batch and no step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from guava_nb.parallel.unloaded import spare_compiler

__all__ = ["ParameterWrites"]


class ParameterWrites(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what is written while it is entered; what writes nothing yet, a clamp that changes no value, counts too.

    Args:
        named: parameters by name.
    """

    def __init__(self, named: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        spare_compiler(type(self).__torch_dispatch__)
        self._named = dict(named)
        self._first = {name: parameter.data for name, parameter in self._named.items()}
        self._by_memory: dict[int, list[str]] = {}
        for name, value in self._first.items():
            self._by_memory.setdefault(value.untyped_storage().data_ptr(), []).append(name)
        self._saved, self._moved = dict[str, Tensor](), set[str]()
        self._depth, self._inside = 0, set[str]()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation; what it is about to write into is copied first."""
        words = dict(kwargs or {})
        if func._schema.is_mutable:
            for tensor in _written_by(func, args, words):
                for name in self._by_memory.get(tensor.untyped_storage().data_ptr(), ()):
                    if self._depth:
                        self._inside.add(name)
                    if name not in self._saved:
                        self._saved[name] = self._first[name].clone()
        return func(*args, **words)

    def watch(self, model: nn.Module) -> None:
        """Tell what is written while a module of this model computes from what is written between."""
        for module in model.modules():
            module.register_forward_pre_hook(lambda *_: self._enter())
            module.register_forward_hook(lambda *_: self._leave(), always_call=True)

    def _enter(self) -> None:
        self._depth += 1

    def _leave(self) -> None:
        self._inside.update(name for name in self._given_memory() if self._depth)
        self._depth -= 1

    @property
    def inside(self) -> tuple[str, ...]:
        """Those of `names` that a module wrote while it computed."""
        return tuple(name for name in self.names if name in self._inside)

    def _given_memory(self) -> list[str]:
        return [name for name, value in self._first.items() if self._named[name].data_ptr() != value.data_ptr()]

    @property
    def names(self) -> tuple[str, ...]:
        """Parameters that were written into, or were given other memory, since this was made."""
        self._moved.update(self._given_memory())
        return tuple(name for name in self._named if name in self._saved or name in self._moved)

    def values(self) -> dict[str, Tensor]:
        """Return copies of what `names` hold, each of its parameter's shape."""
        return {name: self._named[name].detach().clone() for name in self.names}

    def restore(self) -> None:
        """Make all of them what they were at first."""
        for name in self.names:
            self._named[name].data = self._first[name]
            if name in self._saved:
                self._named[name].data.copy_(self._saved[name])


def _written_by(func: Callable[..., Any], args: Sequence[Any], words: Mapping[str, Any]) -> Iterator[Tensor]:
    """Give the tensors, of any shape, that a call of an operator writes, by the operator's schema."""
    for place, argument in enumerate(func._schema.arguments):  # type: ignore[attr-defined]
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else words.get(argument.name)
            for one in value if isinstance(value, list | tuple) else [value]:
                if isinstance(one, Tensor) and one.layout is torch.strided:
                    yield one
