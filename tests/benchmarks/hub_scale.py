"""What many workers cost the hub: simulated workers in a process of their own, the real protocol, sockets and TLS, no model.

    python tests/benchmarks/hub_scale.py [--workers 2,8,24] [--megabytes 4.2] [--seconds 8] [--rounds 3] [--base PATH]
    python tests/benchmarks/hub_scale.py --workers 200,1000 --outer partial [--every 5] [--churn 60] --rounds 1
    python tests/benchmarks/hub_scale.py --sessions 50 [--workers 4] [--base PATH]

The orchestrator is the whole one: session, training job, loader, sums and commits. A simulated worker answers what it is
asked as a worker does and computes nothing: its gradients lie ready, so that the hub has as much to do as it can take.
Per number of workers one JSON line: exchanges a second, processor time of the orchestrator's process per worker and MB (up and
down counted together), what a worker costs it in an exchange and once joined, and its memory: at the first step, at half, at
the end. With `--outer` these are rounds of local steps with that outer method; `--churn` has so many workers a minute leave,
every second one of them killed, and as many join.
With `--base` the same is done with another checkout (its own code on both sides) in turn with this one, in the same run;
ratios are medians of this over medians of that. `--sessions` opens and closes so many sessions in one process, each with a
run of a few steps, and tells the memory after the tenth, after half of them and at the end.

Reach: processor time <= 0.6 of the old commit; with 24 workers on 16 cores a step <= 4 x that with 2; 200 workers with 1 MB
each on two cores >= 0.5 steps a second; memory flat; processor time and memory per worker the same with 200 and 1,000.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[2]
WARM_UP_STEPS = 3
STEPS_OF_A_SESSION = 5
PATIENCE_S = 600.0


# --------------------------------------------------------------------------------------- the process of the orchestrator


def serve(arguments: argparse.Namespace) -> None:
    """Be the orchestrator; a line on stdout for each thing that happens, for the process that measures."""
    import psutil
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from guava_nb import DistributedConfig, Orchestrator

    side = round(math.sqrt(arguments.megabytes * 1e6 / 4))
    process, workers = psutil.Process(), int(arguments.workers)
    config = DistributedConfig(num_workers=workers, master_ip="127.0.0.1", master_port=0, snapshot_every_steps=0)
    rounds: dict[str, Any] = (
        {"sync": "local", "outer": arguments.outer, "sync_every": arguments.every} if arguments.outer else {}
    )
    rounds |= {"wire": arguments.wire} if arguments.wire else {}

    def loader(steps: int) -> DataLoader[tuple[torch.Tensor, ...]]:
        data = TensorDataset(torch.zeros(workers, side), torch.zeros(workers, side))
        return DataLoader(data, batch_sampler=AllRows(workers, steps))

    for _ in range(max(1, arguments.sessions)):
        with Orchestrator(config) as orchestrator:
            before, began = process.memory_info().rss, time.perf_counter()
            tell(code=orchestrator.join_code.encode())
            orchestrator.wait_for_workers(timeout=PATIENCE_S)
            joined = {"join_s": time.perf_counter() - began, "join_rss": process.memory_info().rss - before}
            orchestrator.register_model("torch.nn:Linear", {"in_features": side, "out_features": side, "bias": False})
            options = rounds | {
                "optimizer": "SGD",
                "optimizer_args": {"lr": 0.0},
                "criterion": "MSELoss",
                "progress": False,
            }
            if arguments.sessions:
                orchestrator.start_training(loader(STEPS_OF_A_SESSION), **options)
            else:
                run = orchestrator.start_training(loader(1 << 30), detach=True, **options)
                measure(run, process, arguments.seconds, joined)
                tell(**costs_of_a_session(orchestrator, process))
        tell(rss=process.memory_info().rss)


class AllRows:
    """A batch sampler: every batch has every row."""

    def __init__(self, rows: int, steps: int) -> None:
        self._rows, self._steps = list(range(rows)), steps

    def __iter__(self) -> Iterator[list[int]]:
        return itertools.repeat(self._rows, self._steps)

    def __len__(self) -> int:
        return self._steps


def measure(run: Any, process: Any, seconds: float, joined: dict[str, float]) -> None:
    """Tell exchanges, processor time, bytes and memory between two moments of a run, and stop it."""

    def moment() -> dict[str, float]:
        wire = run.wire
        return {
            "step": len(run.history), "at_s": time.perf_counter(), "cpu_s": time.process_time(),
            "rss": process.memory_info().rss, "out_bytes": wire.out_bytes, "in_bytes": wire.in_bytes, **joined,
        }  # fmt: skip

    while len(run.history) < WARM_UP_STEPS:
        assert not run.done, run.error
        time.sleep(0.05)
    tell(**(last := moment()))
    for _ in range(2):
        until = time.perf_counter() + seconds / 2
        while time.perf_counter() < until or len(run.history) == last["step"]:
            assert not run.done, run.error
            time.sleep(0.05)
        tell(**(last := moment()))
    run.stop()


def costs_of_a_session(orchestrator: Any, process: Any) -> dict[str, float]:
    """What else grows with the workers: threads, descriptors, a look at the status, seats."""
    began = time.perf_counter()
    seats = len(orchestrator.status().workers)
    return {
        "status_s": time.perf_counter() - began, "seats": seats, "threads": process.num_threads(),
        "descriptors": process.num_fds(),
    }  # fmt: skip


def tell(**what: Any) -> None:
    print(json.dumps(what), flush=True)


# -------------------------------------------------------------------------------------- the process of simulated workers


class Fleet:
    """What all simulated workers share: one replica, which builds and loads for all; its gradients, made once."""

    def __init__(self) -> None:
        import torch

        from guava_nb.worker.preparation import Preparation

        self._lock = threading.Lock()
        self._preparation = Preparation(torch.device("cpu"), None, None)
        self._run: Any = None
        self._loaded: tuple[tuple[str, int], str] | None = None
        self.gradients: list[tuple[int, bytes, Any, memoryview]] = []

    def prepared(self, message: Any) -> Any:
        import torch

        from guava_nb.replica.buckets import BucketWire, message_format

        with self._lock:
            if self._run is None or self._run.run_id != message.run_id:
                self._run, self._loaded = self._preparation.build(message), None
                self.gradients = []
                layout = self._run.replica.layout
                wire = BucketWire(layout, *message_format(message.spec))
                for bucket in layout.buckets:
                    flat = torch.randn(bucket.numel).to(bucket.dtype)  # as hard to compress as gradients are
                    present = ((1 << len(bucket.names)) - 1).to_bytes(bucket.present_bytes, "little")
                    self.gradients.append((bucket.index, present, *wire.encode(bucket.index, flat)))
            return self._preparation.built(message, self._run)

    def loaded(self, message: Any, payload: memoryview) -> str:
        """Load a state once, for all who are sent the same."""
        from guava_nb.data.codec import unpack

        with self._lock:
            key = (message.run_id, message.step)
            if self._loaded is None or self._loaded[0] != key:
                self._run.replica.load_state(unpack(message.state, payload))
                self._loaded = (key, self._run.replica.parameter_hash())
            return self._loaded[1]

    def checked(self, message: Any, payload: memoryview) -> Any:
        with self._lock:
            return self._preparation.check_step(self._run, message, payload)

    def state(self, message: Any) -> tuple[Any, Any]:
        from guava_nb.data.codec import pack

        with self._lock:
            replica = self._run.replica
            is_whole = message.model or message.optimizer  # as a worker answers
            return pack(replica.state(message.model, message.optimizer) if is_whole else replica.schedule_state())


class Worker:
    """One simulated worker: answers from the reader thread of its session."""

    def __init__(self, fleet: Fleet, code: Any, name: str) -> None:
        import torch

        from guava_nb.link.dialler import dial
        from guava_nb.link.options import LinkOptions
        from guava_nb.telemetry.hardware import describe

        self._fleet, self._step, self._waiting = fleet, -1, list[Any]()
        self.over = threading.Event()
        self._session = dial(code, self._on_event, LinkOptions(connect_timeout_s=PATIENCE_S))
        self._send(describe(torch.device("cpu"), name, "spawned"))

    def leave(self, in_order: bool) -> None:
        """Say so and go, or be gone as a killed process is."""
        from guava_nb.errors import LinkBroken
        from guava_nb.protocol.messages import Leave

        if in_order:
            self._send(Leave("its time is over"))
        else:
            self._session.end(LinkBroken("killed"), by_peer=False)
            self.over.set()

    def _send(self, message: Any, buffers: Any = ()) -> None:
        from guava_nb.errors import LinkClosed
        from guava_nb.protocol.messages import channel_of

        try:
            self._session.send(message, channel_of(message), buffers)
        except LinkClosed:
            self.over.set()

    def _on_event(self, event: Any) -> None:
        from guava_nb.link.session_events import MessageArrived, SessionClosed

        if isinstance(event, SessionClosed):
            self.over.set()
        elif isinstance(event, MessageArrived):
            try:
                self._answer(event.message, memoryview(event.payload))
            finally:
                event.done()

    def _answer(self, message: Any, payload: memoryview) -> None:
        from guava_nb.protocol import messages as m

        match message:
            case m.MeasureLine():
                self._send(m.LineMeasured(message.measuring_id, error="there is no line"))
            case m.Prepare():
                self._step = -1
                self._send(self._fleet.prepared(message))
            case m.LoadState():
                self._step = message.step
                digest = self._fleet.loaded(message, payload)
                self._send(m.StateLoaded(message.run_id, message.step, digest, "cpu, simulated", message.generation))
            case m.CheckStep():
                self._send(self._fleet.checked(message, payload))
            case m.BatchShard():
                self._waiting.append(message)
                self._compute_next()
            case m.SumBucket() if message.commit is not None:
                self._applied(message)
                self._compute_next()
            case m.Abort():
                self._step = message.last_committed
                self._waiting.clear()
                self._send(m.StepApplied(run_id=message.run_id, generation=message.generation, step=self._step))
            case m.FetchState():
                tree, buffers = self._fleet.state(message)
                self._send(m.State(message.request_id, message.run_id, self._step, tree), buffers)

    def _compute_next(self) -> None:
        """Work on what has come of the step after the last committed one, as real workers do."""
        now = [shard for shard in self._waiting if shard.step <= self._step + 1]
        self._waiting = [shard for shard in self._waiting if shard.step > self._step + 1]
        for shard in now:
            self._compute(shard)

    def _compute(self, shard: Any) -> None:
        from guava_nb.protocol.messages import GradientBucket, ShardReport

        at = {"run_id": shard.run_id, "generation": shard.generation, "step": shard.step, "shard": shard.shard}
        for bucket, present, spec, flat in self._fleet.gradients:
            self._send(GradientBucket(**at, bucket=bucket, present=present, tensor=spec), (flat,))
        self._send(ShardReport(
            **at, loss_sum=1.0, count=float(shard.rows), finite=True, rows=shard.rows, forward_s=0.0, backward_s=0.0,
            wait_s=0.0,
        ))  # fmt: skip

    def _applied(self, message: Any) -> None:
        from guava_nb.protocol.messages import StepApplied

        self._step = message.step
        self._send(StepApplied(
            run_id=message.run_id, generation=message.generation, step=message.step, learning_rate=0.0,
        ))  # fmt: skip


def simulate(arguments: argparse.Namespace) -> None:
    """Be the workers: for each join code on stdin, join, and work until that session ends.

    Parts of them are processes of their own, forked when torch is loaded.
    """
    import guava_nb.worker.preparation  # noqa: F401

    most, inputs = int(arguments.in_a_process), list[Any]()
    for first in range(0, int(arguments.workers), most):
        source, sink = os.pipe()
        if os.fork() == 0:
            os.close(sink)
            for other in inputs:
                other.close()
            join_and_work(os.fdopen(source), min(most, int(arguments.workers) - first), arguments)
            os._exit(0)
        os.close(source)
        inputs.append(os.fdopen(sink, "w", buffering=1))
    for line in sys.stdin:
        for part in inputs:
            part.write(line)
    for part in inputs:
        part.close()
    for _ in inputs:
        os.wait()


def join_and_work(codes: Iterable[str], count: int, arguments: argparse.Namespace) -> None:
    """Be so many workers in each session."""
    from guava_nb.protocol.joincode import JoinCode

    for line in codes:
        code, fleet = JoinCode.decode(line), Fleet()
        workers = [Worker(fleet, code, f"w{index}") for index in range(count)]
        over = threading.Event()
        if arguments.churn:
            churn = threading.Thread(target=come_and_go, args=(fleet, code, workers, 60 / arguments.churn, over))
            churn.start()
        workers[0].over.wait()
        over.set()
        if arguments.churn:
            churn.join()
        for worker in workers:
            worker.over.wait()


def come_and_go(fleet: Fleet, code: Any, workers: list[Worker], every_s: float, over: threading.Event) -> None:
    """Have one worker after another go, every second one without a word, and another join; the first one stays."""
    from guava_nb.errors import GuavaError

    for turn in itertools.count(1):
        if over.wait(every_s):
            return
        at = 1 + turn % (len(workers) - 1)
        workers[at].leave(in_order=turn % 2 == 0)
        with contextlib.suppress(GuavaError):  # the session may be over by now
            workers[at] = Worker(fleet, code, f"later{turn}")


# ------------------------------------------------------------------------------------------------------ what is measured


class Pair:
    """An orchestrator's process and those of the workers, all with the code of one checkout."""

    def __init__(self, tree: Path, arguments: argparse.Namespace, workers: int, python: str) -> None:
        command = [
            python, str(Path(__file__).resolve()), "--megabytes", str(arguments.megabytes),
            "--seconds", str(arguments.seconds), "--sessions", str(arguments.sessions), "--every", str(arguments.every),
            "--churn", str(arguments.churn), *(["--outer", arguments.outer] if arguments.outer else []),
            *(["--wire", arguments.wire] if arguments.wire else []), "--cores", str(arguments.cores),
        ]  # fmt: skip
        environment = {**os.environ, "PYTHONPATH": str(tree)}
        hub = [*command, "--workers", str(workers), "--part", "serve"]
        self._hub = subprocess.Popen(hub, stdout=subprocess.PIPE, text=True, env=environment)
        self._workers = subprocess.Popen(
            [*command, "--workers", str(workers), "--in-a-process", str(arguments.in_a_process), "--part", "simulate"],
            stdin=subprocess.PIPE, text=True, env={**environment, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def results(self) -> list[dict[str, Any]]:
        """What the orchestrator told; each join code goes on to the workers."""
        assert self._hub.stdout is not None
        told, codes = list[dict[str, Any]](), self._workers.stdin
        assert codes is not None
        for line in self._hub.stdout:
            news = json.loads(line)
            if "code" in news:
                codes.write(news["code"] + "\n")
                codes.flush()
            else:
                told.append(news)
        codes.close()
        assert self._hub.wait(60) == 0, "the orchestrator failed"
        self._workers.wait(60)
        return told


def scale_figures(told: list[dict[str, Any]], workers: int, megabytes: float) -> dict[str, float]:
    """Figures of one run, from its moments."""
    first, half, last, session = told[:4]
    steps = last["step"] - first["step"]
    cpu_ms = 1e3 * (last["cpu_s"] - first["cpu_s"]) / steps
    down, up = (1e-3 * (last[way] - first[way]) / steps / workers for way in ("out_bytes", "in_bytes"))
    return {
        "steps_per_s": steps / (last["at_s"] - first["at_s"]),
        "hub_cpu_ms_per_step": cpu_ms,
        "hub_cpu_ms_per_worker": cpu_ms / workers,
        "hub_cpu_ms_per_worker_mb": cpu_ms / (workers * 1e-3 * (down + up)),
        "kb_down_per_worker": down,
        "kb_up_per_worker": up,
        "join_s": first["join_s"],
        "join_kb_per_worker": first["join_rss"] / workers / 1e3,
        **session,
        **{f"rss_mb_{name}": at["rss"] / 1e6 for name, at in (("first", first), ("half", half), ("end", last))},
    }


def session_figures(told: list[dict[str, Any]], workers: int, megabytes: float) -> dict[str, float]:
    """Memory after some sessions in one process."""
    rss = [news["rss"] / 1e6 for news in told]
    tenth = rss[min(9, len(rss) - 1)]
    return {"rss_mb_1": rss[0], "rss_mb_10": tenth, "rss_mb_half": rss[len(rss) // 2], "rss_mb_end": rss[-1]}


def compare(arguments: argparse.Namespace, workers: int) -> dict[str, Any]:
    """Medians of interleaved runs of this checkout and the other."""
    trees = {"here": HERE, **({"base": Path(arguments.base).resolve()} if arguments.base else {})}
    figures = session_figures if arguments.sessions else scale_figures
    found: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
    for _ in range(1 if arguments.sessions else arguments.rounds):
        for name, tree in trees.items():
            pair = Pair(tree, arguments, workers, sys.executable)
            found[name].append(figures(pair.results(), workers, arguments.megabytes))
    medians = {
        name: {key: statistics.median(one[key] for one in all_) for key in all_[0]} for name, all_ in found.items()
    }
    result = {f"{key}": round(value, 4) for key, value in medians["here"].items()}
    for key, value in medians.get("base", {}).items():
        result[f"base_{key}"] = round(value, 4)
        result[f"{key}_ratio"] = round(medians["here"][key] / value, 4)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", default="2,8,24", help="numbers of workers, with commas")
    parser.add_argument("--megabytes", type=float, default=4.2, help="of the model's gradients")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3)
    # Each has four threads, and thousands in one process mostly wait for each other.
    parser.add_argument("--in-a-process", type=int, default=250, help="most simulated workers of one process")
    parser.add_argument("--cores", type=int, default=0, help="of the orchestrator, and all others for the workers")
    parser.add_argument("--outer", help="rounds of local steps with this outer method")
    parser.add_argument("--wire", help="format of gradients, or of what a round's steps came to")
    parser.add_argument("--every", type=int, default=5, help="steps of a round")
    parser.add_argument("--churn", type=float, default=0.0, help="workers a minute that go, and as many that come")
    parser.add_argument("--sessions", type=int, default=0)
    parser.add_argument("--base", metavar="PATH", help="another checkout to compare with")
    parser.add_argument("--part", choices=("serve", "simulate"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part and arguments.cores:
        here = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(
            0, here[: arguments.cores] if arguments.part == "serve" else here[arguments.cores :] or here
        )
    if arguments.part:
        (serve if arguments.part == "serve" else simulate)(arguments)
        return
    for workers in [int(text) for text in arguments.workers.split(",")]:
        name = "sessions" if arguments.sessions else "hub_scale"
        head = {"benchmark": name, "workers": workers, "megabytes": arguments.megabytes, "cores": os.cpu_count()}
        print(json.dumps(head | compare(arguments, workers)), flush=True)


if __name__ == "__main__":
    main()
