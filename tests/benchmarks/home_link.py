"""Two workers behind emulated home lines: step sync beside rounds of local steps, same model, tokens and seeds.

    python -m tests.benchmarks.home_link [--steps 90] [--every 30] [--width 96] [--cases step average average+int8 sparse auto]
    ... --width 256 --layers 6 --batch 2 --steps 300 --every 60 --slow 0.2 --cases average average@50

A byte-level GPT on the sources of Python's standard library; each worker is a process of its own behind a line of 20 Mbit/s up,
100 Mbit/s down and 60 ms (`tests/support/relay.py`). Prints one JSON line for each case: seconds of the run, wire bytes of
gradients and of all, the loss of the last steps and of a validation on files that were not trained on, which part of the
run's time the workers computed, and what was told beforehand. A case is `step`, `auto`, which lets the run choose, or an outer
method of local rounds, with `+` and a wire format, with `@` and a `sync_delay`; `alone` gives one worker of them all tokens.
`--slow` lets each step sleep so many seconds beside its computing, as on a slower device; `step_s` tells what a step took then.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from guava_nb import DistributedConfig, Orchestrator
from tests.support.relay import Relay

UP_BYTES_S, DOWN_BYTES_S, ROUND_TRIP_S = 20e6 / 8, 100e6 / 8, 0.06
CONTEXT = 96
CELL = f"""
import time

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
    def __init__(self, width, layers):
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding({CONTEXT}, width)
        self.blocks = nn.Sequential(*(Block(width, 4) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, x):
        x = x.long()
        return self.head(self.norm(self.blocks(self.bytes(x) + self.places(torch.arange(x.shape[1])))))

def language_step(model, batch):
    (x,) = batch
    if model.training:
        time.sleep(SLOW_S)
    return functional.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].long().flatten())
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
    options: dict[str, Any] = {"shares": [1, 0]} if name == "alone" else {}
    name_of_way, _, delay = name.partition("@")
    way, _, wire = name_of_way.partition("+")
    if way in ("nesterov", "average", "sparse", "partial"):
        options = {"sync": "local", "sync_every": every, "outer": way, "sync_delay": int(delay or 0)}
    if name == "auto":
        options = {"sync": "auto"}
    run = orchestrator.start_training(
        data, DataLoader(rows_of_text(256, 0), batch_size=64), step="language_step", optimizer="AdamW",
        optimizer_args={"lr": 2e-3}, scheduler="CosineAnnealingLR", scheduler_args={"T_max": steps}, progress=False,
        threads=1, fresh=True, check="off", seed=1, wire=wire or "fp32", **options,
    )  # fmt: skip
    report, seconds = run.report(), run.history[-1]["seconds"]
    records = run.history[-10:] if way in ("step", "alone") else run.history[-1:]
    told = [
        text for _, text in orchestrator._notices.numbered(20) if text.startswith("sync auto") or "longer than" in text
    ]
    return {
        "benchmark": "home_link", "case": name, "every": every if options.get("sync") else 1, "steps": report["steps"],
        "parameters": sum(one.numel() for one in run.model().parameters()), "seconds": round(seconds, 1),
        "gradient_bytes": run.wire.gradient_bytes, "all_bytes": run.wire.out_bytes + run.wire.in_bytes,
        "train_loss": round(sum(one["loss"] for one in records) / len(records), 4),
        "val_loss": round(report["val"]["loss"], 4), "busy": busy_share(run), "step_s": step_seconds(run, report["steps"]),
        "told": told,
    }  # fmt: skip


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


def busy_share(run: Any) -> float | None:
    """Which part of their time between the first and the last step the workers computed."""
    seconds = phase_seconds(run)
    total = sum(sum(each.values()) for each in seconds)
    idle = sum(each.get(name, 0.0) for each in seconds for name in ("waiting", "exchange"))
    return round(1 - idle / total, 3) if total else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=90)
    parser.add_argument("--every", type=int, default=30)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--slow", type=float, default=0.0)
    parser.add_argument(
        "--cases", nargs="+", default=["step", "step+int8", "average", "average+int8", "nesterov", "sparse", "alone"]
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    config = DistributedConfig(num_workers=2, master_ip="127.0.0.1", master_port=0, path="relay", compression="off")
    with Orchestrator(config) as orchestrator:
        code = orchestrator.join_code
        lines = [
            Relay(code.port, rate_bytes_s=UP_BYTES_S, down_bytes_s=DOWN_BYTES_S, round_trip_s=ROUND_TRIP_S)
            for _ in range(2)
        ]
        processes = [
            worker(code.with_address("127.0.0.1", line.port).encode(), f"home{k}") for k, line in enumerate(lines)
        ]
        try:
            orchestrator.wait_for_workers(timeout=120)
            orchestrator.share(f"{CELL}\nSLOW_S = {args.slow}\n", "gpt")
            orchestrator.register_model("ByteGPT", {"width": args.width, "layers": args.layers})
            for name in args.cases:
                print(json.dumps(case(orchestrator, name, args)), flush=True)
        finally:
            for process in processes:
                process.terminate()
            for line in lines:
                line.__exit__()


if __name__ == "__main__":
    main()
