"""Prints the matrix: `python -m tests.faults.matrix [--mode GLOB] [--phase GLOB] [--fault GLOB] [--wrong] [--covering]`."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from fnmatch import fnmatch
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")


def main() -> int:
    """Run the cells that were asked for, one line each; 1 where one is not as written down."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.matrix", description=__doc__)
    for name in ("mode", "phase", "fault"):
        parser.add_argument(f"--{name}", default="*", help="as a shell pattern")
    parser.add_argument("--covering", action="store_true", help="only the cells that the tests run")
    parser.add_argument("--wrong", action="store_true", help="print only what is not as written down")
    parser.add_argument("--limit", type=float, default=40.0, help="seconds after which a run counts as hanging")
    args = parser.parse_args()
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
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
        try:
            for cell in asked:
                outcome = bench.run(cell, args.limit)
                counts[outcome.kind] += 1
                if not args.wrong or not outcome.is_right:
                    print(f"{cell} | {outcome.kind} | {outcome.seconds:.1f} s | {outcome.text[:600]}", flush=True)
        finally:
            bench.close()
    summary = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
    print(f"{len(asked)} cells in {time.monotonic() - started:.0f} s: {summary}")
    return 1 if counts["fault"] else 0


if __name__ == "__main__":
    sys.exit(main())
