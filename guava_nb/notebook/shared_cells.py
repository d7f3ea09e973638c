"""The cells that a notebook shares: run here first, kept while no session is open, checked before a run."""

from __future__ import annotations

import argparse
import ast
import hashlib
import inspect
import sys
from typing import Any

from IPython.core.error import UsageError

from guava_nb.errors import GuavaError
from guava_nb.notebook.line_words import near
from guava_nb.protocol.messages import Cell
from guava_nb.spec.cell_checks import check_syntax, defined_names, undefined_names
from guava_nb.spec.missing_modules import absent_part, missing_package
from guava_nb.spec.training_options import option_infos

__all__ = ["SharedCells", "cell_name"]


class SharedCells:
    """Names and texts of the shared cells of a notebook. Every `orchestrator` is None while no session is open."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._cells: dict[str, tuple[str, bool]] = {}

    @property
    def _texts(self) -> dict[str, str]:
        return {name: text for name, (text, with_workers) in self._cells.items() if with_workers}

    def share(self, given_name: str | None, text: str, orchestrator: Any, with_workers: bool = True) -> str:
        """Run a cell here and share it; without a session it waits for one. Returns its name.

        Args:
            with_workers: else a background session gets it, and no worker.

        Raises:
            UsageError: the cell failed here.
            SourceError: the cell cannot run elsewhere; it did not run here either.
        """
        name = cell_name(given_name, self._shell, text)
        if with_workers:
            check_syntax(name, text)
        result = self._shell.run_cell(text)
        if not result.success:
            error = result.error_before_exec or result.error_in_exec
            raise UsageError(
                f"cell {name} is not shared: it failed here with {type(error).__name__}{_install_hint(error)}"
            )
        if orchestrator is not None and with_workers:
            orchestrator.share(text, name=name)
        self._cells[name] = text, with_workers
        return name

    def texts(self) -> dict[str, tuple[str, bool]]:
        """Each cell's text by its name, and whether workers get it, too."""
        return dict(self._cells)

    def drop(self, name: str) -> None:
        """Know a cell no longer; one that is not known is fine."""
        self._cells.pop(name, None)

    def forget(self, name: str, orchestrator: Any) -> None:
        """Share a cell no longer, from the next run on.

        Raises:
            UsageError: no cell has this name.
        """
        if name not in self._cells:
            known = ", ".join(self._cells) or "none"
            raise UsageError(
                f"--forget {name}: no shared cell is called so{near(name, self._cells) or '.'} Shared: {known}"
            )
        if orchestrator is not None:
            orchestrator.unshare(name)
        self.drop(name)

    def share_all(self, orchestrator: Any) -> list[str]:
        """Share what was shared before the session opened; one that is refused must not keep the session from opening."""
        notes = []
        for name, text in self._texts.items():
            try:
                orchestrator.share(text, name=name)
            except GuavaError as error:
                notes.append(f"Cell {name} is not shared: {error}")
        return notes

    def names(self) -> list[str]:
        """How the shared cells are called."""
        return list(self._cells)

    def defined(self) -> list[str]:
        """What shared cells define, by name."""
        return sorted({name for text in self._texts.values() for name in defined_names(text)})

    def undefined(self, name: str) -> list[str]:
        """Sentences on names that a shared cell uses and no shared cell defines so far."""
        return [text for text in undefined_names([Cell(n, t) for n, t in self._texts.items()]) if repr(name) in text]

    def check(self, args: argparse.Namespace) -> None:
        """Catch the commonest slip: a name that exists in this notebook, in a cell that was not shared.

        Raises:
            UsageError: the option, and what to do.
        """
        shared = self.defined()
        for option in ("model", *(info.flag for info in option_infos() if info.kind == "name")):
            name = getattr(args, option, None)
            here = self._shell.user_ns.get(name) if name and name not in shared else None
            if here is not None and inspect.getmodule(here) is sys.modules.get("__main__"):
                raise UsageError(
                    f"--{option} {name}: it exists in this notebook, but in no shared cell: put %%guava_share on top of the "
                    "cell that defines it and run that cell"
                )


def _install_hint(error: BaseException) -> str:
    """What to do where a module is not there; "" for other errors."""
    if part := absent_part(error):
        return f": {part}"
    missing = missing_package(error)
    return missing and (
        f": where {missing} is a package, %pip install {missing} installs it here and %guava_pip {missing} at the workers; where "
        "it is a file of yours, run the notebook in its folder"
    )


def cell_name(given: str | None, shell: Any, text: str) -> str:
    """The name under which a cell is shared, stable over re-runs of the cell.

    The user's own name comes first; then the front end's cell id, which survives edits; then the first thing the cell
    defines, since kernels under test are not told of ids; at last a digest of the text.
    """
    return (
        given or _cell_id(shell) or _first_definition(text) or f"cell-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    )


def _cell_id(shell: Any) -> str:
    """What the front end calls the running cell; empty outside a kernel and where front ends do not tell."""
    parent = getattr(shell, "parent_header", None) or {}
    metadata = parent.get("metadata", {}) if isinstance(parent, dict) else {}
    return str(metadata.get("cellId") or metadata.get("cell_id") or "")


def _first_definition(text: str) -> str:
    try:
        body = ast.parse(text).body
    except SyntaxError:
        return ""
    for statement in body:
        if isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            return statement.name
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            return statement.targets[0].id
    return ""
