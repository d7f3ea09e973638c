"""guava_nb as a contestant of `gpu.py`: an orchestrator with its workers, one block of steps per line read.

Run as a script with the tree to measure on PYTHONPATH, so an older commit takes part too. All blocks belong to one run: its
loader waits between blocks, so nothing of the run's beginning or end is in them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from gpu_rows.model import batches, make, optimizer_args
from gpu_rows.watch import FOLDER, REQUEST

MODES: dict[str, tuple[str, dict[str, Any]]] = {
    "lone": ("data", {}),
    "compiled": ("data", {}),
    "data": ("data", {"path": "direct"}),
    "zero1": ("zero", {"zero_stage": 1, "path": "direct"}),
    "zero3": ("zero", {"zero_stage": 3, "path": "direct"}),
    "pipeline": ("pipeline", {"path": "direct"}),
    "tensor": ("tensor", {"path": "direct"}),
}
#: Steps of a block that are not timed: the loader waited before them.
SKIPPED = 5


class Gate:
    """A loader that gives as many batches as were let through, and waits for more."""

    def __init__(self, size: str, rows: int) -> None:
        self._size, self._rows = size, rows
        self._left = threading.Semaphore(0)
        self._ends = False

    def open(self, steps: int) -> None:
        """Let so many batches through."""
        self._left.release(steps)

    def close(self) -> None:
        """End the epoch."""
        self._ends = True
        self._left.release()

    def __iter__(self) -> Iterator[Any]:
        for batch in batches(self._size, self._rows):
            self._left.acquire()
            if self._ends:
                return
            yield batch


class Side:
    """The orchestrator, its workers and the run that the blocks belong to."""

    def __init__(self, args: argparse.Namespace, watched: Path) -> None:
        from guava_nb import Orchestrator

        self.args, self.watched = args, watched
        started = time.perf_counter()
        make(args.size)
        self.build_s = time.perf_counter() - started
        self.orchestrator = Orchestrator(
            num_workers=args.world, precision="bf16", snapshot_every_steps=0, master_port=0
        )
        self.orchestrator.__enter__()
        for number in range(args.world):
            device = f"cuda:{number}" if args.device == "cuda" else "cpu"
            self.orchestrator.launch_workers(1, device=device, threads=None if args.device == "cuda" else 1)
        self.orchestrator.wait_for_workers(args.world, timeout=120)
        arguments = {"size": args.size, "compiled": args.row == "compiled"}
        self.orchestrator.register_model("gpu_rows.model:make", arguments)
        mode, settings = MODES[args.row]
        self.orchestrator.set_mode(mode, **settings)
        self.gate = Gate(args.size, args.rows)
        self.run: Any = None
        self.given, self.first_step_s = 0, 0.0

    def train(self, loader: Any, **options: Any) -> Any:
        """Start a run."""
        return self.orchestrator.start_training(
            loader, num_epochs=1, optimizer="AdamW", optimizer_args=optimizer_args(self.args.fused),
            criterion="CrossEntropyLoss", progress=False, check="off", **options,
        )  # fmt: skip

    def block(self, steps: int) -> dict[str, Any]:
        """Let so many batches through; returns milliseconds a step."""
        began, called = self.given, time.perf_counter()
        self.given += steps
        self.gate.open(steps)
        if self.run is None:
            self.run = self.train(self.gate, detach=True)
            self._wait_for(1)
            self.first_step_s = time.perf_counter() - called
        # The last one may be known only when the loader has told whether another one follows.
        self._wait_for(self.given - 1)
        ends = [record["seconds"] for record in self.run.history[began + SKIPPED : self.given - 1]]
        return {"step_ms": 1e3 * (ends[-1] - ends[0]) / (len(ends) - 1), "loss": self.run.history[-1]["loss"]}

    def _wait_for(self, steps: int) -> None:
        while len(self.run.history) < steps:
            if self.run.done:
                self.run.result()
                raise RuntimeError(f"the run ended after {len(self.run.history)} steps")
            time.sleep(0.002)

    def profile(self, steps: int, table: str) -> dict[str, Any]:
        """Do a block under the workers' profilers; returns the counts of the worker with the most memory."""
        (self.watched / REQUEST).touch()
        self._wait_for_files("started-*")
        self.block(steps)
        (self.watched / REQUEST).unlink()
        answers = [json.loads(path.read_text()) for path in self._wait_for_files("answer-*")]
        if table:
            for number, path in enumerate(sorted(self.watched.glob("table-*"))):
                Path(table.replace("RANK", str(number))).write_text(path.read_text())
        return max(answers, key=lambda answer: answer["peak_bytes"])

    def _wait_for_files(self, pattern: str) -> list[Path]:
        until = time.monotonic() + 60
        while len(found := sorted(self.watched.glob(pattern))) < self.args.world:
            if time.monotonic() > until:
                raise RuntimeError(f"{len(found)} of {self.args.world} workers answered the profile's request")
            time.sleep(0.01)
        return found

    def around(self, steps: int) -> dict[str, Any]:
        """End the run; then time a second one of a few steps, from the call to its return."""
        began = time.perf_counter()
        self.gate.close()
        self.run.result()
        end_s = time.perf_counter() - began
        began = time.perf_counter()
        second = self.train(_Some(self.args.size, self.args.rows, steps))
        second_s = time.perf_counter() - began
        return {
            "build_s": self.build_s,
            "first_step_s": self.first_step_s,
            "end_s": end_s,
            "second_run_s": second_s,
            "second_run_first_step_s": second.history[0]["seconds"],
            "path": str(self.run.report().get("path")),
        }


class _Some:
    """So many batches."""

    def __init__(self, size: str, rows: int, steps: int) -> None:
        self._args, self._steps = (size, rows), steps

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[Any]:
        for _, batch in zip(range(self._steps), batches(*self._args), strict=False):
            yield batch


def main() -> None:
    """Answer each line with one line."""
    parser = argparse.ArgumentParser()
    for name, kind in (("row", str), ("size", str), ("device", str), ("rows", int), ("world", int)):
        parser.add_argument(f"--{name}", type=kind)
    parser.add_argument("--fused", action="store_true")
    args = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what anybody prints is not an answer
    if args.device == "cpu":
        torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.environ[FOLDER] = folder
        side = Side(args, Path(folder))
        try:
            print(json.dumps({"ready": True}), file=answers)
            for line in sys.stdin:
                order = json.loads(line)
                print(json.dumps(getattr(side, order.pop("do"))(**order)), file=answers)
        finally:
            side.orchestrator.__exit__(None, None, None)


if __name__ == "__main__":
    main()
