"""A lone worker behind 20 Mbit/s up: bytes of its state on the line, and the seconds of work that a kill and a lost disk cost.

    python -m tests.benchmarks.thin_line [--steps 2000] [--width 256] [--layers 4] [--place worker]
    ... --table 960000 --width 128 --layers 2 --optimizer SGD --lr 0.1 --row-s 0.125 --cases killed      # 124 M parameters

A byte-level GPT, built from the seed, on the sources of Python's standard library, by a worker process behind a line of
20 Mbit/s up, 100 Mbit/s down and 60 ms. Prints one JSON line for each case: `undisturbed`; `killed`, where the process gets a
SIGKILL after three quarters of the steps; `disk lost`, where its files go too. `state_bytes` are those of both directions beside
batches and the state that is left at the end, `of_60_MB` their part of what 60 MB for 124 million parameters are for this model.
A small model's control messages (`control_bytes`, about 300 bytes a step whatever the model) are shown apart. `--table` and
`--row-s` are those of `home_link`: many parameters that cost little to compute, and steps that sleep as on a slower device.
`--batch` rows of `--context` bytes are a step, so that two cores compute one of a large model.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from guava_nb import DistributedConfig, Orchestrator
from guava_nb.processes.local_workers import WorkerHandle, launch
from tests.benchmarks.home_link import (
    CELL,
    CONTEXT,
    DOWN_BYTES_S,
    ROUND_TRIP_S,
    UP_BYTES_S,
    num_parameters,
    rows_of_text,
)
from tests.support.relay import Relay

REACH_BYTES, OF_PARAMETERS = 60e6, 124e6


def case(name: str, args: argparse.Namespace) -> dict[str, Any]:
    home = Path(tempfile.mkdtemp())
    os.environ["XDG_STATE_HOME"] = str(home)
    config = DistributedConfig(
        num_workers=1, master_ip="127.0.0.1", master_port=0, compression="off", snapshot_place=args.place, grace_s=2.0
    )
    seen: list[tuple[float | None, float | None]] = []
    with Orchestrator(config) as orchestrator:
        code = orchestrator.join_code
        line = Relay(code.port, rate_bytes_s=UP_BYTES_S, down_bytes_s=DOWN_BYTES_S, round_trip_s=ROUND_TRIP_S)
        handle = launch(code.with_address("127.0.0.1", line.port), "cpu", "home", 1)
        try:
            orchestrator.wait_for_workers(timeout=120)
            orchestrator.share(f"{CELL}\nROW_S = {args.row_s}\n", "gpt")
            orchestrator.register_model("ByteGPT", {"width": args.width, "layers": args.layers, "table": args.table})
            rows = rows_of_text(args.steps * args.batch, 20).tensors[0][:, : args.context + 1]
            data = DataLoader(TensorDataset(rows), batch_size=args.batch)
            run = orchestrator.start_training(
                data, step="language_step", optimizer=args.optimizer, optimizer_args={"lr": args.lr}, progress=False,
                threads=1, check="off", seed=1, detach=True,
            )  # fmt: skip
            while len(run.history) < args.steps * 3 // 4 and not run.done:
                time.sleep(0.5)
                status = run.status()
                seen.append((status.at_risk_killed_s, status.at_risk_s))
            if name != "undisturbed":
                handle = _strike(name, handle, home, code.with_address("127.0.0.1", line.port))
            run.result()
            wire, steps, parameters = run.wire, len(run.history), num_parameters(args)
            state = wire.parameter_bytes or 0
            share = state / (REACH_BYTES * parameters / OF_PARAMETERS)
            return {
                "benchmark": "thin_line", "case": name, "parameters": parameters, "steps": steps,
                "seconds": round(run.history[-1]["seconds"], 1), "state_bytes": state, "of_60_MB": round(share, 3),
                "exact_state_bytes": (12 if args.optimizer == "AdamW" else 4) * parameters, "control_bytes": wire.control_bytes,
                "all_bytes": wire.out_bytes + wire.in_bytes, "sample_bytes": wire.sample_bytes,
                "most_at_risk_killed_s": _most(one for one, _ in seen), "most_at_risk_s": _most(one for _, one in seen),
                "losses": run.losses, "approximate": run.approximate,
                "train_loss": round(sum(one["loss"] for one in run.history[-50:]) / 50, 4),
            }  # fmt: skip
        finally:
            handle.kill()  # politely it would hand its state over, over its line
            handle.close()
            line.__exit__()
            shutil.rmtree(home, ignore_errors=True)


def _strike(name: str, handle: WorkerHandle, home: Path, code: Any) -> WorkerHandle:
    if name == "killed":
        os.kill(handle.pid, signal.SIGKILL)
        return handle
    handle.kill()
    handle.wait(10)
    shutil.rmtree(home, ignore_errors=True)
    return launch(code, "cpu", "other", 1)


def _most(found: Any) -> float | None:
    known = [one for one in found if one is not None]
    return round(max(known), 1) if known else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--table", type=int, default=0)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--context", type=int, default=CONTEXT)
    parser.add_argument("--optimizer", default="AdamW")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--row-s", type=float, default=0.0)
    parser.add_argument("--place", default="auto", choices=("auto", "worker", "orchestrator"))
    parser.add_argument("--cases", nargs="+", default=["undisturbed", "killed", "disk lost"])
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in args.cases:
        print(json.dumps(case(name, args)), flush=True)


if __name__ == "__main__":
    main()
