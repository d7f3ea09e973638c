"""`guava doctor`: checks this machine and says how to mend what is amiss. Status 1 when something cannot work."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from guava_nb.doctor import Check, exit_status, run_checks
from guava_nb.render.text import to_text
from guava_nb.render.view import Table, View

__all__ = ["add_command", "checks_view"]


def add_command(commands: Any) -> None:
    """Declare the subcommand."""
    parser = commands.add_parser("doctor", help="check this machine", description=__doc__)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Check and show."""
    checks = run_checks()
    print(to_text(checks_view(checks)))
    return exit_status(checks)


def checks_view(checks: Sequence[Check]) -> View:
    """Make the table, and one note per thing to mend."""
    rows = tuple((check.name, check.status, check.detail) for check in checks)
    notes = tuple(f"{check.name}: {check.fix}" for check in checks if check.fix)
    counts = {status: sum(check.status == status for check in checks) for status in ("ok", "warning", "fail")}
    headline = f"{counts['ok']} ok, {counts['warning']} to look at, {counts['fail']} that cannot work"
    return View("Doctor", headline, tables=(Table(("check", "status", "detail"), rows),), notes=notes)
