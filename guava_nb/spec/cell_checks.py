"""What can be said about shared cells without running them.

Knows Python's grammar and pyflakes; runs nothing. `guava_nb.spec.cells` keeps the cells and builds the module.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from types import ModuleType
from typing import Any, TypeGuard

from pyflakes import messages as flake_messages
from pyflakes.checker import Checker

from guava_nb.errors import SourceError
from guava_nb.protocol.messages import Cell

__all__ = [
    "cells_behind",
    "cells_left_out",
    "check_syntax",
    "defined_names",
    "file_name",
    "needed_modules",
    "source_lines",
    "undefined_names",
]

_ASSIGNED_MAGIC = re.compile(r"^[\w.,\s]+=\s*[%!]")
_INSTALL = re.compile(r"\b(pip|conda|mamba|uv)\b.*\binstall\b")
# What a kernel adds to the built-in names. `display` exists on a worker too, the others do not.
_KERNEL_ONLY = ("get_ipython", "__IPYTHON__")


def file_name(cell: str) -> str:
    """What stands for a file name in tracebacks of a cell."""
    return f"<cell {cell!r}>"


def source_lines(text: str) -> list[str]:
    """The lines of a text as Python counts them, each with its line end."""
    return io.StringIO(text if text.endswith("\n") else text + "\n", newline=None).readlines()


def check_syntax(name: str, text: str, magic: str = "%%guava_share") -> None:
    """Compile without running.

    Raises:
        SourceError: the text is not plain Python; cell, line and reason are told, notebook syntax in one sentence.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the notebook showed them when the cell ran there
            compile(text, file_name(name), "exec", dont_inherit=True)
    except SyntaxError as error:
        line = error.lineno or 0
        lines = source_lines(text)
        source = lines[line - 1].strip() if 0 < line <= len(lines) else ""
        if _is_notebook_syntax(source):
            raise SourceError(
                f"cell {name!r}, line {line}: {source!r} is notebook syntax, which exists only in this notebook; "
                f"move it into a cell without {magic}" + _install_hint(source)
            ) from None
        way = "; call asyncio.run(...) in place of it" if error.msg == "'await' outside function" else ""
        raise SourceError(f"cell {name!r}, line {line}: {error.msg}: {source!r}{way}") from None
    except (ValueError, RecursionError, MemoryError) as error:  # a zero byte; nesting beyond the parser's limit
        raise SourceError(f"cell {name!r} cannot be compiled: {error}") from None


def _is_notebook_syntax(line: str) -> bool:
    return line.startswith(("%", "!", "?")) or line.endswith("?") or _ASSIGNED_MAGIC.match(line) is not None


def _install_hint(line: str) -> str:
    return " (%guava_pip installs on the workers)" if _INSTALL.search(line) else ""


def undefined_names(cells: Sequence[Cell]) -> Iterator[str]:
    """One sentence per use of a name that no cell has defined by then."""
    return (sentence for _, _, sentence in _undefined(cells))


