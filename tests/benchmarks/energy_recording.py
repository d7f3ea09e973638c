"""Records a GPU for lesson 08: idle, a training with small batches, idle, the same samples with large ones, idle.

    python -m tests.benchmarks.energy_recording gpu.json [--device cuda:0] [--epochs 8]

One worker on the GPU trains a convolutional network on the digits, 20 times over; this process reads NVML ten times a second
meanwhile. The file is what `EnergyRecording.load` reads; `guava_nb/assets/gpu_energy.json` was recorded so.
"""

from __future__ import annotations

import argparse
import time

from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from guava_nb import Orchestrator
from guava_nb.datasets.digits import split_digits
from guava_nb.telemetry import EnergyRecorder

IDLE_S = 4.0
BATCHES = (32, 2048)


def build(width: int = 512) -> nn.Module:
    """Two convolutions: much to compute for each byte that is sent."""

    def convolution(channels: int) -> nn.Module:
        return nn.Conv2d(channels, width, 3, padding=1)

    return nn.Sequential(
        nn.Unflatten(1, (1, 8)), convolution(1), nn.ReLU(), convolution(width), nn.ReLU(), nn.Flatten(),
        nn.Linear(64 * width, 10),
    )  # fmt: skip


def main() -> None:
    """Record, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("path")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--epochs", type=int, default=8)
    args = parser.parse_args()
    (images, labels), _ = split_digits(seed=0)
    data = TensorDataset(images.repeat(20, 1, 1) / 16, labels.repeat(20))
    with Orchestrator(num_workers=1) as orchestrator:
        orchestrator.launch_workers(1, device=args.device)
        orchestrator.wait_for_workers(1, timeout=120)
        orchestrator.register_model("tests.benchmarks.energy_recording:build")
        with EnergyRecorder(args.device) as recorder:
            for rows in BATCHES:
                time.sleep(IDLE_S)
                with recorder.run(f"batches of {rows}") as keep:
                    run = orchestrator.start_training(
                        DataLoader(data, rows, shuffle=True), num_epochs=args.epochs, criterion="CrossEntropyLoss",
                        fresh=True, progress=False,
                    )  # fmt: skip
                    keep(run.energy_record())
            time.sleep(IDLE_S)
    recorder.recording().save(args.path)


if __name__ == "__main__":
    main()
