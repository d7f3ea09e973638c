"""How long a run stands still after a fault: SIGKILL, SIGSTOP, a cable that is cut, a deadlock in the user's step; per mode.

    python -m tests.benchmarks.recovery [--times 5] [--mode "data,zero,pipeline"] [--fault "SIGKILL,SIGSTOP,cable,deadlock"]
        [--data-only "slow,context,disk"]

Three worker processes over TLS, each behind a relay that can stop forwarding without a word; in data mode all three work, in the
others two of them and one is the spare, which has built the run before. The fault strikes the second one. Recovery is the time
until the step in work and the one after it are committed. Prints one JSON line per mode and fault: median and worst in seconds,
what was lost or doubled.
Reach: SIGKILL <= 1 s, silence (SIGSTOP, cable) <= 10 s, SIGKILL in group modes with a spare <= 5 s. A deadlock whose heartbeats
go on looks like a long step: it is given to others after `grace_s` (30 s), and groups wait for it.

`--data-only` has those for which standing still is not the measure, in data mode. slow: one of three workers takes five times
as long for a sample; throughput in workers' worth (reach: 2.0), and the largest difference of a weight to plain PyTorch. context:
an error that a CUDA context does not survive, raised by the user's code; seconds until the worker's process is replaced and the
next run has done two steps. disk: a checkpoint every second step into a full file system (needs the right to mount); the longest
time between two steps beside that of the steps before.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from guava_nb.errors import RemoteError
from tests.support import processes
from tests.support.processes import ROOT, PlainTraining, Session, Worker, difference, eventually, loader

__all__ = ["FAULTS", "MODES", "OTHERS", "recovery"]

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
        members = session.orch._job.membership
        eventually(lambda: len(members.replica_set.prepared()) == 3, PATIENCE_S, "the spare has built the run, too")
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


# ----------------------------------------------------------------------------------------- those that stop no run

#: Of one sample at a worker that is not slow.
_SAMPLE_S = 0.01


def _slow(session: Session) -> dict[str, Any]:
    nap = "time.sleep(SAMPLE_S * len(x) * (5 if (FOLDER / f'{{os.getpid()}}.slow').exists() else 1))"
    cell = processes.CELL.replace("        global _calls\n", f"        global _calls\n        {nap}\n")
    cell = cell.replace("SAMPLE_S", str(_SAMPLE_S))
    workers = session.ensure(3)
    (session.folder / f"{workers[1].pid}.slow").touch()
    run = session.train(loader(960, 96), 1000, cell.format(folder=str(session.folder)), detach=True)
    eventually(lambda: len(run.history) >= 8 or run.done, PATIENCE_S, "shares follow the speeds")
    began, before = time.monotonic(), len(run.history)
    eventually(lambda: len(run.history) >= before + 20 or run.done, PATIENCE_S, "20 steps")
    rate = (len(run.history) - before) * 96 / (time.monotonic() - began)
    run.stop()
    run.result()
    plain = PlainTraining(session.folder, loader(960, 96)).epochs(1000, limit=len(run.history))
    return {
        "workers_worth": round(rate * _SAMPLE_S, 2),
        "difference": difference(run.model(), plain.model),
        **_counts(run),
    }


def _context(session: Session) -> dict[str, Any]:
    stand_in = 'raise RuntimeError("CUDA error: device-side assert triggered")'
    cell = processes.CELL.format(folder=str(session.folder)).replace(
        'raise ValueError("this batch is cursed")', stand_in
    )
    victim = session.ensure(3)[1]
    victim.trap("forward", 8, do="raise")
    run = session.train(loader(), 100, cell, detach=True)
    victim.wait_trapped()
    began = time.monotonic()
    try:
        run.result()
        raise AssertionError("the run went on")
    except RemoteError as error:
        assert "cannot use its device" in str(error), error
    victim.release()
    eventually(lambda: len(session.ready()) == 3, PATIENCE_S, "it is back")
    run = session.train(loader(), 100, cell, detach=True)
    eventually(lambda: len(run.history) >= 2 or run.done, PATIENCE_S, "two steps")
    took = time.monotonic() - began
    run.stop()
    run.result()
    return {"seconds": round(took, 2), **_counts(run)}


def _disk(session: Session) -> dict[str, Any]:
    session.ensure(3)
    with _full_file_system() as folder:
        session.orch.config = session.orch.config.replace(checkpoint_dir=str(folder), save_interval=20)
        at: list[float] = []

        class Told:
            def on_step(self, run: Any, record: dict[str, Any]) -> None:
                at.append(time.monotonic())

        cell = CELL.format(folder=str(session.folder))
        run = session.train(loader(), 20, cell, model="Net", criterion="CrossEntropyLoss", callbacks=[Told()])
        run.result()
        left = [one.name for one in folder.iterdir()]
    gaps = [after - before for before, after in zip(at, at[1:], strict=False)]
    told = sum("was not saved" in note for note in session.orch.status().notes)
    return {
        "longest_step_s": round(max(gaps), 3), "median_step_s": round(statistics.median(gaps), 3), "steps": len(at),
        "told": told, "files_left": left, **_counts(run),
    }  # fmt: skip


@contextmanager
def _full_file_system() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as made:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k", "guava", made], check=True)
        try:
            yield Path(made)
        finally:
            subprocess.run(["umount", made], check=True)


def _counts(run: Any) -> dict[str, int]:
    return {"lost": run.lost_samples, "doubled": run.duplicated_samples}


OTHERS = {"slow": _slow, "context": _context, "disk": _disk}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--mode", default=",".join(MODES))
    parser.add_argument("--fault", default=",".join(FAULTS))
    parser.add_argument("--data-only", default="")
    given = parser.parse_args()
    os.environ["PYTHONPATH"], os.environ["OMP_NUM_THREADS"] = str(ROOT), "1"
    for name in filter(None, given.data_only.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            session = Session(Path(folder), num_workers=3)
            try:
                print(json.dumps({"mode": "data", "fault": name, **OTHERS[name](session)}), flush=True)
            finally:
                session.close()
    for mode in filter(None, given.mode.split(",")):
        for fault in filter(None, given.fault.split(",")):
            with tempfile.TemporaryDirectory() as folder:
                print(json.dumps(measured(mode, fault, given.times, Path(folder))), flush=True)


if __name__ == "__main__":
    main()
