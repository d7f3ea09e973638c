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
        """ok, -, warning, fail or not tried."""

    @property
    def detail(self) -> str:
        """What is so."""

    @property
    def fix(self) -> str:
        """What to do; empty when nothing is to be done."""


def checks_view(checks: Sequence[Finding], way: Sequence[Finding] = ()) -> View:
    """Make the tables and the notes: what was asked for first, and what is amiss before what is in order.

    Args:
        checks: of the machine.
        way: to a listener, where a join code was given.
    """
    both = [*way, *checks]
    counts = {
        status: sum(check.status == status for check in both) for status in ("ok", "warning", "fail", "not tried")
    }
    headline = f"{counts['ok']} ok, {counts['warning']} to look at, {counts['fail']} that cannot work"
    if counts["not tried"]:
        headline += f", {counts['not tried']} not tried"
    notes = tuple(f"{check.name}: {check.fix}" for check in both if check.fix)
    if not way:
        return View("Doctor", headline, tables=(_table(checks),), notes=notes)
    tables = (_table(way, "The way that the join code names"), _amiss(checks))
    return View("Doctor", f"{_verdict(way)}; {headline}", tables=tables, notes=notes)


def _verdict(way: Sequence[Finding]) -> str:
    """Whether one can join, in words."""
    broken = next((check.name for check in way if check.status == "fail"), None)
    return "a worker can join from here" if broken is None else f"no worker can join from here: {broken} fails"


def _amiss(checks: Sequence[Finding]) -> Table:
    """This machine in short, where it was not what one asked about."""
    amiss = [check for check in checks if check.status in ("warning", "fail")]
    told = _table(amiss, "This machine")
    rest = f"{len(checks) - len(amiss)} more checks; without a join code each of them is shown"
    return Table(told.columns, (*told.rows, ("the rest", "ok", rest)), told.title)


def _table(checks: Sequence[Finding], title: str = "") -> Table:
    rows = tuple((check.name, check.status, check.detail) for check in checks)
    return Table(("check", "status", "detail"), rows, title)
