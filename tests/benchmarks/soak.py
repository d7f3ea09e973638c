"""Hours of misfortune in minutes: workers killed, stopped and replaced, joins and leaves, sessions one after another.

    python -m tests.benchmarks.soak [--seconds 600] [--every 15] [--fast-seconds 120] [--fast-every 3] [--joins 300]
        [--sessions 50] [--seed 0]

Four parts, one JSON line each, on this machine only:

- "killed every 15 s": two workers train; one of them, drawn by lot, is killed (SIGKILL) and replaced, every third time stopped
  instead (SIGSTOP), and killed only when steps go on without it.
- "killed every 3 s": any worker, those that are still joining too.
- "joins": so many sessions that say hello and leave, while one worker trains.
- "sessions": so many sessions in this process, each with a worker and a run of some steps.

Each tells the longest time without a step, the seconds from a fault until the steps behind it (median, worst), what was lost or
doubled, and memory, descriptors and threads of this process, when half is done and at the end. Reach: SIGKILL <= 1 s, silence
<= 10 s in the median; nothing lost or doubled; what the process holds is flat. `--seconds 0`, `--joins 0`, ... leave a part out.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import signal
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import psutil
import torch
from torch.utils.data import DataLoader, TensorDataset

from guava_nb import DistributedConfig, NetworkWorker, Orchestrator
from guava_nb.link.dialler import dial
from guava_nb.link.session_events import Event, MessageArrived
from guava_nb.processes.local_workers import WorkerHandle
from guava_nb.protocol.messages import Hello, Leave, channel_of

__all__ = ["joins", "kills", "sessions"]

CELL = """
import time
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))

    def forward(self, x):
        return self.body(x)

def loss_fn(outputs, targets):
    time.sleep(0.02)
    return nn.functional.cross_entropy(outputs, targets)
"""
#: A fault after which no step comes for so long is a standstill, and the part fails.
PATIENCE_S = 180.0
#: In which a worker that takes part does a step, on a busy machine too.
MOMENT_S = 1.0
OPTIONS: dict[str, Any] = {
    "criterion": "loss_fn", "optimizer": "AdamW", "optimizer_args": {"lr": 0.001}, "progress": False, "fresh": True
}  # fmt: skip


def loader(rows: int = 512) -> DataLoader[Any]:
    x = torch.randn(rows, 16, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, torch.arange(rows) % 4), 16)


def until(condition: Callable[[], object], seconds: float, what: str) -> float:
    """Wait; returns how long it took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() < began + seconds, f"did not happen within {seconds:g} s: {what}"
        time.sleep(0.005)
    return time.monotonic() - began


class Held:
    """What this process holds, at some moments."""

    def __init__(self) -> None:
        self.moments: list[dict[str, float]] = []

    def look(self) -> None:
        """Note it; what is above the first moment gets five seconds to end, since connections are closed after their visits."""
        gc.collect()
        me, ends = psutil.Process(), time.monotonic() + 5.0
        while True:
            descriptors = me.num_fds() if hasattr(me, "num_fds") else me.num_handles()
            threads = threading.active_count()
            first = self.moments[0] if self.moments else {"descriptors": descriptors, "threads": threads}
            if (descriptors <= first["descriptors"] and threads <= first["threads"]) or time.monotonic() > ends:
                break
            time.sleep(0.05)
        rss_mb = round(me.memory_info().rss / 1e6, 1)
        self.moments.append({"rss_mb": rss_mb, "descriptors": descriptors, "threads": threads})


class Gaps:
    """A callback of a run: the longest time between two steps."""

    def __init__(self) -> None:
        self.longest_s, self._last = 0.0, float("inf")

    def on_step(self, run: Any, record: dict[str, Any]) -> None:
        now = time.monotonic()
        self.longest_s, self._last = max(self.longest_s, now - self._last), now


def figures(seconds: list[float]) -> dict[str, float] | None:
    if not seconds:
        return None
    return {"count": len(seconds), "median_s": round(statistics.median(seconds), 2), "worst_s": round(max(seconds), 2)}


class Siege:
    """A session whose workers are killed or stopped one after another while a run goes on."""

    def __init__(self, seed: int, joining_too: bool, stops: bool) -> None:
        self._lot, self._joining_too, self._stops = random.Random(seed), joining_too, stops
        self.orch = Orchestrator(DistributedConfig(num_workers=2, threads_per_worker=1))
        self.handles: list[WorkerHandle] = []
        self.recovery: dict[str, list[float]] = {"killed": [], "stopped": []}
        self.faults = 0

    def at_work(self) -> set[int]:
        """Process numbers of the workers that have done samples within the last moment: they hold the state."""
        before = {worker.name: worker.samples for worker in self.orch.status().workers}
        time.sleep(MOMENT_S)
        now = {w.name for w in self.orch.status().workers if w.samples > before.get(w.name, w.samples)}
        return {handle.pid for handle in self.handles if handle.alive and handle.status().name in now}

    def strike(self, run: Any) -> None:
        """One fault, and the worker that takes the place of the one that is gone."""
        self.handles = [handle for handle in self.handles if handle.alive]
        ready = self.at_work()
        victims = [handle for handle in self.handles if self._joining_too or handle.pid in ready]
        if not victims:
            return
        victim = self._lot.choice(victims)
        took_part = victim.pid in ready
        stop = self._stops and self.faults % 3 == 2 and took_part and len(ready) > 1
        self.faults += 1
        os.kill(victim.pid, signal.SIGSTOP if stop else signal.SIGKILL)
        if took_part and len(ready) > 1:
            done = len(run.history) + 2  # the step that was in work, and the one behind it
            took = until(lambda: len(run.history) >= done or run.done, PATIENCE_S, "steps go on after a fault")
            self.recovery["stopped" if stop else "killed"].append(took)
        if stop:
            os.kill(victim.pid, signal.SIGKILL)
        self.handles += self.orch.launch_workers(1)


