"""Walk the configurations and print what came of each: `python -m tests.support.explorer [--covering] [--limit=S] [word ...]`."""

from __future__ import annotations

import sys

from tests.support.explorer.configurations import COVERING, WHOLE
from tests.support.explorer.models import MODELS
from tests.support.explorer.search import Report, explore
from tests.support.explorer.world import walk

#: Processor time of one case, unless more is asked for.
LIMIT_S = 15.0


def _show(name: str, report: Report, runs: int = 0) -> None:
    how = f"{runs} drawn" if runs else "all" if report.complete else "time is up"
    print(
        f"{name:62} {how:>10}  states {report.states:>7,}  transitions {report.transitions:>8,}  "
        f"interleavings {report.interleavings:>22,}  {report.seconds:6.1f} s",
        flush=True,
    )
    if report.found is not None:
        print(report.found, flush=True)


def main(words: list[str]) -> int:
    """Walk those whose name has one of the words, all without words; returns 1 when an invariant did not hold."""
    wanted, cases = [word for word in words if word[0] != "-"], COVERING if "--covering" in words else WHOLE
    limit_s = next((float(word.removeprefix("--limit=")) for word in words if word.startswith("--limit=")), LIMIT_S)
    failed = 0
    for case in cases:
        if not wanted or any(word in case.name for word in wanted):
            report = walk(case.configuration, case.limit_s if "--covering" in words else limit_s, case.runs)
            _show(case.name, report, case.runs)
            failed |= report.found is not None
    for name, make in MODELS.items():
        if not wanted or any(word in name for word in wanted):
            report = explore(make, limit_s)
            _show(name, report)
            failed |= report.found is not None
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