def cells_left_out(cells: Sequence[Cell]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the cells that use what no cell defines, or what only such cells define, by name, why; and what they define.

    Raises:
        SourceError: another cell defines the same name as one of them, so which is meant cannot be told.
    """
    kept, found = list(cells), dict[str, str]()
    bound = {cell.name: defined_names(cell.text) for cell in cells}
    while undefined := list(_undefined(kept)):
        for cell, name, sentence in undefined:
            behind = next((one for one in found if name in bound[one]), "")
            told = f"cell {cell!r} uses {name!r} of cell {behind!r}, and {found[behind]}" if behind else sentence
            found.setdefault(cell, told)
        kept = [cell for cell in kept if cell.name not in found]
    own = {cell.name: bound[cell.name] - _imported(cell.text) for cell in cells if cell.name in found}
    for cell, told in found.items():
        if any(own[cell] & bound[other.name] for other in kept):
            raise SourceError(told)
    return found, {name: found[cell] for cell, names in own.items() for name in names}


def _imported(text: str) -> set[str]:
    statements = [one for one in ast.parse(text).body if isinstance(one, (ast.Import, ast.ImportFrom))]
    return {(alias.asname or alias.name).partition(".")[0] for one in statements for alias in one.names}


def _undefined(cells: Sequence[Cell]) -> Iterator[tuple[str, str, str]]:
    """Cell, name and sentence of each such use."""
    ends = list(accumulate(len(source_lines(cell.text)) for cell in cells))
    body = [statement for cell in _offset_trees(cells) for statement in cell.body]
    # pyflakes takes the built-in names of this process, which may be a kernel; a del in line 0 takes them out again.
    prelude = ast.increment_lineno(ast.parse(f"del {', '.join(_KERNEL_ONLY)}"), -1).body
    checker = Checker(ast.Module(body=prelude + body, type_ignores=[]), builtins={"display"})
    uses: dict[tuple[int, str], list[int]] = {}
    for message in sorted(checker.messages, key=lambda message: (message.lineno, message.col)):
        name = message.message_args[0] if message.message_args else ""
        if isinstance(message, flake_messages.ImportStarUsage):
            if _star_may_define(name, message.message_args[1]):
                continue
        elif not isinstance(message, flake_messages.UndefinedName) or message.lineno == 0:
            continue
        index = next(index for index, end in enumerate(ends) if message.lineno <= end)
        line = message.lineno - (ends[index - 1] if index else 0)
        uses.setdefault((index, name), []).append(line)
    for (index, name), lines in uses.items():
        yield cells[index].name, name, _undefined_sentence(name, cells, index, lines)


def _undefined_sentence(name: str, cells: Sequence[Cell], index: int, lines: Sequence[int]) -> str:
    several, numbers = "s" * (len(set(lines)) > 1), ", ".join(map(str, dict.fromkeys(lines)))
    used = f"name {name!r} is used in cell {cells[index].name!r} (line{several} {numbers})"
    if name in _KERNEL_ONLY:
        return f"{used} but exists only in a notebook's kernel; leave it out of %%guava_share cells"
    later = [cell.name for cell in cells[index:] if name in defined_names(cell.text)]
    if later[:1] == [cells[index].name]:
        return f"{used} before that cell defines it; move the definition up"
    if later:
        return (
            f"{used} before cell {later[0]!r} defines it; cells run in the order in which they were first shared: "
            f"put the definition into cell {cells[index].name!r} or an earlier one"
        )
    if import_line := _import_of(name):
        return f"{used} but no %%guava_share cell imports it; begin that cell with: {import_line}"
    return (
        f"{used} but no %%guava_share cell defines it; put its definition into a %%guava_share cell (sharing another text under "
        "the same --name replaces a cell)"
    )


def _import_of(name: str) -> str:
    """The line that gives a name what it stands for in this notebook or script; "" where that was not imported."""
    here = vars(sys.modules["__main__"]).get(name)
    if isinstance(here, ModuleType):
        return f"import {here.__name__}" if here.__name__ == name else f"import {here.__name__} as {name}"
    module = getattr(here, "__module__", None)
    is_imported = (
        isinstance(module, str) and module != "__main__" and getattr(sys.modules.get(module), name, None) is here
    )
    return f"from {module} import {name}" if is_imported else ""


def defined_names(text: str) -> set[str]:
    """Return the names that a cell defines at its top level: classes, functions, imports, assignments."""
    names: set[str] = set()
    for statement in ast.parse(text).body:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(statement.name)
        elif isinstance(statement, (ast.Import, ast.ImportFrom)):
            names.update((alias.asname or alias.name).partition(".")[0] for alias in statement.names)
        else:
            names.update(
                node.id
                for node in ast.walk(statement)
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
            )
    return names


def cells_behind(name: str, cells: Sequence[Cell]) -> set[str]:
    """Return the names of the cells that define a shared name and, step by step, what those use."""
    trees = {cell.name: ast.parse(cell.text) for cell in cells}
    bound = {cell.name: defined_names(cell.text) for cell in cells}
    wanted, found = {name.partition(".")[0]}, set[str]()
    while more := {cell for cell, names in bound.items() if cell not in found and names & wanted}:
        found |= more
        wanted |= {node.id for cell in more for node in ast.walk(trees[cell]) if isinstance(node, ast.Name)}
    return found


def _star_may_define(name: str, from_list: str) -> bool:
    """Whether one of the star imports gives this name, or may give it because its module is not loaded here."""
    modules = [sys.modules.get(module.strip()) for module in from_list.split(",")]
    return any(module is None or name in getattr(module, "__all__", vars(module)) for module in modules)


def _offset_trees(cells: Sequence[Cell]) -> Iterator[ast.Module]:
    """The cells' syntax trees with line numbers as if they were one text, without annotations that never run."""
    offset = 0
    for cell in cells:
        tree = ast.parse(cell.text)
        future = [statement for statement in tree.body if _is_future(statement)]
        lazy = any(alias.name == "annotations" for statement in future for alias in statement.names)
        # A __future__ line counts for its own cell only, but pyflakes would see it at work in those after it.
        tree.body = [statement for statement in tree.body if not _is_future(statement)]
        _DropAnnotations(everything=lazy).visit(tree)
        ast.increment_lineno(tree, offset)
        offset += len(source_lines(cell.text))
        yield tree


def _is_future(statement: ast.stmt) -> TypeGuard[ast.ImportFrom]:
    return isinstance(statement, ast.ImportFrom) and statement.module == "__future__"


class _DropAnnotations(ast.NodeTransformer):
    """Takes out strings in annotations, or whole annotations: pyflakes reads both as code, a running cell does not."""

    def __init__(self, everything: bool) -> None:
        self.everything = everything
        self.inside = False

    def visit(self, node: ast.AST) -> Any:
        """Visit a node, and its annotation in its own way."""
        for field in ("annotation", "returns"):
            annotation = getattr(node, field, None)
            if annotation is not None:
                nothing = ast.copy_location(ast.Constant(None), annotation)
                setattr(node, field, nothing if self.everything else self._without_strings(annotation))
        return super().visit(node)

    def _without_strings(self, annotation: ast.AST) -> Any:
        self.inside, outer = True, self.inside
        try:
            return super().visit(annotation)
        finally:
            self.inside = outer

    def visit_Constant(self, node: ast.Constant) -> ast.AST:  # noqa: N802  the name is ast's
        """Blank a string that stands in an annotation."""
        if self.inside and isinstance(node.value, str):
            return ast.copy_location(ast.Constant(None), node)
        return node


def needed_modules(statements: Iterable[ast.stmt]) -> Iterator[str]:
    """Top-level names of the modules that must be there; imports that may fail by design are left out."""
    for statement in statements:
        if isinstance(statement, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom):
            if not statement.level and statement.module and statement.module != "__future__":
                yield statement.module.partition(".")[0]
        elif not _may_fail(statement):
            for _, children in ast.iter_fields(statement):
                if isinstance(children, list):
                    yield from needed_modules(_statements_of(children))


def _statements_of(children: list[Any]) -> Iterator[ast.stmt]:
    for child in children:
        if isinstance(child, ast.stmt):
            yield child
        elif isinstance(child, (ast.ExceptHandler, ast.match_case)):
            yield from child.body


def _may_fail(statement: ast.stmt) -> bool:
    """Whether a statement is there to try an import, or for type checkers only."""
    if isinstance(statement, ast.Try):
        return any(
            handler.type is None or re.search(r"ImportError|ModuleNotFoundError|Exception", ast.unparse(handler.type))
            for handler in statement.handlers
        )
    return isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test)
