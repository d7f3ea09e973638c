"""Views as plain text, aligned in columns."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence

from guava_nb.render.redact import redact
from guava_nb.render.view import Table, View

__all__ = ["table_text", "to_text"]


def to_text(view: View) -> str:
    """The whole view without a trailing line break."""
    blocks = [": ".join(part for part in (view.title, view.headline) if part)]
    blocks += [table_text(table) for table in view.tables if table.rows]
    blocks += [_one_line(note) for note in view.notes]
    return redact("\n".join(block for block in blocks if block))


def table_text(table: Table) -> str:
    """A table with columns as wide as their content and a rule below the header."""
    header = [table.columns] if table.columns else []
    rows = [[_one_line(cell) for cell in row] for row in (*header, *table.rows)]
    widths = [max(map(_width, column)) for column in zip(*rows, strict=True)]
    lines = [_row(row, widths) for row in rows]
    if table.columns:
        lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join([f"{table.title}:", *_indent(lines)] if table.title else _indent(lines))


def _row(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(cell + " " * (width - _width(cell)) for cell, width in zip(cells, widths, strict=True)).rstrip()


def _indent(lines: Iterable[str]) -> list[str]:
    return [f"  {line}" for line in lines]


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _width(text: str) -> int:
    """Cells of a terminal: wide East Asian characters take two, combining marks none."""
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)
