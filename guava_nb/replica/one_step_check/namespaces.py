"""Places of names that are no dictionaries of Python's own, seen as such: read by `items()`, filled by `[name] = value`."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

from torch import nn

__all__ = ["Cell", "ClassAttributes", "Slots", "Switches", "has_slots"]

#: Marks classes that were made while Python ran (Py_TPFLAGS_HEAPTYPE); others are written in C, and so are their members.
_HEAP_TYPE = 1 << 9


class Cell(dict[str, Any]):
    """A variable of the function around another one."""

    def __init__(self, name: str, cell: types.CellType) -> None:
        """Take the variable's name and the cell that holds it."""
        super().__init__({name: None})
        self._cell = cell

    def items(self) -> Any:
        """Its name and value."""
        return [(name, self._cell.cell_contents) for name in self]

    def __setitem__(self, name: str, value: Any) -> None:
        """Fill it anew."""
        self._cell.cell_contents = value


class Switches(dict[str, Any]):
    """Which parameters of a module take gradients, under one name."""

    def __init__(self, module: nn.Module) -> None:
        """Take the module."""
        super().__init__()
        self._module = module

    def items(self) -> Any:
        """Its name and value."""
        return [("requires_grad", {name: p.requires_grad for name, p in self._module.named_parameters()})]

    def __setitem__(self, _: str, value: Any) -> None:
        """Switch them back."""
        for name, parameter in self._module.named_parameters():
            parameter.requires_grad_(value[name])


class ClassAttributes(dict[str, Any]):
    """What a class has itself."""

    def __init__(self, cls: type) -> None:
        """Take the class."""
        super().__init__()
        self._class = cls

    def items(self) -> Any:
        """Names and values."""
        return list(vars(self._class).items())

    def __setitem__(self, name: str, value: Any) -> None:
        """Set one."""
        setattr(self._class, name, value)

    def __delitem__(self, name: str) -> None:
        """Take one away."""
        delattr(self._class, name)


class Slots(dict[str, Any]):
    """What an object has in the `__slots__` of its classes."""

    def __init__(self, owner: Any) -> None:
        """Take the object."""
        super().__init__(_filled_slots(owner))
        self._owner = owner

    def items(self) -> Any:
        """Names and values of those that are filled."""
        return list(_filled_slots(self._owner))

    def __setitem__(self, name: str, value: Any) -> None:
        """Fill one."""
        setattr(self._owner, name, value)

    def __delitem__(self, name: str) -> None:
        """Empty one."""
        delattr(self._owner, name)


def has_slots(value: Any) -> bool:
    """Whether an object of a class that was written in Python has slots."""
    return next(_slots(type(value)), None) is not None


def _filled_slots(owner: Any) -> Iterator[tuple[str, Any]]:
    return ((name, getattr(owner, name)) for name in _slots(type(owner)) if hasattr(owner, name))


def _slots(cls: type) -> Iterator[str]:
    for one in cls.__mro__:
        for name, found in vars(one).items():
            if isinstance(found, types.MemberDescriptorType) and one.__flags__ & _HEAP_TYPE:
                yield name
