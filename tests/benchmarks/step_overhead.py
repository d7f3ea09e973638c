"""What a step costs more than in plain PyTorch: one worker process, loopback, TLS, a step of at least 20 ms.

Prints one JSON line. `ratio` is the median time from commit to commit with guava over the median time of a step of the same
loop in plain PyTorch (a process of its own, as long-lived as the worker, with as many threads); reach: <= 1.05. The two are
measured in turn, block by block, in one run on one machine; the ratio is that of the medians over all blocks.

    python -m tests.benchmarks.step_overhead [--rounds 15] [--steps 40]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

import torch
from torch.utils.data import DataLoader, TensorDataset

WIDTH, DEPTH, ROWS = 512, 6, 256


class Net(torch.nn.Module):
    """A perceptron whose step takes some tens of milliseconds on one core."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[torch.nn.Module] = []
        for _ in range(DEPTH):
            layers += [torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU()]
        self.body = torch.nn.Sequential(*layers, torch.nn.Linear(WIDTH, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def data(steps: int) -> DataLoader[tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS * 8, WIDTH, generator=generator)
    y = torch.randint(0, 10, (ROWS * 8,), generator=generator)
    sampler = [list(range((k % 8) * ROWS, (k % 8 + 1) * ROWS)) for k in range(steps)]
    return DataLoader(TensorDataset(x, y), batch_sampler=sampler)


def plain_server() -> None:
    """The same loop in plain PyTorch, in a process as long-lived as the worker's: one block of steps per line read."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    criterion = torch.nn.CrossEntropyLoss()
    for line in sys.stdin:
        ends = []
        for x, y in data(int(line)):
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
            float(loss.detach())
            ends.append(time.perf_counter())
        print(statistics.median(gaps(ends)), flush=True)


def gaps(ends: list[float]) -> list[float]:
    """Seconds from the end of a step to the end of the next, without the first few."""
    return [b - a for a, b in zip(ends[3:], ends[4:], strict=False)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--plain", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.plain:
        plain_server()
        return

    from guava_nb import DistributedConfig, Orchestrator

    torch.set_num_threads(1)
    plain, ours = [], []
    config = DistributedConfig(num_workers=1, master_ip="127.0.0.1", master_port=0, snapshot_every_steps=0)
    command = [sys.executable, "-m", "tests.benchmarks.step_overhead", "--plain"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # what the worker process gets too
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as server,
        Orchestrator(config) as orchestrator,
    ):
        assert server.stdin is not None and server.stdout is not None
        orchestrator.launch_workers(1, threads=1)
        orchestrator.wait_for_workers(timeout=120)
        orchestrator.register_model("tests.benchmarks.step_overhead:Net")
        for _ in range(args.rounds):
            server.stdin.write(f"{args.steps}\n")
            server.stdin.flush()
            plain.append(float(server.stdout.readline()))
            run = orchestrator.start_training(
                data(args.steps), optimizer="AdamW", optimizer_args={"lr": 1e-3}, progress=False, threads=1
            )
            ours.append(statistics.median(gaps([record["seconds"] for record in run.history])))
    ratios = [a / b for a, b in zip(ours, plain, strict=True)]
    print(
        json.dumps(
            {
                "benchmark": "step_overhead",
                "ratio": round(statistics.median(ours) / statistics.median(plain), 4),
                "median_of_ratios": round(statistics.median(ratios), 4),
                "reach": 1.05,
                "plain_step_ms": round(1e3 * statistics.median(plain), 3),
                "guava_step_ms": round(1e3 * statistics.median(ours), 3),
                "rounds": [round(r, 4) for r in ratios],
                "torch": torch.__version__,
            }
        )
    )


if __name__ == "__main__":
    main()
