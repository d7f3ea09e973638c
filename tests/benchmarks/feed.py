"""How well batches reach a worker over a home link: rate while streaming, bytes with the worker's cache, the hub's memory.

    python -m tests.benchmarks.feed [--batches 400] [--mbit 200] [--round-trip 0.05] [--only stream|cache|memory]

One worker process behind the link emulator; real sessions with TLS. Prints one JSON line:

- `stream_ratio`: bytes of samples per second over the link's rate, 32x32x3 uint8 images in batches of 256, timed from the
  commit of a tenth of the steps to that of the last; reach >= 0.95
- `epoch_sample_bytes`: bytes of samples sent in each of three epochs with `worker_cache="memory"`; reach 0 from the second on
- `memory_growth_mb`: by how much the orchestrator's memory grew between the fifth step and the largest value later, while a
  worker takes a second a step and a batch has 50 MB; flat means: less than one batch
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Iterator
from typing import Any

import psutil
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from guava_nb import DistributedConfig, Orchestrator
from guava_nb.processes.local_workers import launch
from tests.support.relay import Relay

IMAGE = (3, 32, 32)
ROWS = 256
BIG_ROWS = 256
BIG_VALUES = 50_000_000 // 4 // BIG_ROWS


class Net(torch.nn.Module):
    """A classifier of byte images, quick enough that the link is what limits."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(3 * 32 * 32, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(images.flatten(1).float().div_(255))


class Wide(torch.nn.Module):
    """Takes one value of each row of a batch of 50 MB."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(1, 1)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.head(rows[:, :1])


def slow_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A worker that takes a second a step."""
    time.sleep(1.0)
    return torch.nn.functional.mse_loss(outputs, targets)


class Big(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Rows that are made when they are asked for, so that the data set itself takes no memory."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((BIG_VALUES,), float(index)), torch.zeros(1)


def images(count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (count, *IMAGE), dtype=torch.uint8, generator=generator)
    return TensorDataset(pixels, torch.randint(0, 10, (count,), generator=generator))


@contextlib.contextmanager
def session(rate: float | None, round_trip_s: float, model: str, **settings: Any) -> Iterator[Orchestrator]:
    """An orchestrator with one worker behind the emulator."""
    config = DistributedConfig(num_workers=1, master_ip="127.0.0.1", master_port=0, snapshot_every_steps=0, **settings)
    with Orchestrator(config) as orchestrator, contextlib.ExitStack() as stack:
        code = orchestrator.join_code
        if rate is not None:
            relay = stack.enter_context(Relay(code.port, rate_bytes_s=rate, round_trip_s=round_trip_s))
            code = code.with_address("127.0.0.1", relay.port)
        worker = launch(code, "cpu", "far", 1, orchestrator.log_folder, config)
        stack.callback(worker.close)
        orchestrator.wait_for_workers(timeout=120)
        orchestrator.register_model(f"tests.benchmarks.feed:{model}")
        yield orchestrator


def stream(rate: float, round_trip_s: float, batches: int) -> dict[str, float]:
    dataset = images(16 * ROWS)
    order = [list(range((k % 16) * ROWS, (k % 16 + 1) * ROWS)) for k in range(batches)]
    with session(rate, round_trip_s, "Net") as orchestrator:
        loader = DataLoader(dataset, batch_sampler=order)
        run = orchestrator.start_training(loader, optimizer="SGD", optimizer_args={"lr": 0.01}, progress=False)
        seconds = [record["seconds"] for record in run.history]
        report = run.report()
    first = batches // 10
    batch_bytes = ROWS * (3 * 32 * 32 + 8)
    carried = (batches - 1 - first) * batch_bytes / (seconds[-1] - seconds[first])
    return {"stream_ratio": round(carried / rate, 4), "waits": report.get("waits")}


class SampleBytes:
    """A callback: sample bytes at the end of each epoch."""

    def __init__(self) -> None:
        self.totals = [0]

    def on_epoch(self, run: Any, record: dict[str, Any]) -> None:
        self.totals.append(run.wire.sample_bytes)


def cache(rate: float, round_trip_s: float) -> dict[str, Any]:
    counted = SampleBytes()
    with session(rate, round_trip_s, "Net", worker_cache="memory") as orchestrator:
        loader = DataLoader(images(16 * ROWS), batch_size=ROWS, shuffle=True)
        orchestrator.start_training(
            loader, num_epochs=3, optimizer="SGD", optimizer_args={"lr": 0.01}, callbacks=[counted], progress=False
        )
    totals = counted.totals
    return {"epoch_sample_bytes": [b - a for a, b in zip(totals, totals[1:], strict=False)]}


class Memory:
    """A callback: this process's memory after each step, in MB."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_step(self, run: Any, record: dict[str, Any]) -> None:
        self.values.append(psutil.Process().memory_info().rss / 1e6)


def memory(steps: int = 20) -> dict[str, Any]:
    watched = Memory()
    with session(None, 0.0, "Wide") as orchestrator:
        loader = DataLoader(Big(BIG_ROWS * steps), batch_size=BIG_ROWS)
        orchestrator.start_training(
            loader, criterion="tests.benchmarks.feed:slow_loss", optimizer="SGD", optimizer_args={"lr": 0.0},
            callbacks=[watched], progress=False,
        )  # fmt: skip
    return {
        "memory_growth_mb": round(max(watched.values[5:]) - watched.values[4], 1),
        "memory_mb": [round(value) for value in watched.values],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, default=400)
    parser.add_argument("--mbit", type=float, default=200.0)
    parser.add_argument("--round-trip", type=float, default=0.05, help="seconds")
    parser.add_argument("--only", choices=["stream", "cache", "memory"])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rate = arguments.mbit * 1e6 / 8
    parts = {
        "stream": lambda: stream(rate, arguments.round_trip, arguments.batches),
        "cache": lambda: cache(rate, arguments.round_trip),
        "memory": memory,
    }
    result: dict[str, Any] = {"benchmark": "feed", "mbit_s": arguments.mbit, "round_trip_s": arguments.round_trip}
    for name, part in parts.items():
        if arguments.only in (None, name):
            result.update(part())
    print(json.dumps(result))


if __name__ == "__main__":
    main()
