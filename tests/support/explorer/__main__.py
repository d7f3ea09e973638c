"""Walk the configurations, print what came of each: `python -m tests.support.explorer [--limit S] [--jobs N] [word ...]`."""

from __future__ import annotations

import argparse
import functools
import sys
from collections import Counter

from tests.support import shares
from tests.support.explorer.configurations import COVERING, WHOLE
from tests.support.explorer.models import MODELS
from tests.support.explorer.search import Report, explore
from tests.support.explorer.world import walk

#: Processor time of one case, unless more is asked for.
LIMIT_S = 15.0


def _how(report: Report, runs: int) -> str:
    return f"{runs} drawn" if runs else "all" if report.complete else "time is up"


def _show(name: str, report: Report, runs: int = 0) -> None:
    print(
        f"{name:62} {_how(report, runs):>10}  states {report.states:>7,}  transitions {report.transitions:>8,}  "
        f"interleavings {report.interleavings:>22,}  {report.seconds:6.1f} s",
        flush=True,
    )
    if report.found is not None:
        print(report.found, flush=True)


def main() -> int:
    """Walk those whose name has one of the words, all without words; returns 1 when an invariant did not hold."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.explorer", description=__doc__)
    parser.add_argument("words", nargs="*", help="only cases whose name has one of these")
    parser.add_argument("--covering", action="store_true", help="only the cases that every test run walks")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds of processor time for a case")
    shares.add_arguments(parser)
    args = parser.parse_args()
    if args.jobs > 1 and args.share is None:
        total = shares.run_jobs("tests.support.explorer", sys.argv[1:], args.jobs)
        shares.say_counts(total, None)
        return 1 if total["broken"] or total["share without an end"] else 0
    cases = []
    for case in COVERING if args.covering else WHOLE:
        limit_s = case.limit_s if args.covering else args.limit
        cases.append((case.name, functools.partial(walk, case.configuration, limit_s, case.runs), case.runs))
    cases += [(name, functools.partial(explore, make, args.limit), 0) for name, make in MODELS.items()]
    asked = [case for case in cases if not args.words or any(word in case[0] for word in args.words)]
    counts: Counter[str] = Counter()
    for name, look, runs in shares.own_share(asked, args.share, 1):
        report = look()
        _show(name, report, runs)
        counts["broken" if report.found is not None else _how(report, runs)] += 1
    shares.say_counts(counts, args.share)
    return 1 if counts["broken"] else 0


if __name__ == "__main__":
    sys.exit(main())
