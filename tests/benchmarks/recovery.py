"""How long a run stands still after a fault: SIGKILL, SIGSTOP, a cable that is cut, a deadlock in the user's step; per mode.

    python -m tests.benchmarks.recovery [--times 5] [--mode "data,zero,pipeline"] [--fault "SIGKILL,SIGSTOP,cable,deadlock"]

Three worker processes over TLS, each behind a relay that can stop forwarding without a word; in data mode all three work, in the
others two of them and one is the spare. The fault strikes the second one. Recovery is the time until the step in work and the
one after it are committed. Prints one JSON line per mode and fault: median and worst in seconds, what was lost or doubled.
Reach: SIGKILL <= 1 s, silence (SIGSTOP, cable) <= 10 s, SIGKILL in group modes with a spare <= 5 s. A deadlock whose heartbeats
go on looks like a long step: it is given to others after `grace_s` (30 s), and groups wait for it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.processes import ROOT, Session, Worker, eventually, loader

__all__ = ["FAULTS", "MODES", "recovery"]

CELL = """
import os
import pathlib
import threading
import time
from torch import nn

FOLDER = pathlib.Path({folder!r})

class Block(nn.Module):
    def __init__(self, rows, columns):
        super().__init__()
        self.linear = nn.Linear(rows, columns)

    def forward(self, x):
        if self.training:
            time.sleep(0.02)
            if (FOLDER / f"{{os.getpid()}}.deadlock").exists():
                lock = threading.Lock()
                lock.acquire()
                lock.acquire()
        return self.linear(x).relu()

def Net():
    return nn.Sequential(Block(10, 16), Block(16, 16), nn.Linear(16, 4))
"""
MODES: dict[str, dict[str, Any]] = {"data": {}, "zero": {"zero_stage": 2, "dp": 2}, "pipeline": {"pp": 2}}
#: A run that stands still for so long does not recover.
PATIENCE_S = 120.0


def _cut(worker: Worker) -> None:
    assert worker.relay is not None
    for link in list(worker.relay.links):
        link.stall()


def _signal(number: signal.Signals) -> Callable[[Worker], None]:
    return lambda worker: os.kill(worker.pid, number)


FAULTS: dict[str, Callable[[Worker], None]] = {
    "SIGKILL": _signal(signal.SIGKILL),
    "SIGSTOP": _signal(signal.SIGSTOP),
    "cable": _cut,
    "deadlock": lambda worker: (worker.folder / f"{worker.pid}.deadlock").touch(),
}


def recovery(session: Session, mode: str, fault: str) -> tuple[float, int, int]:
    """Strike once; returns seconds, and samples that were lost and doubled."""
    victim = session.ensure(3 if mode == "data" else 2)[1]
    session.orch.set_mode(mode, path="relay", **MODES[mode])
    run = session.train(
        loader(),
        10_000,
        CELL.format(folder=str(session.folder)),
        model="Net",
        criterion="CrossEntropyLoss",
        detach=True,
    )
    eventually(lambda: len(run.history) >= 8 or run.done, PATIENCE_S, "the run is under way")
    if mode != "data":  # a mesh starts with exactly its workers; who comes later is a spare
        session.workers.append(Worker(session, f"spare-{time.monotonic_ns()}", True))
        eventually(lambda: len(session.ready()) == 3, PATIENCE_S, "the spare is here")
    FAULTS[fault](victim)
    began, done = time.monotonic(), len(run.history) + 2
    eventually(lambda: len(run.history) >= done or run.done, PATIENCE_S, f"{mode} goes on after {fault}")
    took = time.monotonic() - began
    victim.handle.kill()
    victim.handle.wait(10)
    eventually(lambda: victim.name not in session.ready(), PATIENCE_S, f"{victim.name} is given up")
    run.stop()
    run.result()
    return took, run.lost_samples, run.duplicated_samples


def measured(mode: str, fault: str, times: int, folder: Path) -> dict[str, Any]:
    """Strike so many times in one session."""
    told: dict[str, Any] = {"mode": mode, "fault": fault}
    session = Session(folder, relayed=True, num_workers=2)
    try:
        found = [recovery(session, mode, fault) for _ in range(times)]
    except AssertionError as error:
        return {**told, "problem": str(error)}
    finally:
        session.close()
    seconds = [one[0] for one in found]
    return {
        **told, "times": times, "median_s": round(statistics.median(seconds), 2), "worst_s": round(max(seconds), 2),
        "lost": sum(one[1] for one in found), "doubled": sum(one[2] for one in found),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--mode", default=",".join(MODES))
    parser.add_argument("--fault", default=",".join(FAULTS))
    given = parser.parse_args()
    os.environ["PYTHONPATH"], os.environ["OMP_NUM_THREADS"] = str(ROOT), "1"
    for mode in given.mode.split(","):
        for fault in given.fault.split(","):
            with tempfile.TemporaryDirectory() as folder:
                print(json.dumps(measured(mode, fault, given.times, Path(folder))), flush=True)


if __name__ == "__main__":
    main()
