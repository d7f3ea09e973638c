"""Prints the table: `python -m tests.parity.programs [--program GLOB] [--mode GLOB] [--workers N] [--faults] [--jobs N]`."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from tests.support import shares

os.environ.setdefault("OMP_NUM_THREADS", "1")


def main() -> int:
    """Run the cells that were asked for, one line each; 1 where one is not right."""
    parser = argparse.ArgumentParser(prog="python -m tests.parity.programs", description=__doc__)
    parser.add_argument("--program", default="*", help="names of programs, as a shell pattern")
    parser.add_argument("--mode", default="*", help="data, relay, site, 'zero 1', 'zero 3', tensor, pipeline")
    parser.add_argument("--workers", type=int, choices=(2, 3))
    parser.add_argument("--covering", action="store_true", help="only the cells that the tests run")
    parser.add_argument("--faults", action="store_true", help="print only what is not right")
    parser.add_argument("--limit", type=float, default=30.0, help="seconds for a cell")
    parser.add_argument("--file", type=Path, help="also write JSON lines there; cells that it has are not run again")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no cell after that")
    shares.add_arguments(parser)
    args = parser.parse_args()
    if args.jobs > 1 and args.share is None:
        total = shares.run_jobs("tests.parity.programs", sys.argv[1:], args.jobs)
        shares.say_counts(total, None)
        return 1 if total["FAULT"] or total["share without an end"] else 0
    until = time.monotonic() + args.seconds
    from tests.support import warm

    warm.install()
    from tests.parity.programs.table import CELLS, Table, covering

    os.environ["PYTHONPATH"] = str(Path(__file__).resolve().parents[3])
    asked = [
        cell for cell in (covering() if args.covering else CELLS)
        if fnmatch(cell.program, args.program) and fnmatch(cell.mode, args.mode) and args.workers in (None, cell.workers)
    ]  # fmt: skip
    done = _done(args.file)
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        table = Table(Path(folder))
        for cell in shares.own_share(asked, args.share):
            if (found := done.get(str(cell))) is None:
                if time.monotonic() > until:
                    counts["not run"] += 1
                    continue
                found = asdict(table.run(cell, args.limit))
                _say(cell, found, args)
            counts[found["kind"] if found["is_right"] else "FAULT"] += 1
        table.close()
    shares.say_counts(counts, args.share)
    return 1 if counts["FAULT"] else 0


def _done(path: Path | None) -> dict[str, dict[str, Any]]:
    """What a file of an earlier part has, by cell."""
    if path is None or not path.exists():
        return {}
    return {record.pop("cell"): record for record in map(json.loads, path.read_text().splitlines())}


def _say(cell: Any, found: dict[str, Any], args: argparse.Namespace) -> None:
    verdict = "" if found["is_right"] else " FAULT"
    if not args.faults or verdict:
        print(f"{cell} | {found['kind']}{verdict} | {found['seconds']:.1f} s | {found['text'][:400]}", flush=True)
    if args.file:
        with args.file.open("a") as file:
            file.write(json.dumps({"cell": str(cell), **found}) + "\n")


if __name__ == "__main__":
    sys.exit(main())
