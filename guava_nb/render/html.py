"""Views as HTML that needs no script and no style sheet, readable on light and on dark pages.

Colours are the page's own: greys are half transparent, text inherits. Everything that came from outside is escaped.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from guava_nb.render.redact import redact
from guava_nb.render.view import Progress, Table, View

__all__ = ["lines_html", "table_html", "to_html"]

_LINE = "rgba(128,128,128,.35)"
_CELL = f"padding:2px 9px 2px 0;text-align:left;border:0;border-bottom:1px solid {_LINE};background:transparent"
_RIGHT = ";text-align:right"
#: What a page says of its own tables (centred, of fixed columns) does not suit these.
_TABLE = "border-collapse:collapse;margin:4px 0;table-layout:auto;font-size:inherit;font-variant-numeric:tabular-nums"
_LONG_CELL = 40  # characters
_BAR = "rgba(70,140,90,.85)"


def to_html(view: View, lines: Sequence[str] = ()) -> str:
    """The whole view as one `div`; `lines` are shown below it in fixed pitch."""
    head = f"<b>{_safe(view.title)}</b> {_safe(view.headline)}"
    parts = [f'<div style="margin:2px 0">{head}</div>']
    parts += [_bar(view.progress)] if view.progress is not None else []
    parts += [table_html(table) for table in view.tables if table.rows]
    parts += [f'<div style="opacity:.8">{_safe(note)}</div>' for note in view.notes]
    parts += [lines_html(lines)] if lines else []
    return f'<div style="font-size:13px;line-height:1.45">{"".join(parts)}</div>'


def table_html(table: Table) -> str:
    """A table; figures stand at the right of their column, and a page that is too narrow gets a bar to scroll with."""
    right = [_is_figures(column) for column in zip(*table.rows, strict=True)] if table.columns else []
    head = "".join(
        f'<th style="{_CELL}{_RIGHT if right and right[k] else ""};opacity:.7;font-weight:600">{_safe(name)}</th>'
        for k, name in enumerate(table.columns)
    )
    body = "".join(_row(row, right, number in table.faint) for number, row in enumerate(table.rows))
    title = f'<div style="margin-top:6px;opacity:.7">{_safe(table.title)}</div>' if table.title else ""
    header = f"<thead><tr>{head}</tr></thead>" if table.columns else ""
    return f'{title}<div style="overflow-x:auto"><table style="{_TABLE}">{header}<tbody>{body}</tbody></table></div>'


def _row(cells: Sequence[str], right: Sequence[bool], faint: bool) -> str:
    style = ' style="opacity:.5"' if faint else ""
    columns = right or [False] * len(cells)
    made = "".join(
        f'<td style="{_CELL}{_RIGHT if figure else ""}{_wrapping(cell, number == 0)}">{_safe(cell)}</td>'
        for number, (cell, figure) in enumerate(zip(cells, columns, strict=True))
    )
    return f"<tr{style}>{made}</tr>"


def _is_figures(cells: Sequence[str]) -> bool:
    """Whether a column holds figures: numbers with units, and dashes where there is none."""
    return any(cell[:1].isdigit() for cell in cells) and all(cell[:1].isdigit() or cell == "-" for cell in cells)


def _wrapping(cell: str, is_name: bool) -> str:
    """Words may take several lines; a name stays whole, and a number with its unit."""
    return ";white-space:nowrap" if (is_name or cell[:1].isdigit()) and len(cell) <= _LONG_CELL else ""


def lines_html(lines: Sequence[str]) -> str:
    """Output of workers, unchanged but escaped."""
    text = "\n".join(_safe(line) for line in lines)
    style = f"margin:6px 0;padding:4px 8px;border-left:3px solid {_LINE};background:transparent;white-space:pre-wrap"
    return f'<pre style="{style}">{text}</pre>'


def _bar(progress: Progress) -> str:
    """A bar; while the total is unknown it stays empty and only the count is told."""
    width = 100 * (progress.fraction or 0.0)
    total = "?" if progress.total is None else str(progress.total)
    label = f"{progress.done}/{total} {_safe(progress.unit)}s"
    fill = f'<div style="width:{width:.1f}%;height:8px;background:{_BAR}"></div>'
    return (
        f'<div style="display:flex;align-items:center;gap:8px"><div style="flex:1;max-width:420px;'
        f'border:1px solid {_LINE}" role="progressbar" aria-valuenow="{width:.0f}">{fill}</div>{label}</div>'
    )


def _safe(text: str) -> str:
    return escape(redact(text))
