"""What `sync="auto"` tells of each way to exchange beside what that way takes, where its choice changes from one to another.

    python -m tests.benchmarks.sync_border [--line home] [--width 96] [--row-s 0.1] [--steps 30] [--ways 0 1 5 15 30]

As `home_link`, whose model, lines and sleeping steps these are. In one session a forecast with `sync="auto"` measures lines
and has steps played; then each way is trained as it was told: 0 is one worker alone (only told), 1 an exchange in every step,
others the rounds of so many steps, with the delay and the wire format that `auto` would take. Prints one JSON line for each
way: seconds told and taken, their ratio, validation loss, whether it was chosen. A last one tells how much longer the chosen
way took than the fastest of those that were trained.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch
from torch.utils.data import DataLoader

from guava_nb import Orchestrator
from tests.benchmarks import home_link
from tests.benchmarks.home_link import LINES, case, rows_of_text


def told(orchestrator: Orchestrator, args: argparse.Namespace) -> Any:
    """Return the choice of `auto` for the run that the cases are."""
    data = DataLoader(rows_of_text(args.steps * args.batch, 20), batch_size=args.batch)
    made = orchestrator.forecast(
        data, DataLoader(rows_of_text(256, 0), batch_size=64), step="language_step", optimizer=args.optimizer,
        optimizer_args={"lr": args.lr}, scheduler="CosineAnnealingLR", scheduler_args={"T_max": args.steps}, threads=1,
        fresh=True, check="off", seed=1, sync="auto",
    )  # fmt: skip
    assert made.sync is not None and made.sync.ways, made.sync
    return made.sync


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--line", choices=LINES, default="home")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--row-s", type=float, default=0.1)
    parser.add_argument("--ways", nargs="+", type=int, default=[0, 1, 5, 15, 30])
    args = parser.parse_args()
    args.table, args.optimizer, args.lr, args.stop = 0, "AdamW", 2e-3, 0
    torch.set_num_threads(1)
    with home_link.session(args.workers, args) as orchestrator:
        choice, taken = told(orchestrator, args), dict[int, float]()
        for way in choice.ways:
            row = {
                "benchmark": "sync_border", "line": args.line, "workers": args.workers, "every": way.every,
                "sync_delay": way.sync_delay, "told_s": round(way.run_s, 1), "told_bytes": way.run_bytes,
                "chosen": way.every == choice.sync_every,
            }  # fmt: skip
            if way.every in args.ways and way.every:
                args.every = way.every
                name = "step" if way.every == 1 else f"average+int4@{way.sync_delay}"
                found = case(orchestrator, name, args)
                taken[way.every] = found["seconds"]
                kept = ("case", "parameters", "steps", "step_s", "seconds", "laptop_bytes", "busy", "val_loss")
                row |= {key: found[key] for key in kept} | {"ratio": round(found["seconds"] / way.run_s, 2)}
            print(json.dumps(row), flush=True)
    fastest = min(taken.values())
    chosen = taken.get(choice.sync_every)
    over = None if chosen is None else round(chosen / fastest, 2)
    print(json.dumps({"benchmark": "sync_border", "chosen_to_fastest": over, "told": choice.sentence}), flush=True)


if __name__ == "__main__":
    main()