def kills(
    seconds: float, every_s: float, seed: int = 0, joining_too: bool = False, stops: bool = True
) -> dict[str, Any]:
    """Train for so long and strike every so often.

    Returns:
        What the module's text says.
    """
    siege, held, gaps = Siege(seed, joining_too, stops), Held(), Gaps()
    with siege.orch as orch:
        siege.handles = orch.launch_workers(2)
        orch.wait_for_workers(2, timeout=PATIENCE_S)
        orch.share(CELL, "net")
        orch.register_model("Net")
        run = orch.start_training(loader(), num_epochs=10_000, detach=True, callbacks=[gaps], **OPTIONS)
        until(lambda: run.history, PATIENCE_S, "the first step")
        began = time.monotonic()
        while time.monotonic() < began + seconds:
            pause_until = time.monotonic() + every_s
            siege.strike(run)
            if len(held.moments) == 0 and time.monotonic() > began + seconds / 2:
                held.look()
            time.sleep(max(0.0, pause_until - time.monotonic()))
            assert not run.done, run.error
        steps = len(run.history)
        until(lambda: len(run.history) > steps, PATIENCE_S, "steps go on at the end")
        run.stop()
        run.result()
        held.look()
    return {
        "part": f"killed every {every_s:g} s", "seconds": round(seconds), "faults": siege.faults, "steps": steps,
        "longest_without_a_step_s": round(gaps.longest_s, 2), "lost": run.lost_samples, "doubled": run.duplicated_samples,
        **{f"recovery_{name}": figures(took) for name, took in siege.recovery.items()}, "held": held.moments,
    }  # fmt: skip


def _visit(orch: Orchestrator, name: str) -> None:
    """Join as a worker that leaves before it does anything."""
    accepted = threading.Event()

    def on_event(event: Event) -> None:
        if isinstance(event, MessageArrived):
            accepted.set()
            event.done()

    session = dial(orch.join_code, on_event)
    hello = Hello(
        name=name, program="spawned", versions={}, hostname="here", device="cpu", device_name="CPU", device_uuid=""
    )
    session.send(hello, channel_of(hello))
    assert accepted.wait(30), f"{name} got no seat"
    session.send(Leave("it was a visit"), channel_of(Leave("")))
    session.close("it was a visit")


def joins(count: int) -> dict[str, Any]:
    """Let so many workers come and go while one trains."""
    held, gaps = Held(), Gaps()
    with Orchestrator(DistributedConfig(num_workers=1, threads_per_worker=1)) as orch:
        orch.launch_workers(1)
        orch.wait_for_workers(1, timeout=PATIENCE_S)
        orch.share(CELL, "net")
        orch.register_model("Net")
        run = orch.start_training(loader(), num_epochs=10_000, detach=True, callbacks=[gaps], **OPTIONS)
        until(lambda: run.history, PATIENCE_S, "the first step")
        for number in range(count):
            _visit(orch, f"visitor-{number}")
            if number == count // 2:
                held.look()
        steps = len(run.history)
        until(lambda: len(run.history) > steps, PATIENCE_S, "steps go on at the end")
        run.stop()
        run.result()
        held.look()
    return {
        "part": "joins", "joins": count, "longest_without_a_step_s": round(gaps.longest_s, 2), "lost": run.lost_samples,
        "doubled": run.duplicated_samples, "held": held.moments,
    }  # fmt: skip


def sessions(count: int) -> dict[str, Any]:
    """Open and close so many sessions, each with a worker in a thread of this process and a short run."""
    held = Held()
    for number in range(count):
        with Orchestrator(DistributedConfig(num_workers=1)) as orch:
            worker = NetworkWorker(orch.join_code, gpu_id="cpu")
            thread = threading.Thread(target=worker.connect_and_train, daemon=True)
            thread.start()
            orch.wait_for_workers(1, timeout=PATIENCE_S)
            orch.share(CELL, "net")
            orch.register_model("Net")
            run = orch.start_training(loader(64), num_epochs=1, **OPTIONS)
            run.model()
        thread.join(PATIENCE_S)
        if number in (count // 4, count // 2):
            held.look()
    held.look()
    return {"part": "sessions", "sessions": count, "held": held.moments}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--every", type=float, default=15)
    parser.add_argument("--fast-seconds", type=float, default=120)
    parser.add_argument("--fast-every", type=float, default=3)
    parser.add_argument("--joins", type=int, default=300)
    parser.add_argument("--sessions", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    parts: list[Callable[[], dict[str, Any]]] = []
    if given.seconds:
        parts.append(lambda: kills(given.seconds, given.every, given.seed))
    if given.fast_seconds:
        parts.append(lambda: kills(given.fast_seconds, given.fast_every, given.seed, joining_too=True, stops=False))
    if given.joins:
        parts.append(lambda: joins(given.joins))
    if given.sessions:
        parts.append(lambda: sessions(given.sessions))
    for part in parts:
        print(json.dumps(part()), flush=True)


if __name__ == "__main__":
    main()
