"""Which code is the user's own: written for this work, and not installed with a package.

Knows where Python keeps installed code; knows nothing of runs.
"""

from __future__ import annotations

import functools
import sysconfig
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["is_own", "users_function"]

_INSTALLED = ("site-packages", "dist-packages")


def is_own(names: Mapping[str, Any]) -> bool:
    """Whether the namespace of a module is that of a user's file, shared cell or notebook."""
    module, place = names.get("__name__") or "", names.get("__file__")
    if not module or module == "builtins" or module.partition(".")[0] == "guava_nb":
        return False
    return place is None or _is_users(str(place))


def users_function(value: Any) -> Any:
    """Take off bound arguments and what installed code wraps around a function (`torch.no_grad`, `functools.cache`)."""
    while True:
        if isinstance(value, functools.partial):
            value = value.func
        elif isinstance(value, types.MethodType):
            value = value.__func__
        elif "__wrapped__" in getattr(value, "__dict__", ()) and not is_own(getattr(value, "__globals__", {})):
            value = value.__wrapped__
        else:
            return value


@functools.lru_cache(maxsize=4096)
def _is_users(place: str) -> bool:
    path = Path(place)
    if place.startswith("<"):  # shared cells
        return True
    library = {Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")}
    return not (set(path.parts) & set(_INSTALLED)) and library.isdisjoint(path.parents)
