"""Names of dataclasses and namedtuples, and how a receiver finds the class again.

Knows `sys.modules` and how to tell the two kinds of class; imports nothing and calls no code of the class found.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from guava_nb.errors import ConfigError

__all__ = ["Resolve", "class_name", "class_resolver", "imported_class", "is_dataclass_type", "is_namedtuple_type"]

Resolve = Callable[[str], type]

#: Modules whose classes stem from a notebook: the kernel's own, and the one a worker builds from shared cells.
NOTEBOOK_MODULES = ("__main__", "guava_shared")


def is_namedtuple_type(cls: type) -> bool:
    """Whether a class was made by `collections.namedtuple` or `typing.NamedTuple`, or derives from such a one."""
    return issubclass(cls, tuple) and isinstance(getattr(cls, "_fields", None), tuple)


def is_dataclass_type(cls: type) -> bool:
    """Whether a class is a dataclass and nothing else; one that is a dict or list too would lose that half."""
    return dataclasses.is_dataclass(cls) and not issubclass(cls, (dict, list, tuple, set, frozenset, str, bytes, int))


def class_name(cls: type) -> str:
    """How a class travels: "module:qualname"."""
    return f"{cls.__module__}:{cls.__qualname__}"


def imported_class(name: str) -> type:
    """The dataclass or namedtuple of this name in a module that is already imported.

    Raises:
        ConfigError: the module is not imported, has no such class, or the class is of another kind.
    """
    module_name, _, qualname = name.partition(":")
    return _find(sys.modules.get(module_name), qualname, name)


def class_resolver(shared: ModuleType | None) -> Resolve:
    """A `resolve` for `unpack` that finds classes of shared cells in `shared`, all others by `imported_class`.

    A class typed into a notebook is `__main__:Batch` there and lives in the module built from shared cells here.

    Args:
        shared: where classes of a notebook are; None when there is no such module.
    """

    def resolve(name: str) -> type:
        module_name, _, qualname = name.partition(":")
        if shared is not None and module_name in NOTEBOOK_MODULES:
            return _find(shared, qualname, name)
        return imported_class(name)

    return resolve


def _find(module: ModuleType | None, qualname: str, name: str) -> type:
    found: Any = module
    for part in qualname.split("."):
        # vars() and not getattr: a module's __getattr__ may import.
        found = vars(found).get(part) if isinstance(found, (ModuleType, type)) else None
    if not isinstance(found, type):
        raise ConfigError(
            f"a batch holds a {qualname} of module {name.partition(':')[0]}, which is not known here: define it in a "
            "%%guava_share cell, or import its module in one"
        )
    if not (is_namedtuple_type(found) or is_dataclass_type(found)):
        raise ConfigError(f"a batch names the class {name}, which is neither a dataclass nor a namedtuple here")
    return found
