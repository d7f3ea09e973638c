"""What a far orchestrator costs a step of workers that reach each other: data mode, direct path, two workers of this host.

Their way to the orchestrator has a round trip of `--round-trip-ms`; a step sleeps until it has taken `--step-ms`. Prints one JSON
line for each case: the median milliseconds from step to step at a worker, and what that is above the step's own. In the
case "votes" the ranks decide by themselves; in "asks" a callback looks at each step, so the orchestrator decides, as it did for
every group before. The cases take turns, `--pairs` times.

    python -m tests.benchmarks.far_orchestrator [--round-trip-ms 60] [--step-ms 50] [--steps 40] [--pairs 3]
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import CELL, ROOT, Session, Worker, loader
from tests.support.relay import Relay

SLOW = (
    CELL
    + """
_began = None


class Slow(Net):
    def forward(self, x):
        global _began
        if self.training and not checking():
            now = time.monotonic()
            if _began is not None:
                (FOLDER / f"gaps-{{os.getpid()}}").open("a").write(f"{{now - _began}}\\n")
            _began = now
            time.sleep({step_s})
        return super().forward(x)
"""
)


class Watching:
    """A callback that looks at each step."""

    def on_step(self, run: Any, record: dict[str, Any]) -> None:
        """Do nothing."""


def gaps_ms(folder: Path) -> list[float]:
    """Milliseconds between forwards that followed each other, of all workers; the files are emptied."""
    found = []
    for path in folder.glob("gaps-*"):
        found += [1000 * float(line) for line in path.read_text().splitlines()[5:]]
        path.write_text("")
    return found


def main() -> None:
    """Run the cases in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--round-trip-ms", type=float, default=60.0)
    parser.add_argument("--step-ms", type=float, default=50.0)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--pairs", type=int, default=3)
    args = parser.parse_args()
    found: dict[str, list[float]] = {"votes": [], "asks": []}
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setattr(f"{Worker.__module__}.Relay", functools.partial(Relay, round_trip_s=args.round_trip_ms / 1000))
        session = Session(Path(folder), relayed=True, num_workers=2)
        try:
            session.ensure(2)
            session.orch.set_mode("data", path="direct")
            cell = SLOW.replace("{step_s}", str(args.step_ms / 1000)).format(folder=folder)
            for _ in range(args.pairs):
                for case, callbacks in (("votes", ()), ("asks", (Watching(),))):
                    batches = loader(rows=8 * args.steps, batch_size=8)
                    run = session.train(batches, 1, cell, model="Slow", callbacks=callbacks)
                    assert run.report()["path"]["path"] == "direct", run.report()["path"]
                    found[case].append(statistics.median(gaps_ms(Path(folder))))
        finally:
            session.close()
    for case, medians in found.items():
        median = statistics.median(medians)
        print(json.dumps({
            "case": case, "round_trip_ms": args.round_trip_ms, "step_ms": args.step_ms, "median_ms": round(median, 1),
            "above_step_ms": round(median - args.step_ms, 1), "medians_ms": [round(one, 1) for one in medians],
        }))  # fmt: skip


if __name__ == "__main__":
    main()
