"""What a person waits for `guava demo`, alone and beside busy programs, on two cores.

Prints one JSON line for each measure and tree: `wall_s` from the command to its end, `processor_s` of all its processes,
`train_s` as the demo itself shows it; all medians. With `--base` the same command of another checkout runs in turn with this
one, round by round, and `ratio` is the median of the rounds' ratios of wall times, this tree over the other. The last line is
the wall time beside busy programs over that alone; reach: <= 4.

    python -m tests.benchmarks.demo [--rounds 5] [--base FOLDER] [--busy 2] [--cores 2]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@contextlib.contextmanager
def busy_programs(count: int) -> Iterator[None]:
    """Programs that compute beside the block and never wait."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def demo(tree: Path) -> dict[str, float]:
    """Seconds of one demo: of the clock, of processors, and of its training."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        subprocess.run(
            [sys.executable, "-m", "guava_nb", "demo", "--report", str(report)],
            cwd=tree, env={**os.environ, "PYTHONPATH": str(tree)}, stdout=subprocess.DEVNULL, check=True,
        )  # fmt: skip
        wall_s, after = time.monotonic() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
        used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return {"wall_s": wall_s, "processor_s": used, "train_s": json.loads(report.read_text())["wall_s"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--base", type=Path, help="another checkout, measured in turn")
    parser.add_argument("--busy", type=int, default=2, help="busy programs")
    parser.add_argument("--cores", type=int, default=2, help="that all of it may use")
    args = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.cores])
    trees = {"here": ROOT, **({"base": args.base.resolve()} if args.base else {})}
    demo(ROOT)  # bytecode is written, files come into memory
    seen: dict[tuple[str, int], list[dict[str, float]]] = {
        (name, busy): [] for busy in (0, args.busy) for name in trees
    }
    for _ in range(args.rounds):
        for (name, busy), found in seen.items():
            with busy_programs(busy):
                found.append(demo(trees[name]))
    for (name, busy), found in seen.items():
        medians = {key: round(statistics.median(one[key] for one in found), 3) for key in found[0]}
        line = {"benchmark": "demo", "tree": name, "busy": busy, **medians, "rounds": args.rounds}
        if name == "here" and args.base:
            pairs = zip(found, seen["base", busy], strict=True)
            line["ratio"] = round(statistics.median(a["wall_s"] / b["wall_s"] for a, b in pairs), 3)
        print(json.dumps(line), flush=True)
    for name in trees:
        slower = zip(seen[name, args.busy], seen[name, 0], strict=True)
        ratio = round(statistics.median(a["wall_s"] / b["wall_s"] for a, b in slower), 3)
        print(json.dumps({"benchmark": "demo_busy_over_alone", "tree": name, "ratio": ratio}), flush=True)


if __name__ == "__main__":
    main()
