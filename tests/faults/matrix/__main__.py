"""Prints the matrix: `python -m tests.faults.matrix [--mode GLOB] [--phase GLOB] [--fault GLOB] [--wrong] [--jobs N]`."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections import Counter
from fnmatch import fnmatch
from pathlib import Path

from tests.support import shares

os.environ.setdefault("OMP_NUM_THREADS", "1")


def main() -> int:
    """Run the cells that were asked for, one line each; 1 where one is not as written down."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.matrix", description=__doc__)
    for name in ("mode", "phase", "fault"):
        parser.add_argument(f"--{name}", default="*", help="as a shell pattern")
    parser.add_argument("--covering", action="store_true", help="only the cells that the tests run")
    parser.add_argument("--wrong", action="store_true", help="print only what is not as written down")
    parser.add_argument("--limit", type=float, default=40.0, help="seconds after which a run counts as hanging")
    shares.add_arguments(parser)
    args = parser.parse_args()
    if args.jobs > 1 and args.share is None:
        total = shares.run_jobs("tests.faults.matrix", sys.argv[1:], args.jobs)
        shares.say_counts(total, None)
        return 1 if total["fault"] or total["share without an end"] else 0
    from tests.support import warm

    warm.install()
    os.environ["PYTHONPATH"] = str(Path(__file__).resolve().parents[3])
    from tests.faults.matrix.bench import Bench
    from tests.faults.matrix.cells import CELLS, covering

    asked = [
        cell
        for cell in (covering() if args.covering else CELLS)
        if fnmatch(cell.mode, args.mode) and fnmatch(cell.phase, args.phase) and fnmatch(cell.fault, args.fault)
    ]  # fmt: skip
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
        try:
            for cell in shares.own_share(asked, args.share):
                outcome = bench.run(cell, args.limit)
                counts[outcome.kind] += 1
                if not args.wrong or not outcome.is_right:
                    print(f"{cell} | {outcome.kind} | {outcome.seconds:.1f} s | {outcome.text[:600]}", flush=True)
        finally:
            bench.close()
    shares.say_counts(counts, args.share)
    return 1 if counts["fault"] else 0


if __name__ == "__main__":
    sys.exit(main())
