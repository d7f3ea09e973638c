"""SIGKILL of the notebook's kernel at random moments of a background session's run: its weights equal the undisturbed run's.

    python -m tests.benchmarks.background_kills [--kills 20] [--seed 0]

Each kernel starts the run by %guava_train and is killed after a random time, from before the first step to after the last one.
The next kernel attaches, waits for the end and takes the weights. Prints one JSON line for each kill: time, step and state that
it found (an earlier run: it was killed before its line was read), and the largest difference of any weight.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import tempfile
import threading
from pathlib import Path

from tests.integration.test_background import DATA, TRAIN, Notebook
from tests.integration.test_two_kernels import SHARE
from tests.support.warm import install

WEIGHTS = (
    "import torch\nflat = torch.cat([v.double().flatten() for v in run.model().state_dict().values()])\n"
    "if 'plain.pt' not in __import__('os').listdir(): torch.save(flat, 'plain.pt')\n"
    "print(float((flat - torch.load('plain.pt', weights_only=True)).abs().max()), run.state, len(run.history), "
    "run.lost_samples, run.duplicated_samples)"
)
LINE = f"{TRAIN} --loss slow_loss --epochs 2"


def main() -> None:
    """Read the line, and run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    install()
    chance, worst = random.Random(args.seed), 0.0
    with tempfile.TemporaryDirectory() as folder:
        notebook = Notebook(Path(folder))
        kernel = notebook.kernel()
        try:
            for cell in (SHARE, DATA, "%guava_up --background --local 1", f"run = {LINE}", WEIGHTS):
                undisturbed = kernel.run(cell, 180)
            seconds = float(kernel.run("print(run.report()['wall_s'])"))
            for kill in range(args.kills):
                kernel.start(LINE)
                after_s = chance.uniform(0, seconds * 1.2)
                threading.Event().wait(after_s)
                kernel = notebook.restarted()
                shown = kernel.run("%guava_up", 180)
                found = re.search(r"run-(\d+) is (\w+), step (\d+)", shown)
                assert found, shown
                kernel.run("run = %guava_status --follow", 180)
                told = kernel.run(WEIGHTS).split()
                assert told[1:] == undisturbed.split()[1:], (told, undisturbed)
                worst = max(worst, float(told[0]))
                record = {"kill": kill + 1, "after_s": round(after_s, 2), "run": int(found[1]), "found": found[2]}
                print(json.dumps({**record, "step": int(found[3]), "difference": float(told[0])}), flush=True)
            kernel.run("%guava_down")
        finally:
            for one in notebook.kernels:
                one.close()
    print(json.dumps({"kills": args.kills, "worst_difference": worst}))


if __name__ == "__main__":
    main()
