"""SIGKILL of the notebook's kernel at random moments of a background session's run: its weights equal the undisturbed run's.

    python -m tests.benchmarks.background_kills [--kills 20] [--seed 0] [--epochs 10] [--process]

Each kernel starts the run by %guava_train and is killed after a random time, from before the first step to after the last one.
The next kernel attaches, waits for the end and takes the weights. Prints one JSON line for each kill: time, step and state that
it found (an earlier run: it was killed before its line was read), and the largest difference of any weight.

`--process` kills the background session's process instead, and has the worker in a kernel of its own: the next process finds the
session file, the worker comes back, and the run goes on with `--resume session` (or begins anew where no step was done).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from tests.integration.test_background import DATA, TRAIN, Notebook
from tests.integration.test_two_kernels import SHARE
from tests.support.kernels import Kernel
from tests.support.warm import install

WEIGHTS = (
    "import torch\nflat = torch.cat([v.double().flatten() for v in run.model().state_dict().values()])\n"
    "if 'plain.pt' not in __import__('os').listdir(): torch.save(flat, 'plain.pt')\n"
    "print(float((flat - torch.load('plain.pt', weights_only=True)).abs().max()), run.state, len(run.history), "
    "run.lost_samples, run.duplicated_samples)"
)


class Siege:
    """One notebook, its background session, and the weights of the undisturbed run.

    Args:
        kills_process: the session's process is killed, not the kernel; its worker is a kernel of its own.
    """

    def __init__(self, folder: Path, epochs: int, kills_process: bool) -> None:
        self.notebook = Notebook(folder)
        self.line = f"{TRAIN.removesuffix('--fresh')} --loss slow_loss --epochs {epochs}"
        self._up = "%guava_up --background --workers 1" if kills_process else "%guava_up --background --local 1"
        self.kernel = self.notebook.kernel()
        for cell in (SHARE, DATA):
            self.kernel.run(cell)
        shown = self.kernel.run(self._up, 180)
        if kills_process:
            gpu = Kernel()
            self.notebook.kernels.insert(0, gpu)
            gpu.run("%load_ext guava_nb")
            code = re.search(r"guava1:[\w-]+", shown)
            assert code, shown
            gpu.start(f"%guava_worker {code[0]} --name colab", 3600)
        self.kernel.run(f"run = {self.line} --fresh", 180)
        self.undisturbed = self.kernel.run(WEIGHTS).split()
        self.seconds = float(self.kernel.run("print(run.report()['wall_s'])"))

    def kill_kernel(self, after_s: float) -> dict[str, Any]:
        """Kill the kernel of a run, and follow the run from the next one."""
        self.kernel.start(f"{self.line} --fresh")
        threading.Event().wait(after_s)
        self.kernel = self.notebook.restarted()
        shown = self.kernel.run("%guava_up", 180)
        found = re.search(r"run-(\d+) is (\w+), step (\d+)", shown)
        assert found, shown
        self.kernel.run("run = %guava_status --follow", 180)
        return {"run": int(found[1]), "found": found[2], "step": int(found[3])}

    def kill_process(self, after_s: float) -> dict[str, Any]:
        """Kill the session's process in a run, and go on in the next one."""
        training = self.kernel.start(f"{self.line} --fresh", 180)
        threading.Event().wait(after_s)
        record = self.notebook.record
        assert record is not None
        os.kill(record.pid, signal.SIGKILL)
        training()
        assert "it goes on here with the same join code" in self.kernel.run(self._up, 180)
        status, text = self.kernel.attempt(f"run = {self.line} --resume session", 180)
        if status != "ok":
            assert "CheckpointError" in text, text
            self.kernel.run(f"run = {self.line} --fresh", 180)
        first = int(self.kernel.run("print(run.history[0]['step'] if run.history else 0)"))
        return {"went_on_after": first - 1, "told": text.strip().splitlines()[-1] if status != "ok" else ""}

    def compared(self) -> float:
        """The largest difference of any weight of the last run; raises where it is not over, or lost or doubled samples."""
        told = self.kernel.run(WEIGHTS, 180).split()
        assert (told[1], told[-2:]) == (self.undisturbed[1], ["0", "0"]), told
        return float(told[0])

    def close(self) -> None:
        """End all of it."""
        record = self.notebook.record
        for one in self.notebook.kernels:
            one.close()
        if record is not None and record.lives:
            os.kill(record.pid, signal.SIGKILL)


def main() -> None:
    """Read the line, and run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--process", action="store_true")
    args = parser.parse_args()
    install()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what it started ends with it
    chance, worst = random.Random(args.seed), 0.0
    with tempfile.TemporaryDirectory() as folder:
        siege = Siege(Path(folder), args.epochs, args.process)
        try:
            for kill in range(args.kills):
                after_s = chance.uniform(0, siege.seconds * 1.1)
                record = siege.kill_process(after_s) if args.process else siege.kill_kernel(after_s)
                difference = siege.compared()
                worst = max(worst, difference)
                print(
                    json.dumps({"kill": kill + 1, "after_s": round(after_s, 2), **record, "difference": difference}),
                    flush=True,
                )
            siege.kernel.run("%guava_down")
        finally:
            siege.close()
    print(json.dumps({"kills": args.kills, "worst_difference": worst}))


if __name__ == "__main__":
    main()
