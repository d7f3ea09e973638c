"""Shared cells: what they must be like, and the module that a machine builds from their text.

Knows source text, pyflakes and the import system; knows no worker, no notebook and no torch. The text of a cell is data
until `build_module` runs it; that happens only where someone agreed to run the orchestrator's code.
"""

from __future__ import annotations

import ast
import builtins
import difflib
import hashlib
import importlib
import inspect
import linecache
import sys
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from guava_nb.errors import CellLeftOut, SourceError
from guava_nb.protocol.messages import Cell
from guava_nb.spec.cell_checks import (
    cells_left_out,
    check_syntax,
    file_name,
    needed_modules,
    source_lines,
    undefined_names,
)
from guava_nb.spec.missing_modules import absent_part, missing_package

__all__ = ["CellError", "SourceLedger", "build_module", "cause_is_missing", "digest", "resolve"]

#: Where a module keeps what was left out of it.
_LEFT_OUT = "__guava_left_out__"


class CellError(SourceError):
    """A shared cell failed while it was run to build the module.

    Attributes:
        cell: name of the cell.
        line: line in the cell, from 1; 0 when the failure has no line there.
        missing_module: top-level name of a module that is not installed here, else "".
    """

    def __init__(self, cell: str, line: int, cause: BaseException) -> None:
        """Build the sentence from what the cell raised; chain `cause` with `raise ... from`."""
        self.cell = cell
        self.line = line
        self.missing_module = missing_package(cause)
        where = f"cell {cell!r}, line {line}" if line else f"cell {cell!r}"
        text = f"{where}: {type(cause).__name__}: {cause}"
        if self.missing_module:
            text += "; it is not installed on this machine"
        elif part := absent_part(cause):
            text += f"; {part}"
        super().__init__(text)


