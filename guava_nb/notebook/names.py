"""Names for shared cells."""

from __future__ import annotations

import ast
import hashlib
from typing import Any

__all__ = ["cell_name", "defined_names"]


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


def defined_names(text: str) -> set[str]:
    """Names that a cell defines at its top level: classes, functions, imports, simple assignments."""
    names: set[str] = set()
    for statement in ast.parse(text).body:
        if isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(statement.name)
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            names.update((alias.asname or alias.name).partition(".")[0] for alias in statement.names)
        else:
            names.update(n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
    return names


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
