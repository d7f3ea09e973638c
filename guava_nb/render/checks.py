"""What a doctor found, as a view: one row a check, one note per thing to mend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from guava_nb.render.view import Table, View

__all__ = ["Finding", "checks_view"]


class Finding(Protocol):
    """One outcome; see `guava_nb.doctor.Check`."""

    @property
    def name(self) -> str:
        """What was checked."""

    @property
    def status(self) -> str:
        """ok, warning, fail or not tried."""

    @property
    def detail(self) -> str:
        """What is so."""

    @property
    def fix(self) -> str:
        """What to do; empty when nothing is to be done."""


def checks_view(checks: Sequence[Finding], way: Sequence[Finding] = ()) -> View:
    """Make the tables and the notes.

    Args:
        checks: of the machine.
        way: to a listener, where a join code was given.
    """
    both = [*checks, *way]
    counts = {
        status: sum(check.status == status for check in both) for status in ("ok", "warning", "fail", "not tried")
    }
    headline = f"{counts['ok']} ok, {counts['warning']} to look at, {counts['fail']} that cannot work"
    if counts["not tried"]:
        headline += f", {counts['not tried']} not tried"
    notes = tuple(f"{check.name}: {check.fix}" for check in both if check.fix)
    return View(
        "Doctor", headline, tables=(_table(checks), _table(way, "The way that the join code names")), notes=notes
    )


def _table(checks: Sequence[Finding], title: str = "") -> Table:
    rows = tuple((check.name, check.status, check.detail) for check in checks)
    return Table(("check", "status", "detail"), rows, title)
