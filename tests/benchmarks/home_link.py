"""Workers behind emulated home lines: step sync beside rounds of local steps, same model, tokens and seeds.

    python -m tests.benchmarks.home_link [--steps 90] [--every 30] [--width 96] [--cases step average average+int8 sparse auto]
    ... --workers 4 --width 160 --row-s 0.25 --steps 100 --cases alone auto        # what a user gains
    ... --workers 4 --table 195000 --width 128 --batch 4 --row-s 0.2 --optimizer SGD --every 60 --cases partial@30  # 25 M
    ... --line lte --cases average@12                                              # a line with breaks

A byte-level GPT on the sources of Python's standard library; each worker is a process of its own behind a line of its own, and
the orchestrator behind another one, which all of them share (`LINES`, `tests/support/relay.py`). A case is `step`, `auto`,
which lets the run choose, or an outer method of local rounds, with `+` and a wire format, with `@` and a `sync_delay`; `alone`
gives one worker all tokens. Prints one JSON line for each: seconds of the run (`whole_s`: with what came before its first
step), wire bytes of gradients and of all kinds, those that the orchestrator's machine sent and received in all and for each
worker, the loss of the last steps and of a validation on files that were not trained on, which part of its time a worker
computed (`busy`; else `idle_s`) and took steps (`in_steps`: what a round costs beside them is none), and what was told
beforehand.

`--row-s` lets each row of a batch sleep until its step has taken so many seconds, as on a slower device, so that two cores
suffice for four workers; `step_s` tells what a step took then. `--table` adds an embedding of so many hashed trigrams: many
parameters that cost little to compute.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from guava_nb import DistributedConfig, Orchestrator
from tests.support.relay import Relay

UP_BYTES_S, DOWN_BYTES_S, ROUND_TRIP_S = 20e6 / 8, 100e6 / 8, 0.06
#: Bytes a second up and down, of each worker's line and of the orchestrator's; seconds there and back of a worker's, and more at
#: most by chance.
LINES = {
    "home": (UP_BYTES_S, DOWN_BYTES_S, ROUND_TRIP_S, 0.02),
    "office": (200e6 / 8, 200e6 / 8, 0.05, 0.005),
    "lte": (10e6 / 8, 40e6 / 8, 0.08, 0.04),
    "lte-calm": (10e6 / 8, 40e6 / 8, 0.08, 0.04),  # without its breaks
}
#: Of LTE: so often a worker's line passes nothing, for so long; each fourth time its connections are cut instead.
BREAK_EVERY_S, BREAK_S = 15.0, 3.0
CONTEXT = 96
_IDLE = ("waiting", "exchange")
CELL = f"""
import time
from collections import deque

import torch
from torch import nn
from torch.nn import functional

class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        n, t, width = x.shape
        q, k, v = (part.view(n, t, self.heads, -1).transpose(1, 2) for part in self.qkv(self.first(x)).chunk(3, -1))
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(n, t, width)
        x = x + self.out(seen)
        return x + self.down(functional.gelu(self.up(self.second(x))))

class ByteGPT(nn.Module):
    def __init__(self, width, layers, table=0):
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding({CONTEXT}, width)
        self.trigrams = nn.Embedding(table, width, sparse=True) if table else None
        self.blocks = nn.Sequential(*(Block(width, 4) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, x):
        x = x.long()
        inner = self.bytes(x) + self.places(torch.arange(x.shape[1]))
        if self.trigrams is not None:
            before = functional.pad(x, (2, 0))
            hashed = before[:, 2:] * 65599 + before[:, 1:-1] * 257 + before[:, :-2]
            inner = inner + self.trigrams(hashed * 7919 % self.trigrams.num_embeddings)
        return self.head(self.norm(self.blocks(inner)))

def language_step(model, batch):
    (x,) = batch
    began, used_s = time.monotonic(), time.thread_time()
    loss = functional.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].long().flatten())
    if model.training and ROW_S:
        if ENDED:
            AFTER.append(used_s - ENDED.pop())
        rest_s = min(AFTER, default=0.0)  # backward and optimizer; longer ones ended a round
        time.sleep(max(0.0, ROW_S * len(x) - (time.monotonic() - began) - rest_s))
        ENDED.append(time.thread_time())
    return loss

