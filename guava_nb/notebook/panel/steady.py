"""Keeps the height of a live panel: what it had room for once, it has room for until its end. Pure."""

from __future__ import annotations

from dataclasses import replace

from guava_nb.render import Table, View

__all__ = ["Steady"]

_NOTHING = "-"
_BLANK = "\u00a0"


class Steady:
    """Adds to each view the facts and the number of notes that an earlier one had; begins anew where a bar comes or goes."""

    def __init__(self) -> None:
        """Nothing was shown yet."""
        self._facts: list[str] = []
        self._num_notes, self._had_bar = 0, False

    def of(self, view: View) -> View:
        """Return the view with room for all that was there before."""
        has_bar = view.progress is not None
        if has_bar != self._had_bar:
            self._facts, self._num_notes, self._had_bar = [], 0, has_bar
        if not has_bar:
            return view
        tables = tuple(table if table.columns else self._facts_of(table) for table in view.tables)
        self._num_notes = max(self._num_notes, len(view.notes))
        notes = (*view.notes, *[_BLANK] * (self._num_notes - len(view.notes)))
        return replace(view, tables=tables, notes=notes)

    def _facts_of(self, table: Table) -> Table:
        now = {row[0]: row for row in table.rows}
        self._facts += [name for name in now if name not in self._facts]
        return replace(table, rows=tuple(now.get(name, (name, _NOTHING)) for name in self._facts))
