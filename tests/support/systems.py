"""What of Python's own library is on Linux and not elsewhere, by the stubs that mypy brings, and where our sources use it."""

from __future__ import annotations

import ast
import functools
import importlib.util
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

__all__ = ["OTHER_MEANING", "SYSTEMS", "absent", "nodes_of", "uses"]

#: As `sys.platform` names them.
SYSTEMS = ("win32", "darwin")

#: There everywhere, and on Windows something else: it ends processes, knows no modes, waits for sockets only, ...
OTHER_MEANING = frozenset(
    {
        "os.chmod", "os.kill", "os.link", "os.symlink", "os.replace", "os.rename", "select.select", "signal.SIGINT",
        "signal.SIGTERM", "socket.SO_REUSEADDR", "socket.socketpair", "socket.AF_UNIX", "mode=", "start_new_session=",
        "preexec_fn=", "pass_fds=", ".terminate()", ".send_signal()", "multiprocessing.get_all_start_methods",
    }
)  # fmt: skip
_KEYWORDS = ("start_new_session", "preexec_fn", "pass_fds")
_METHODS = ("terminate", "send_signal")
_ROOTS = ("/proc", "/dev", "/sys/", "/etc", "/tmp", "/var", "/run")
_MODED = frozenset({"mkdir", "chmod", "open"})


# ------------------------------------------------------------------------------------------------------- what is where


@functools.cache
def absent(module: str, system: str) -> frozenset[str]:
    """Return the names of a module of Python's library that Linux has and this system has not."""
    return frozenset(_names(module, "linux") - _names(module, system))


@functools.cache
def _names(module: str, system: str) -> frozenset[str]:
    return frozenset(_defined(_body(module), system))


@functools.cache
def _is_empty(module: str, system: str) -> bool:
    body = [one for one in _body(module) if not isinstance(one, ast.Import | ast.ImportFrom)]
    return all(name.startswith("_") for name in _defined(body, system))


@functools.cache
def _body(module: str) -> list[ast.stmt]:
    path = _stub(module)
    return [] if path is None else ast.parse(path.read_text(encoding="utf-8")).body


def _stub(module: str) -> Path | None:
    found = importlib.util.find_spec("mypy")
    assert found is not None and found.origin is not None, "mypy brings the stubs"
    base = Path(found.origin).parent / "typeshed" / "stdlib" / Path(*module.split("."))
    return next((one for one in (base.with_suffix(".pyi"), base / "__init__.pyi") if one.exists()), None)


def _defined(body: list[ast.stmt], system: str) -> Iterator[str]:
    for one in body:
        if isinstance(one, ast.If):
            yield from _defined(one.body if _holds(one.test, system) else one.orelse, system)
        elif isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield one.name
        elif isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
            yield one.target.id
        elif isinstance(one, ast.Assign):
            yield from (target.id for target in one.targets if isinstance(target, ast.Name))
        elif isinstance(one, ast.ImportFrom) and any(alias.name == "*" for alias in one.names):
            yield from _names(one.module or "", system)
        elif isinstance(one, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in one.names)


def _holds(test: ast.expr, system: str) -> bool:
    """Whether a condition of a stub holds there, on this version of Python."""
    made = eval(
        compile(ast.Expression(test), "stub", "eval"),
        {"sys": _System(system), "TYPE_CHECKING": True},
    )
    return bool(made)


class _System:
    version_info = sys.version_info
    implementation = sys.implementation

    def __init__(self, platform: str) -> None:
        self.platform = platform


# ------------------------------------------------------------------------------------------------ what our sources use


@functools.cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """Return all nodes of a file's syntax tree."""
    return tuple(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


@functools.cache
def uses(path: Path) -> frozenset[str]:
    """Return what a file uses that another system lacks, or has with another meaning, as "os.fork", "mode=", "/proc"."""
    nodes, found = nodes_of(path), set[str]()
    modules = _imported(nodes, found)
    for node in nodes:
        found.update(_of_node(node, modules))
    return frozenset(filter(_differs, found))


def _imported(nodes: Iterable[ast.AST], found: set[str]) -> dict[str, str]:
    """Return the modules by the names that they have there; adds what is imported from one to `found`."""
    modules: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                modules[alias.asname or alias.name.split(".")[0]] = alias.name
                found.add(alias.name)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return modules


def _of_node(node: ast.AST, modules: dict[str, str]) -> Iterator[str]:
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
        yield f"{modules[node.value.id]}.{node.attr}"
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith(_ROOTS):
        yield "/" + node.value.split("/")[1]
    elif isinstance(node, ast.Call):
        yield from (f"{word.arg}=" for word in node.keywords if word.arg in _KEYWORDS)
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in _METHODS:
            yield f".{name}()"
        if name in ("getattr", "hasattr") and len(node.args) > 1 and isinstance(node.args[0], ast.Name):
            named = node.args[1]
            if node.args[0].id in modules and isinstance(named, ast.Constant):
                yield f"{modules[node.args[0].id]}.{named.value}"
        given = [*node.args, *(word.value for word in node.keywords if word.arg == "mode")]
        if name in _MODED and any(
            isinstance(one, ast.Constant) and type(one.value) is int and one.value > 7 for one in given
        ):
            yield "mode="


@functools.cache
def _differs(name: str) -> bool:
    if name in OTHER_MEANING or name.startswith("/"):
        return True
    module, _, attribute = name.rpartition(".")
    if not module:  # by itself: it is not there where its stub has nothing but what it imports
        return not _is_empty(name, "linux") and any(_is_empty(name, system) for system in SYSTEMS)
    return any(attribute in absent(module, system) for system in SYSTEMS)