ENDED, AFTER = [], deque(maxlen=16)
"""


def rows_of_text(rows: int, skip: int) -> TensorDataset:
    """Rows of CONTEXT + 1 bytes, uint8, from the standard library's sources; `skip`: files left out in the beginning."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(path.read_bytes() for path in files[skip:])[: rows * (CONTEXT + 1)]
    return TensorDataset(torch.frombuffer(bytearray(text), dtype=torch.uint8).view(-1, CONTEXT + 1))


def worker(code: str, name: str) -> subprocess.Popen[bytes]:
    start = "import sys; from guava_nb.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", start, "worker", code, "--device", "cpu", "--name", name]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)


def case(orchestrator: Orchestrator, name: str, args: argparse.Namespace) -> dict[str, Any]:
    generator, steps, every = torch.Generator().manual_seed(1), args.steps, args.every
    data = DataLoader(rows_of_text(steps * args.batch, 20), batch_size=args.batch, shuffle=True, generator=generator)
    name_of_way, _, delay = name.partition("@")
    way, _, wire = name_of_way.partition("+")
    options: dict[str, Any] = {"sync": "auto"} if way == "auto" else {}
    if way not in ("auto", "alone", "step"):
        options = {"sync": "local", "sync_every": every, "outer": way, "sync_delay": int(delay or 0)}
    began = time.monotonic()
    run = orchestrator.start_training(
        data, DataLoader(rows_of_text(256, 0), batch_size=64), step="language_step", optimizer=args.optimizer,
        optimizer_args={"lr": args.lr}, scheduler="CosineAnnealingLR", scheduler_args={"T_max": steps}, progress=False,
        threads=1, fresh=True, check="off", seed=1, wire=wire or "fp32", max_steps=args.stop or None, **options,
    )  # fmt: skip
    report, seconds, whole_s = run.report(), run.history[-1]["seconds"], time.monotonic() - began
    records = run.history[-10:] if way in ("step", "alone") else run.history[-1:]
    told = [
        text for _, text in orchestrator._notices.numbered(500) if text.startswith("sync auto") or "longer than" in text
    ]
    silences = [session.silences for session in map(orchestrator._cluster.session, range(args.workers)) if session]
    rows = args.batch / (1 if way == "alone" else args.workers)
    return {
        "benchmark": "home_link", "case": name, "line": args.line, "workers": 1 if way == "alone" else args.workers,
        "every": report["steps"] // len(run.history), "steps": report["steps"],
        "parameters": num_parameters(args), "seconds": round(seconds, 1),
        "whole_s": round(whole_s, 1), "gradient_bytes": run.wire.gradient_bytes,
        "laptop_bytes": [run.wire.out_bytes, run.wire.in_bytes], "bytes_by_kind": report["wire"],
        "worker_bytes": [[one.out_bytes, one.in_bytes] for one in orchestrator.status().workers],
        "train_loss": round(sum(one["loss"] for one in records) / len(records), 4),
        "val_loss": round(report["val"]["loss"], 4), "busy": busy_share(run),
        "idle_s": idle_seconds(run), "step_s": step_seconds(run, report["steps"]),
        "in_steps": round(report["steps"] * rows * args.row_s / seconds, 3), "lost_samples": report["lost_samples"],
        "silences": [[one.count, round(one.seconds, 1), round(one.observed_s)] for one in silences], "told": told,
    }  # fmt: skip


def num_parameters(args: argparse.Namespace) -> int:
    """Of the model, which stays at the workers: its weights would take as long as a run."""
    cell: dict[str, Any] = {}
    exec(CELL, cell)
    with torch.device("meta"):
        return sum(one.numel() for one in cell["ByteGPT"](args.width, args.layers, args.table).parameters())


def phase_seconds(run: Any) -> list[dict[str, float]]:
    """Seconds of each phase, of each worker."""
    phases = [one["phases"] for one in run.energy if one.get("phases")]
    return [{name: part["seconds"] for name, part in each.items()} for each in phases]


