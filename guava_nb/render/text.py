"""Views as plain text, aligned in columns."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence

from guava_nb.render.redact import redact
from guava_nb.render.view import Table, View

__all__ = ["WIDTH", "filled", "table_text", "to_text"]

#: Characters that a line of a table takes at most, if its columns can be set below each other.
WIDTH = 110
_GAP = "  "


def to_text(view: View) -> str:
    """The whole view without a trailing line break."""
    blocks = [": ".join(part for part in (view.title, view.headline) if part)]
    blocks += [table_text(table) for table in view.tables if table.rows]
    blocks += [_one_line(note) for note in view.notes]
    return redact("\n".join(block for block in blocks if block))


def table_text(table: Table) -> str:
    """A table with columns as wide as their content and a rule below the header; a wide one is set in pieces."""
    header = [table.columns] if table.columns else []
    rows = [[_one_line(cell) for cell in row] for row in (*header, *table.rows)]
    widths = [max(map(_width, column)) for column in zip(*rows, strict=True)]
    pieces = filled([len(_GAP) + width for width in widths], WIDTH) if table.columns else [list(range(len(widths)))]
    lines = [line for piece in pieces for line in _lines(rows, widths, piece, bool(header))]
    return "\n".join([f"{table.title}:", *_indent(lines)] if table.title else _indent(lines))


def filled(widths: Sequence[int], room: int) -> list[list[int]]:
    """Return numbers of the columns that stand beside each other; each piece begins with the first column, which tells who."""
    pieces, used = [[0]], widths[0]
    for column in range(1, len(widths)):
        if len(pieces[-1]) > 1 and used + widths[column] > room:
            pieces, used = [*pieces, [0]], widths[0]
        pieces[-1].append(column)
        used += widths[column]
    return pieces


def _lines(rows: Sequence[Sequence[str]], widths: Sequence[int], piece: Sequence[int], ruled: bool) -> list[str]:
    kept = [widths[column] for column in piece]
    lines = [_row([row[column] for column in piece], kept) for row in rows]
    if ruled:
        lines.insert(1, _GAP.join("-" * width for width in kept))
    return lines


def _row(cells: Sequence[str], widths: Sequence[int]) -> str:
    return _GAP.join(cell + " " * (width - _width(cell)) for cell, width in zip(cells, widths, strict=True)).rstrip()


def _indent(lines: Iterable[str]) -> list[str]:
    return [f"{_GAP}{line}" for line in lines]


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _width(text: str) -> int:
    """Cells of a terminal: wide East Asian characters take two, combining marks none."""
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)
