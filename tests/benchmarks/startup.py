"""What a run costs before its first step and after its last: worker processes on this machine, loopback, TLS.

Prints one JSON line for each commit, size and number of workers. `first_step_s` is the time from start_training to the first
commit in a new session, `build_s` that of building the model once in this process (a run builds it here and at the workers side
by side: `beside_build_s` leaves out one of them), `second_run_s` a run of as many steps on the same workers right after it,
`steps_s` what its steps took by themselves, `overhead_s` the rest; then the bytes of each, and the time that run.model() takes
afterwards. Reach: beside_build_s <= 2 and overhead_s <= 0.3 at 124 M parameters. With `--base` a checkout of another commit is
measured in turn with this one. Medians over the rounds.

    python tests/benchmarks/startup.py [--parameters 10 124] [--workers 1 2] [--rounds 3] [--device D] [--base PATH] [--profile]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

LAYERS, ROWS = 12, 8
ROOT = Path(__file__).resolve().parents[2]
CELL = f"""
import torch

class Net(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range({LAYERS})))

    def forward(self, x):
        return self.body(x)
"""


def one_round(
    parameters: float, workers: int, steps: int, optimizer: str, profile: bool, device: str
) -> dict[str, float]:
    """Measure one session."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from guava_nb import DistributedConfig, Orchestrator

    torch.set_num_threads(1)
    width = int((parameters * 1e6 / LAYERS) ** 0.5)
    found: dict[str, Any] = {}
    exec(CELL, namespace := {})
    began = time.monotonic()
    namespace["Net"](width)
    found["build_s"] = time.monotonic() - began
    x = torch.randn(ROWS * steps, width)
    data = DataLoader(TensorDataset(x, torch.randn(ROWS * steps, width)), batch_size=ROWS)
    config = DistributedConfig(num_workers=workers, master_ip="127.0.0.1", master_port=0, path="relay")
    with Orchestrator(config) as orchestrator:
        orchestrator.launch_workers(workers, device=device, threads=1)
        orchestrator.wait_for_workers(timeout=180)
        orchestrator.share(CELL, "net")
        orchestrator.register_model("Net", {"width": width})

        def train() -> tuple[Any, float, float]:
            began = time.monotonic()
            run = orchestrator.start_training(
                data, criterion="MSELoss", optimizer=optimizer, optimizer_args={"lr": 1e-4}, progress=False, threads=1,
                check="off",
            )  # fmt: skip
            return run, run._started - began, time.monotonic() - began

        run, before_s, found["first_run_s"] = train()
        found["first_step_s"] = before_s + run.history[0]["seconds"]
        found["first_out_bytes"], found["first_in_bytes"] = run.wire.out_bytes, run.wire.in_bytes
        if profile:
            import cProfile
            import pstats
            import threading

            profiler = cProfile.Profile()
            threading.setprofile(lambda *event: profiler.enable())  # the run's own thread too, on Python 3.12 and later
            profiler.enable()
        run, _, found["second_run_s"] = train()
        if profile:
            profiler.disable()
            pstats.Stats(profiler, stream=sys.stderr).sort_stats("cumulative").print_stats(40)
        gaps = [b["seconds"] - a["seconds"] for a, b in zip(run.history, run.history[1:], strict=False)]
        found["steps_s"] = steps * statistics.median(gaps)
        found["overhead_s"] = found["second_run_s"] - found["steps_s"]
        found["second_before_first_s"] = run.history[0]["seconds"]
        found["second_out_bytes"], found["second_in_bytes"] = run.wire.out_bytes, run.wire.in_bytes
        began = time.monotonic()
        run.model()
        found["model_s"] = time.monotonic() - began
        began = time.monotonic()
    found["close_s"] = time.monotonic() - began
    found["beside_build_s"] = found["first_step_s"] - found["build_s"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, nargs="+", default=[10, 124], help="millions")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--optimizer", default="AdamW")
    parser.add_argument(
        "--device", default="cpu", help="of the workers; with auto each takes a GPU while there are some"
    )
    parser.add_argument("--base", type=Path, help="a checkout of another commit, measured in turn with this one")
    parser.add_argument("--profile", action="store_true", help="print where the second run spends its time")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        chosen = args.parameters[0], args.workers[0], args.steps, args.optimizer, args.profile, args.device
        print(json.dumps(one_round(*chosen)))
        return
    checkouts = {"this": ROOT, **({"base": args.base.resolve()} if args.base else {})}
    for parameters in args.parameters:
        for workers in args.workers:
            found: dict[str, list[dict[str, float]]] = {name: [] for name in checkouts}
            for _ in range(args.rounds):
                for name, path in checkouts.items():
                    command = [
                        sys.executable, __file__, "--child", "--parameters", str(parameters), "--workers", str(workers),
                        "--steps", str(args.steps), "--optimizer", args.optimizer, "--device", args.device,
                        *(["--profile"] if args.profile else []),
                    ]  # fmt: skip
                    environment = {**os.environ, "PYTHONPATH": str(path), "OMP_NUM_THREADS": "1"}
                    told = subprocess.run(
                        command, env=environment, stdout=subprocess.PIPE, text=True, check=True
                    ).stdout
                    found[name].append(json.loads(told.splitlines()[-1]))
            for name, rounds in found.items():
                medians = {key: round(statistics.median(one[key] for one in rounds), 3) for key in rounds[0]}
                head = {"benchmark": "startup", "commit": name, "million_parameters": parameters, "workers": workers}
                print(json.dumps({**head, "steps": args.steps, "rounds": args.rounds, **medians}), flush=True)


if __name__ == "__main__":
    main()
