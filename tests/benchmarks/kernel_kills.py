"""SIGKILL of the orchestrator's process at random moments of a run: what the next one resumes equals the undisturbed run.

    python -m tests.benchmarks.kernel_kills [--kills 20] [--workers 1] [--seed 0] [--epochs 4] [--every 0]

Workers are processes of their own; `--every` has them train in rounds of so many local steps. Each orchestrator goes on with the
run in which the one before was killed, compares the final weights, and begins the next one. Prints one JSON line for each kill:
the moment, the last step that was told before it, the step from which the run went on (0: it was killed before its first step and
began anew), and the largest difference of any weight.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import IO

#: With dropout and a shuffled loader: the states of both generators have to come back too.
CELL = """
import time
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 4))

    def forward(self, x):
        return self.body(x)

def loss_fn(outputs, targets):
    time.sleep(0.02)
    return nn.functional.cross_entropy(outputs, targets)
"""
ROWS, BATCH = 208, 16


def orchestrate(folder: Path, workers: int, epochs: int, every: int) -> None:
    """Be one orchestrator: end the run of the one before if there is one, then train until this process is killed."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from guava_nb import DistributedConfig, Orchestrator
    from guava_nb.errors import CheckpointError

    def loader() -> DataLoader:
        rows = torch.Generator().manual_seed(1)
        x, y = torch.randn(ROWS, 10, generator=rows, dtype=torch.float64), torch.randint(0, 4, (ROWS,), generator=rows)
        return DataLoader(TensorDataset(x, y), BATCH, shuffle=True, generator=torch.Generator().manual_seed(2))

    def tell(**facts: object) -> None:
        print(json.dumps(facts), flush=True)

    def train(**options: object) -> None:
        tell(event="begun")
        run = orch.start_training(
            loader(), num_epochs=epochs, criterion="loss_fn", optimizer="AdamW", optimizer_args={"lr": 0.01}, progress=False,
            callbacks=[Told()], **({"sync": "local", "sync_every": every} if every else {}), **options,
        )  # fmt: skip
        run.result()
        weights = {name: value.double() for name, value in run.model().state_dict().items()}
        if not reference.exists():
            torch.save(weights, reference)
        plain = torch.load(reference, weights_only=True)
        first = run.history[0]["step"] - run.history[0].get("steps", 1) + 1 if run.history else 0
        gap = max(float((weights[name] - plain[name]).abs().max()) for name in plain)
        tell(event="done", first=first, difference=gap, lost=run.lost_samples, doubled=run.duplicated_samples)

    class Told:
        def on_step(self, run: object, record: dict[str, object]) -> None:
            tell(event="step", step=record["step"])

    reference = folder / "undisturbed.pt"
    config = DistributedConfig(
        num_workers=workers,
        precision="fp64",
        session_file=str(folder / "session.json"),
        threads_per_worker=1,
        path="relay",
    )
    with Orchestrator(config) as orch:
        tell(event="open", code=orch.open().encode())
        orch.share(CELL, "net")
        orch.register_model("Net")
        orch.wait_for_workers(timeout=120)
        if reference.exists():
            try:
                train(resume="session")
            except CheckpointError as nothing:  # it was killed before the first step
                tell(event="nothing", why=str(nothing))
                train(fresh=True)
        while True:
            train(fresh=True)


class Child:
    """An orchestrator's process and what it told last."""

    def __init__(self, arguments: list[str]) -> None:
        words = [sys.executable, "-m", "tests.benchmarks.kernel_kills", "--orchestrate", *arguments]
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        self.told: list[dict[str, object]] = []
        self._news = threading.Condition()
        self._thread = threading.Thread(target=self._read, args=(self.process.stdout,), daemon=True)
        self._thread.start()

    def _read(self, lines: IO[str]) -> None:
        for line in lines:
            if line.startswith("{"):
                with self._news:
                    self.told.append(json.loads(line))
                    self._news.notify_all()
        with self._news:
            self._news.notify_all()

    def wait_for(self, event: str, count: int = 1, timeout_s: float = 240) -> dict[str, object]:
        """Return the `count`-th record of this kind."""

        def found() -> list[dict[str, object]]:
            return [record for record in list(self.told) if record["event"] == event]

        with self._news:
            self._news.wait_for(lambda: len(found()) >= count or not self._thread.is_alive(), timeout_s)
        assert len(found()) >= count, f"the orchestrator did not tell {event!r}; it told last {self.told[-3:]}"
        return found()[count - 1]

    def kill(self) -> None:
        """As the system does when memory runs out."""
        self.process.kill()
        self.process.wait()
        self._thread.join()


def _told_steps(epochs: int, every: int) -> int:
    """Return how many steps, or rounds, a run tells of."""
    return epochs * -(-ROWS // BATCH // max(1, every))


def kill_and_compare(
    kills: int, workers: int, seed: int, epochs: int, every: int, folder: Path
) -> list[dict[str, object]]:
    """Kill so many times; returns and prints one record for each."""
    from guava_nb.processes.local_workers import close_all, launch

    arguments = [str(folder), "--workers", str(workers), "--epochs", str(epochs), "--every", str(every)]
    chance, records = random.Random(seed), []
    child = Child(arguments)
    code = str(child.wait_for("open")["code"])
    from guava_nb.protocol.joincode import JoinCode

    handles = [launch(JoinCode.decode(code), "cpu", f"w{k}", 1) for k in range(workers)]
    try:
        child.wait_for("done")
        runs = 2
        for kill in range(kills):
            began = child.wait_for("begun", runs)
            at = len([record for record in child.told if record["event"] == "step"])
            after_steps, delay_s = chance.randrange(0, _told_steps(epochs, every) - 1), chance.uniform(0, 0.06)
            if after_steps:
                child.wait_for("step", at + after_steps)
            time.sleep(delay_s)
            child.kill()
            steps = [record["step"] for record in child.told[child.told.index(began) :] if record["event"] == "step"]
            last = child.told[-1]["step"] if child.told[-1]["event"] == "step" else 0
            assert steps or not last
            child, runs = Child(arguments), 2
            done = child.wait_for("done")
            anew = any(record["event"] == "nothing" for record in child.told)
            runs += anew
            went_on = 0 if anew else int(str(done["first"])) - 1
            record = {
                "kill": kill + 1, "after_s": round(delay_s, 3), "told_step": last, "went_on_after": went_on,
                **{key: done[key] for key in ("difference", "lost", "doubled")},
            }  # fmt: skip
            print(json.dumps(record), flush=True)
            records.append(record)
    finally:
        child.kill()
        close_all(handles)
    return records


def main() -> None:
    """Read the line, and run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", nargs="?")
    parser.add_argument("--orchestrate", action="store_true")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--every", type=int, default=0)
    args = parser.parse_args()
    if args.orchestrate:
        orchestrate(Path(args.folder), args.workers, args.epochs, args.every)
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        records = kill_and_compare(args.kills, args.workers, args.seed, args.epochs, args.every, Path(folder))
    worst = max(float(str(record["difference"])) for record in records)
    print(json.dumps({"kills": len(records), "worst_difference": worst}))


if __name__ == "__main__":
    main()