class SourceLedger:
    """The shared cells of one session: the newest text per name, in order of first appearance."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    def add(self, name: str, text: str) -> bool:
        """Take a cell, or the new text of one that is known.

        Args:
            name: how the cell is called in messages and tracebacks.
            text: its Python text, without the line of the cell magic.

        Returns:
            Whether anything changed.

        Raises:
            SourceError: the text is not plain Python; the ledger stays as it was.
        """
        if not name or not name.isprintable():
            raise SourceError(f"a shared cell cannot be called {name!r}: give it a name of printable characters")
        text = text.removeprefix("\ufeff")  # some editors begin a file with it
        check_syntax(name, text)
        changed = self._texts.get(name) != text
        self._texts[name] = text
        return changed

    def remove(self, name: str) -> None:
        """Forget a cell; unknown names are fine."""
        self._texts.pop(name, None)

    def cells(self) -> tuple[Cell, ...]:
        """What a worker needs to build the same module."""
        return tuple(Cell(name, text) for name, text in self._texts.items())

    def digest(self) -> str:
        """Changes when any name, text or the order changes."""
        return digest(self.cells())

    def imports(self) -> tuple[str, ...]:
        """Top-level modules that the cells need, each once, in order of appearance.

        Imports that may fail by design (`try` with an `except ImportError`, `if TYPE_CHECKING`) are left out.
        """
        found = (module for text in self._texts.values() for module in needed_modules(ast.parse(text).body))
        return tuple(dict.fromkeys(found))

    def undefined_names(self) -> tuple[str, ...]:
        """One sentence for each name that is used but that no shared cell defines in time; empty when all is well."""
        return tuple(dict.fromkeys(undefined_names(self.cells())))

    def left_out(self) -> tuple[dict[str, str], dict[str, str]]:
        """Return the cells that cannot run elsewhere, by name, and why; and likewise the names that they define.

        Raises:
            SourceError: what uses them cannot be told.
        """
        return cells_left_out(self.cells())


def digest(cells: Iterable[Cell]) -> str:
    """SHA-256 over names and texts in order; equal digests mean that a module need not be built again."""
    sha = hashlib.sha256()
    for cell in cells:
        for part in (cell.name, cell.text):
            raw = part.encode("utf-8", "surrogatepass")
            sha.update(len(raw).to_bytes(8, "little") + raw)
    return sha.hexdigest()


# ---------------------------------------------------------------------------------------------------------- the module


def build_module(
    cells: Sequence[Cell], module_name: str = "guava_shared", left_out: Mapping[str, str] | None = None
) -> types.ModuleType:
    """Run the cells, in order, in one fresh module.

    Nothing of an earlier module of this name is kept, so names that a changed cell no longer defines are gone.
    `__name__` is `module_name`: what a cell guards with `if __name__ == "__main__"` does not run. Where there is no
    notebook, `display` writes the representation of its arguments.

    Args:
        cells: the whole ledger.
        module_name: under which the module is put into `sys.modules`.
        left_out: names that cells define that are not among these, and why they are not: `resolve` tells it.

    Raises:
        CellError: a cell raised; the exception is its `__cause__`, and `sys.modules` is as it was.
        SourceError: a cell is not plain Python.
    """
    module = types.ModuleType(module_name)
    module.__file__ = f"<{module_name}>"
    if left_out:
        module.__dict__[_LEFT_OUT] = dict(left_out)
    if not hasattr(builtins, "display"):
        module.__dict__["display"] = _write_representation
    # Functions look their text up by their cell's name, classes by their module's file: both are filled.
    _remember_lines(module.__file__, [line for cell in cells for line in source_lines(cell.text)])
    before = sys.modules.get(module_name)
    sys.modules[module_name] = module
    try:
        _run_cells(cells, module)
    except BaseException:
        if before is None:
            del sys.modules[module_name]
        else:
            sys.modules[module_name] = before
        raise
    return module


def resolve(name: str, module: types.ModuleType | None) -> Any:
    """The object behind a name that a user gave.

    Args:
        name: a name from the shared cells ("Net", "Net.small"), or "package.module:name" for something installed.
        module: what `build_module` gave; None when nothing is shared.

    Raises:
        SourceError: there is no such thing; near names are told.
    """
    package, colon, path = name.partition(":")
    if colon:
        if package and not all(part.isidentifier() for part in package.split(".")):
            shown = name.splitlines()[0][:40]
            raise SourceError(
                f"{shown!r} is not a name: give one from the shared cells (the class, not an object of it), or "
                "package.module:name"
            )
        try:
            module = importlib.import_module(package)
        except Exception as error:  # importing runs code that may raise anything
            missing, part = missing_package(error), absent_part(error)
            advice = f"{missing!r} is not installed on this machine" if missing else part
            said = "; ".join(filter(None, [f"{type(error).__name__}: {error}", advice]))
            raise SourceError(f"{name!r} cannot be imported: {said}") from error
    else:
        path = name
    found: Any = module
    for part in path.split("."):
        if found is module and (why := getattr(module, _LEFT_OUT, {}).get(part)):
            raise CellLeftOut(f"{name!r} cannot be used: {why}")
        if found is None or not hasattr(found, part) or part.startswith("__"):
            raise SourceError(_not_found(name, part, found, package if colon else ""))
        found = getattr(found, part)
    return found


def cause_is_missing(error: BaseException) -> str:
    """The module whose absence caused this error, "" when it was something else."""
    named = str(getattr(error, "missing_module", ""))
    for link in (error, error.__cause__):
        named = named or missing_package(link)
    return named


def _run_cells(cells: Iterable[Cell], module: types.ModuleType) -> None:
    placed: dict[int, type] = {}
    first_line = 0
    for cell in cells:
        check_syntax(cell.name, cell.text)
        name, lines = file_name(cell.name), source_lines(cell.text)
        _remember_lines(name, lines)
        try:
            exec(compile(cell.text, name, "exec", dont_inherit=True), module.__dict__)
        except (Exception, SystemExit) as error:
            raise CellError(cell.name, _line_in(error, name), error) from error
        for value in list(vars(module).values()):
            _place_class(value, module.__name__, first_line, placed)
        first_line += len(lines)


def _place_class(value: Any, module_name: str, first_line: int, placed: dict[int, type]) -> None:
    """Let a new class point to its place in the module's text: from Python 3.13 on a class keeps its line number."""
    if not inspect.isclass(value) or value.__module__ != module_name or id(value) in placed:
        return
    placed[id(value)] = value
    if "__firstlineno__" in vars(value):
        type.__setattr__(value, "__firstlineno__", vars(value)["__firstlineno__"] + first_line)
    for member in list(vars(value).values()):
        _place_class(member, module_name, first_line, placed)


def _remember_lines(name: str, lines: list[str]) -> None:
    # A modification time of None tells linecache that there is no file to compare with.
    linecache.cache[name] = (sum(map(len, lines)), None, lines, name)


def _write_representation(*values: Any, **_options: Any) -> None:
    """Stand-in for IPython's display on a worker; the text goes where prints go."""
    for value in values:
        sys.stdout.write(f"{value!r}\n")


def _not_found(name: str, part: str, owner: Any, package: str) -> str:
    if owner is None:
        return f"{name!r} is not known: nothing is shared yet; define it in a %%guava_share cell"
    place = f"module {package!r}" if package else "the shared cells"
    found = vars(owner).items() if hasattr(owner, "__dict__") else ()
    names = [name for name, one in found if not name.startswith("_") and not inspect.ismodule(one)]
    near = difflib.get_close_matches(part, names, n=3)
    if near:
        return f"{name!r} is not in {place}; did you mean {' or '.join(map(repr, near))}?"
    return f"{name!r} is not in {place}" + ("" if package else "; define it in a %%guava_share cell")


def _line_in(error: BaseException, name: str) -> int:
    """The innermost line of the cell on the way to where it raised."""
    line, trace = 0, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == name:
            line = trace.tb_lineno
        trace = trace.tb_next
    return line