def step_seconds(run: Any, steps: int) -> float:
    """What a local step took at a worker, with what a round costs beside its steps."""
    seconds = phase_seconds(run)
    return round(
        sum(each.get(name, 0.0) for each in seconds for name in ("forward", "backward")) / len(seconds) / steps, 3
    )


def idle_seconds(run: Any) -> list[dict[str, float]]:
    """For how long each worker waited for work, and for what the others came to."""
    return [{name: round(each.get(name, 0.0), 1) for name in _IDLE} for each in phase_seconds(run)]


def busy_share(run: Any) -> float | None:
    """Which part of their time between the first and the last step the workers computed."""
    seconds = phase_seconds(run)
    total = sum(sum(each.values()) for each in seconds)
    idle = sum(each.get(name, 0.0) for each in seconds for name in _IDLE)
    return round(1 - idle / total, 3) if total else None


@contextlib.contextmanager
def homes(port: int, num: int, line: str) -> Iterator[list[Relay]]:
    """Lines to a port: one for each worker, and behind them the orchestrator's own, which they share."""
    up, down, round_trip_s, jitter_s = LINES[line]
    with contextlib.ExitStack() as stack:
        own = stack.enter_context(Relay(port, rate_bytes_s=down, down_bytes_s=up))
        timing = {"round_trip_s": round_trip_s, "jitter_s": jitter_s}
        each = [Relay(own.port, rate_bytes_s=up, down_bytes_s=down, **timing) for _ in range(num)]
        for one in each:
            stack.enter_context(one)
        over = threading.Event()
        if line == "lte":
            breaks = threading.Thread(target=break_now_and_then, args=(each, over), daemon=True)
            breaks.start()
            stack.callback(breaks.join)
        stack.callback(over.set)
        yield each


def break_now_and_then(lines: list[Relay], over: threading.Event) -> None:
    """Interrupt one line after another."""
    number = 0
    while not over.wait(BREAK_EVERY_S / len(lines)):
        line, number = lines[number % len(lines)], number + 1
        if number % 4 == 0:
            line.refuse()
            line.cut_all()
        else:
            for link in line.links:
                link.stall()
        over.wait(BREAK_S)
        line.admit()
        for link in line.links:
            link.flow()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--line", choices=LINES, default="home")
    parser.add_argument("--steps", type=int, default=90)
    parser.add_argument("--stop", type=int, default=0, help="end after so many of the steps")
    parser.add_argument("--every", type=int, default=30)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--table", type=int, default=0)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--optimizer", default="AdamW")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--row-s", type=float, default=0.0)
    parser.add_argument(
        "--cases", nargs="+", default=["step", "step+int8", "average", "average+int8", "nesterov", "sparse", "alone"]
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in args.cases:  # one worker alone has a session of its own: idle ones would be sent every step
        num = 1 if name == "alone" else args.workers
        with session(num, args) as orchestrator:
            print(json.dumps(case(orchestrator, name, args)), flush=True)


@contextlib.contextmanager
def session(num: int, args: argparse.Namespace) -> Iterator[Orchestrator]:
    """A session with so many workers, each behind its line."""
    config = DistributedConfig(num_workers=num, master_ip="127.0.0.1", master_port=0, path="relay", compression="off")
    with Orchestrator(config) as orchestrator, homes(orchestrator.join_code.port, num, args.line) as lines:
        code = orchestrator.join_code
        processes = [
            worker(code.with_address("127.0.0.1", line.port).encode(), f"home{k}") for k, line in enumerate(lines)
        ]
        try:
            orchestrator.wait_for_workers(timeout=240)
            orchestrator.share(f"{CELL}\nROW_S = {args.row_s}\n", "gpt")
            model = {"width": args.width, "layers": args.layers, "table": args.table}
            orchestrator.register_model("ByteGPT", model)
            yield orchestrator
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                process.wait(120)  # one that leaves hands its state over


if __name__ == "__main__":
    main()
