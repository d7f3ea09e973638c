"""Views as HTML that needs no script and no style sheet, readable on light and dark, wide and narrow pages.

Colours are the page's own: greys are half transparent, text inherits. Everything that came from outside is escaped.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

from guava_nb.render.charts import SMOOTHING, Scales, charts_of
from guava_nb.render.redact import redact
from guava_nb.render.svg import charts_html
from guava_nb.render.text import filled
from guava_nb.render.view import Progress, Table, View

__all__ = ["Charts", "lines_html", "table_html", "to_html"]

_LINE = "rgba(128,128,128,.35)"
_CELL = "padding:2px 9px 2px 0;border:0"
_LEFT = ";text-align:left"
_RIGHT = ";text-align:right"
#: What a page says of its own tables (centred, of fixed columns) does not suit these.
_TABLE = "border-collapse:collapse;margin:4px 0;table-layout:auto;font-size:inherit;font-variant-numeric:tabular-nums"
_RULE = f"border:0;border-bottom:1px solid {_LINE};background:transparent"
_LONG_CELL, _LONG_WORD = 40, 30  # characters
#: Characters of a table's row that a page of 500 pixels has room for, beside what a notebook has on its left.
_NARROW = 46
#: Lines that a cell of words takes at most.
_MOST_LINES = 3
#: The blank between a figure and its unit; an option of a command.
_UNIT = re.compile(r"(?<=\d) (?=(?:%|(?:[kMGT]i?)?B(?:/s)?|[mµn]?s|min|h|[kM]?(?:J|Wh)|W|samples/s)(?![\w/]))")
_OPTION = re.compile(r"(?<!\S)--[a-z][\w-]*")
_BAR = "rgba(70,140,90,.85)"


@dataclass(frozen=True, slots=True)
class Charts:
    """How charts are drawn.

    Attributes:
        smoothing: of noisy lines, 0 to below 1, see `charts.smoothed`.
        scales: of those drawn before; takes the new ones.
    """

    smoothing: float = SMOOTHING
    scales: Scales = field(default_factory=dict)


def to_html(
    view: View, lines: Sequence[str] = (), as_of: str = "", charts: Charts | None = None, with_charts: bool = True
) -> str:
    """The whole view as one `div`.

    Args:
        view: what is shown.
        lines: shown below it in fixed pitch.
        as_of: when this was so; the last line.
        charts: how charts are drawn; None: as of no earlier ones.
        with_charts: leave them out where a picture shows them.
    """
    head = f"<b>{_safe(view.title)}</b> {_headline(view)}"
    parts = [f'<div style="margin:2px 0">{head}</div>']
    parts += [_bar(view.progress)] if view.progress is not None else []
    if view.curve is not None and with_charts:
        charts = charts or Charts()
        parts.append(charts_html(charts_of(view.curve, charts.scales), charts.smoothing))
    parts += [table_html(table) for table in view.tables if table.rows]
    parts += [f'<div style="opacity:.8">{_whole_figures(_safe(note))}</div>' for note in view.notes]
    parts += [lines_html(lines)] if lines else []
    parts += [f'<div style="opacity:.6;margin-top:2px">{_whole_figures(_safe(as_of))}</div>'] if as_of else []
    return f'<div style="font-size:13px;line-height:1.45">{"".join(parts)}</div>'


def _headline(view: View) -> str:
    """Beside a bar each figure has room for one that is a little longer: else the line would wrap now and then."""
    if view.progress is None:
        return _safe(view.headline)
    return "".join(
        f'<span style="display:inline-block;min-width:{0.84 * -(-len(part) // 3) * 3:.1f}ch">{_safe(part)}</span> '
        for part in _with_commas(view.headline)
    )


def _with_commas(headline: str) -> list[str]:
    *parts, last = headline.split(", ")
    return [*(f"{part}," for part in parts), last]


def table_html(table: Table) -> str:
    """A table; figures stand at the right of their column. A wide one is set in pieces, which a narrow page stacks.

    Each piece begins with the first column, which tells who. What is wider than the page still gets a bar to scroll with.
    """
    right = [_is_figures(column) for column in zip(*table.rows, strict=True)] if table.columns else []
    title = f'<div style="margin-top:6px;opacity:.7">{_safe(table.title)}</div>' if table.title else ""
    pieces = "".join(
        f'<div style="overflow-x:auto">{_piece(table, columns, right)}</div>' for columns in _pieces(table)
    )
    return f'{title}<div style="display:flex;flex-wrap:wrap;gap:0 16px">{pieces}</div>'


def _pieces(table: Table) -> list[list[int]]:
    """Numbers of the columns that stand beside each other on a narrow page."""
    count = len(table.rows[0])
    if not table.columns:
        return [list(range(count))]
    widths = [max(_least_width(row[k], k == 0) for row in (table.columns, *table.rows)) + 1 for k in range(count)]
    fewest, room = filled(widths, _NARROW), _NARROW
    while room > 1 and len(filled(widths, room - 1)) == len(fewest):  # evenly full, not a last one with one column
        room -= 1
    return filled(widths, room)


def _least_width(cell: str, is_name: bool) -> int:
    """Characters that a cell takes at least: what may wrap does so between words, into a few lines."""
    if "nowrap" in _wrapping(cell, is_name):
        return len(cell)
    return max(*(min(len(word), _LONG_WORD) for word in cell.split()), -(-len(cell) // _MOST_LINES), 0)


def _piece(table: Table, columns: Sequence[int], right: Sequence[bool]) -> str:
    head = "".join(
        f'<th style="{_CELL}{_RIGHT if right and right[k] else _LEFT};opacity:.7">{_safe(table.columns[k])}</th>'
        for k in (columns if table.columns else ())
    )
    body = "".join(
        _row([row[k] for k in columns], [right[k] for k in columns] if right else [], number in table.faint)
        for number, row in enumerate(table.rows)
    )
    header = f'<thead><tr style="{_RULE}">{head}</tr></thead>' if table.columns else ""
    return f'<table style="{_TABLE}">{header}<tbody>{body}</tbody></table>'


def _row(cells: Sequence[str], right: Sequence[bool], faint: bool) -> str:
    style = f' style="{_RULE}{";opacity:.5" if faint else ""}"'
    columns = right or [False] * len(cells)
    made = "".join(
        f'<td style="{_CELL}{_RIGHT if figure else _LEFT}{_wrapping(cell, number == 0)}">{_whole_figures(_safe(cell))}</td>'
        for number, (cell, figure) in enumerate(zip(cells, columns, strict=True))
    )
    return f"<tr{style}>{made}</tr>"


def _is_figures(cells: Sequence[str]) -> bool:
    """Whether a column holds figures: numbers with units, and dashes where there is none."""
    return any(cell[:1].isdigit() for cell in cells) and all(cell[:1].isdigit() or cell == "-" for cell in cells)


def _wrapping(cell: str, is_name: bool) -> str:
    """Words may take several lines; a name stays whole, and a number with its unit."""
    if (is_name or cell[:1].isdigit()) and len(cell) <= _LONG_CELL:
        return ";white-space:nowrap"
    is_long = max(map(len, cell.split()), default=0) > _LONG_WORD
    return ";overflow-wrap:anywhere" if is_long else ""  # a path, which would make a narrow page too wide


def lines_html(lines: Sequence[str]) -> str:
    """Output of workers, unchanged but escaped."""
    text = "\n".join(_safe(line) for line in lines)
    style = f"margin:6px 0;padding:4px 8px;border-left:3px solid {_LINE};background:transparent"
    style += ";white-space:pre-wrap;overflow-wrap:anywhere"  # a line without blanks must not widen the page
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


def _whole_figures(html: str) -> str:
    """Keep a figure and its unit, and an option's two hyphens, on one line where a cell or a sentence wraps."""
    html = _UNIT.sub("\N{NO-BREAK SPACE}", html)
    return _OPTION.sub(r'<span style="white-space:nowrap">\g<0></span>', html)
