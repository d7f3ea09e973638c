"""What measuring energy costs a training step.

Prints one JSON line. `ratio` is the median time of a step with the meter's thread running over the median without it, the two
measured in turn, block by block, in one process; reach: <= 1.01. `readings` says that the meter did read meanwhile,
`methods` what.

    python -m tests.benchmarks.energy_cost [--device cuda] [--rounds 20] [--steps 100]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import time
from collections.abc import Iterator

import torch

from guava_nb.telemetry import Board, EnergyMeter, Sensor

DEPTH = 8
#: Width of the layers and rows of a batch: a step takes some tens of milliseconds on a large GPU, and on one core of a CPU.
SIZES = {"cuda": (2048, 4096), "cpu": (1024, 128)}


class Constant(Sensor):
    """Where nothing can be measured the thread has something to read all the same; its figure is not reported."""

    board, method, counts = Board("none", "none"), "constant", False

    def read(self) -> float:
        return 1.0


def step_maker(device: torch.device) -> object:
    torch.manual_seed(0)
    width, rows = SIZES[device.type]
    layers = [part for _ in range(DEPTH) for part in (torch.nn.Linear(width, width), torch.nn.ReLU())]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(width, 10)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, y = torch.randn(rows, width, device=device), torch.randint(0, 10, (rows,), device=device)

    def step() -> float:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return float(loss.detach())  # waits for the device, as a loop that shows its loss does

    return step


@contextlib.contextmanager
def measured(device: torch.device, on: bool, seen: dict[str, int]) -> Iterator[None]:
    if not on:
        yield
        return
    meter = EnergyMeter([device])
    if not meter._followed:
        meter = EnergyMeter(sensors=[Constant()])
    with meter:
        yield
    assert meter.window is not None
    for board in meter.window.boards:
        seen[board.method] = seen.get(board.method, 0) + board.readings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    device, seen = torch.device(args.device), {}
    step = step_maker(device)
    for _ in range(20):
        step()
    times: dict[bool, list[float]] = {False: [], True: []}
    for number in range(2 * args.rounds):
        on = (number + number // 2) % 2 == 1  # off on, on off: a drift of the machine hits both alike
        with measured(device, on, seen):
            for _ in range(args.steps):
                started = time.perf_counter()
                step()
                times[on].append(time.perf_counter() - started)
    without, with_meter = (statistics.median(times[on]) for on in (False, True))
    print(
        json.dumps(
            {
                "benchmark": "energy_cost", "device": str(device), "step_s": without, "step_with_meter_s": with_meter,
                "ratio": with_meter / without, "reach": 1.01, "readings": sum(seen.values()), "methods": sorted(seen),
            }
        )
    )  # fmt: skip


if __name__ == "__main__":
    main()
