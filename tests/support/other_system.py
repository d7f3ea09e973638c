"""The package as it finds itself on Windows: what that system lacks is gone from the modules that our sources hold."""

from __future__ import annotations

import fcntl
import importlib
import os
import pkgutil
import sys
from collections.abc import Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import guava_nb
from tests.support.systems import absent

__all__ = ["as_windows"]

_ABSENT = ("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty")
_ALTERED = ("os", "signal", "select", "socket", "time", "sys", "faulthandler")


class _Lacking(ModuleType):
    """A module of Python's library without some names, and with others of its own."""

    def __init__(self, real: ModuleType, own: Mapping[str, Any]) -> None:
        super().__init__(real.__name__)
        object.__getattribute__(self, "__dict__").update(
            _real=real, _lacking=absent(real.__name__, "win32") - {"_exit"}, _own=dict(own)
        )

    def __getattribute__(self, name: str) -> Any:
        held = super().__getattribute__("__dict__")
        if name in held["_own"]:
            return held["_own"][name]
        if name in held["_lacking"]:
            raise AttributeError(f"module {held['_real'].__name__!r} has no attribute {name!r} on Windows")
        return getattr(held["_real"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        held = super().__getattribute__("__dict__")
        if name in held["_own"]:
            held["_own"][name] = value
        else:
            setattr(held["_real"], name, value)


def as_windows(monkeypatch: pytest.MonkeyPatch, **of_os: Any) -> None:
    """Have all modules of the package find Windows, until the patch is undone. `of_os`: further names of `os` there."""
    names = [name for _, name, _ in pkgutil.walk_packages(guava_nb.__path__, "guava_nb.") if "__main__" not in name]
    modules = [importlib.import_module(name) for name in names]
    own = {"os": {"name": "nt", **of_os}, "sys": {"platform": "win32"}, "socket": {"SO_EXCLUSIVEADDRUSE": 2}}
    altered = {name: _Lacking(sys.modules[name], own.get(name, {})) for name in _ALTERED}
    for module in modules:
        for name, value in list(vars(module).items()):
            if isinstance(value, ModuleType) and value.__name__ in altered:
                monkeypatch.setattr(module, name, altered[value.__name__])
            elif isinstance(value, ModuleType) and value.__name__ in _ABSENT:
                monkeypatch.setattr(module, name, None)  # each of them is imported where it may lack
    for name in _ABSENT:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "msvcrt", SimpleNamespace(LK_NBLCK=2, locking=_lock))
    # What was decided when a module was loaded. Linux refuses deadlines in the form of Windows, so there are none.
    for name, decided, value in (("transport.tcp", "_ON_WINDOWS", True), ("cluster.notices", "_CLOCK", None)):
        monkeypatch.setattr(importlib.import_module(f"guava_nb.{name}"), decided, value)


def _lock(descriptor: int, mode: int, count: int) -> None:
    assert (mode, count) == (2, 1)
    fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, count, os.lseek(descriptor, 0, os.SEEK_CUR))
