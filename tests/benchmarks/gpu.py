"""guava_nb on one and two GPUs beside what PyTorch has for each mode, in one run on one machine.

    python -m tests.benchmarks.gpu [--rows data,zero3] [--profile DIR] [--beside PATH_OF_ANOTHER_TREE] [--check-cpu]

GPT-2 124M, bf16 autocast, AdamW, 16 x 1024 tokens for each GPU and step (`tensor`: 16 rows in all). Each contestant has processes
of its own; their blocks of steps take turns. One JSON line a row: tokens/s of each, the median of the ratios of all pairs with
the lower end of a one-sided 95 % interval of their mean (Student), peak memory of one GPU, waits of the host for the device in a
step, and seconds around a run. A row that fails says why, and the others go on. `--beside` measures another commit in the same
turns, `--profile` writes tables of `torch.profiler`, `--check-cpu` runs all of it small, on gloo, to see that it works.

Reach: lone and compiled >= 0.98 (lower end 0.97), data >= 0.98 of DDP, the others >= 0.95 of theirs with memory within 5 %.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import selectors
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TREE = HERE.parents[1]
#: Row: number of GPUs, what it is measured against.
ROWS = {
    "lone": (1, "plain loop"),
    "compiled": (1, "plain loop, compiled"),
    "data": (2, "DistributedDataParallel"),
    "zero1": (2, "ZeroRedundancyOptimizer"),
    "zero3": (2, "FSDP2"),
    "pipeline": (2, "torch.distributed.pipelining, 1F1B"),
    "tensor": (2, "DTensor"),
}
REACH = {"lone": 0.98, "compiled": 0.98, "data": 0.98}
SECOND_RUN_STEPS = 5
#: 95 % points of Student's t, one-sided, by degrees of freedom.
STUDENT = {1: 6.314, 2: 2.920, 3: 2.353, 4: 2.132, 5: 2.015, 6: 1.943, 7: 1.895, 8: 1.860, 9: 1.833}


class Failed(Exception):
    """A contestant ended or was too late."""


class Contestant:
    """Processes that answer one line each for every line they are sent."""

    def __init__(self, name: str, commands: Sequence[list[str]], environments: Sequence[dict[str, str]]) -> None:
        self.name = name
        self._processes = [
            subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True
            )
            for command, environment in zip(commands, environments, strict=True)
        ]
        self._read = [b""] * len(self._processes)

    def ask(self, until: float, **order: Any) -> list[dict[str, Any]]:
        """Send an order to all processes; returns what each answers."""
        self.order(**order)
        return self.answers(until)

    def order(self, **order: Any) -> None:
        """Send an order to all processes."""
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(OSError):  # `answers` tells what it lacks
                process.stdin.write(json.dumps(order).encode() + b"\n")
                process.stdin.flush()

    def answers(self, until: float) -> list[dict[str, Any]]:
        """Return one line of each process."""
        return [json.loads(self._line(number, until)) for number in range(len(self._processes))]

    def _line(self, number: int, until: float) -> bytes:
        out = self._processes[number].stdout
        assert out is not None
        with selectors.DefaultSelector() as selector:
            selector.register(out, selectors.EVENT_READ)
            while b"\n" not in self._read[number]:
                if not selector.select(max(0.0, until - time.monotonic())):
                    raise Failed(f"{self.name} (process {number}) did not answer in time")
                piece = os.read(out.fileno(), 1 << 16)
                if not piece:
                    status = self._processes[number].wait()
                    raise Failed(f"{self.name} (process {number}) ended with status {status}; see its text above")
                self._read[number] += piece
        line, _, self._read[number] = self._read[number].partition(b"\n")
        return line

    def close(self) -> None:
        """End all processes; those that do not end by themselves are killed."""
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                process.stdin.close()
        until = time.monotonic() + 15
        for process in self._processes:
            try:
                process.wait(max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def contestants(row: str, args: argparse.Namespace) -> dict[str, Contestant]:
    """Start all that take part in a row."""
    world, reference = ROWS[row]
    device = "cpu" if args.check_cpu else "cuda"
    rows = args.rows_per_gpu * (1 if row == "tensor" else world)
    size = "tiny" if args.check_cpu else "gpt2"
    words = ["--row", row, "--size", size, "--device", device, "--rows", str(rows), "--world", str(world)]
    words += ["--fused"] * args.fused
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    def environment(tree: Path, **more: str) -> dict[str, str]:
        paths = os.pathsep.join([str(tree), str(HERE)])
        return {**os.environ, "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1", **more}

    def ours(name: str, tree: Path) -> Contestant:
        command = [sys.executable, str(HERE / "gpu_rows" / "ours.py"), *words]
        return Contestant(name, [command], [environment(tree)])

    ranks = range(world)
    torchrun = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world)}
    commands = [
        [sys.executable, str(HERE / "gpu_rows" / "references.py"), *words, "--rank", str(rank)] for rank in ranks
    ]
    environments = [environment(TREE, RANK=str(rank), LOCAL_RANK=str(rank), **torchrun) for rank in ranks]
    started = {"guava": ours("guava", TREE)}
    if args.beside is not None:
        started["beside"] = ours("beside", args.beside.resolve())
    started["reference"] = Contestant(reference, commands, environments)
    return started


def measure(row: str, args: argparse.Namespace, end: float) -> dict[str, Any]:
    """Run a row; returns its line."""
    began = time.monotonic()
    until = min(began + args.limit_s * (2 if row == "compiled" else 1), end)
    if until < began + 20:
        raise Failed("no time is left for this row: name it in --rows in another run")
    taking_part = contestants(row, args)
    try:
        for one in taking_part.values():
            one.answers(until)
        for one in taking_part.values():  # all build, compile and get warm at one time
            one.order(do="block", steps=args.steps)
        for one in taking_part.values():
            one.answers(until)
        times: dict[str, list[float]] = {name: [] for name in taking_part}
        losses = {}
        for _ in range(args.pairs):
            for name, one in taking_part.items():
                answers = one.ask(until, do="block", steps=args.steps)
                times[name].append(max(answer["step_ms"] for answer in answers))
                losses[name] = [round(answer["loss"], 4) for answer in answers]
        line = summary(row, args, times)
        line["losses"] = losses
        for name, one in taking_part.items():
            table = str(args.profile / f"{row}-{name}-RANK.txt") if args.profile is not None else ""
            answers = one.ask(until, do="profile", steps=10, table=table)
            line[f"{name}_peak_mib"] = round(max(answer["peak_bytes"] for answer in answers) / 2**20, 1)
            line[f"{name}_syncs_a_step"] = answers[0]["syncs"]
        for name, one in taking_part.items():
            if name != "reference":
                line[f"{name}_around"] = around(one, times[name], until)
        if line["reference_peak_mib"]:
            line["memory_ratio"] = round(line["guava_peak_mib"] / line["reference_peak_mib"], 3)
        return {**line, "row_s": round(time.monotonic() - began, 1)}
    finally:
        for one in taking_part.values():
            one.close()


def around(one: Contestant, times: list[float], until: float) -> dict[str, Any]:
    """Seconds before the first step, at the end of a run, and of a second one beside its steps."""
    answer = one.ask(until, do="around", steps=SECOND_RUN_STEPS)[0]
    steps_s = SECOND_RUN_STEPS * statistics.median(times) / 1e3
    answer["second_run_more_than_its_steps_s"] = answer["second_run_s"] - steps_s
    return {key: round(value, 3) if isinstance(value, float) else value for key, value in answer.items()}


def summary(row: str, args: argparse.Namespace, times: dict[str, list[float]]) -> dict[str, Any]:
    """Medians, and ratios of tokens/s to the reference's, pair by pair."""
    world, reference = ROWS[row]
    tokens = args.rows_per_gpu * (1 if row == "tensor" else world) * (16 if args.check_cpu else 1024)
    line: dict[str, Any] = {"benchmark": "gpu", "row": row, "gpus": world, "reference": reference}
    line["reach"] = REACH.get(row, 0.95)
    for name, values in times.items():
        line[f"{name}_step_ms"] = round(statistics.median(values), 3)
        line[f"{name}_tokens_s"] = round(1e3 * tokens / statistics.median(values))
        if name != "reference":
            ratios = [theirs / own for own, theirs in zip(values, times["reference"], strict=True)]
            line[f"{name}_ratio"] = round(statistics.median(ratios), 4)
            line[f"{name}_lower_95"] = round(lower_end(ratios), 4)
            line[f"{name}_ratios"] = [round(ratio, 4) for ratio in ratios]
    return line


def lower_end(values: Sequence[float]) -> float:
    """Lower end of the one-sided 95 % interval of the mean."""
    t = STUDENT.get(len(values) - 1, 1.83)
    return statistics.mean(values) - t * statistics.stdev(values) / math.sqrt(len(values))


def versions(args: argparse.Namespace) -> dict[str, Any]:
    """What the figures belong to."""
    import torch

    commit = subprocess.run(["git", "-C", str(TREE), "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    line: dict[str, Any] = {"benchmark": "gpu", "commit": commit.stdout.strip(), "torch": torch.__version__}
    if not args.check_cpu:
        line["card"] = torch.cuda.get_device_name(0)
        line["cuda"], line["gpus_here"] = torch.version.cuda, torch.cuda.device_count()
        line["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return {**line, "cores": os.cpu_count(), "pairs": args.pairs, "steps": args.steps, "fused": args.fused}


def main() -> None:
    """Print one line about the machine, then one for each row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", help=f"with commas, of {', '.join(ROWS)}; by default all that fit the GPUs")
    parser.add_argument("--profile", type=Path, help="folder for tables of torch.profiler")
    parser.add_argument("--beside", type=Path, help="another tree of guava_nb that takes part")
    parser.add_argument("--fused", action="store_true", help="every contestant's AdamW in its fused form")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=30, help="of a block")
    parser.add_argument("--rows-per-gpu", type=int, default=16)
    parser.add_argument("--limit-s", type=float, default=110.0, help="most seconds for a row, twice that to compile")
    parser.add_argument("--total-s", type=float, default=480.0, help="most seconds for all rows together")
    parser.add_argument("--check-cpu", action="store_true", help="small, on processors")
    args = parser.parse_args()
    end = time.monotonic() + args.total_s
    about = versions(args)
    print(json.dumps(about), flush=True)
    if args.profile is not None:
        args.profile = args.profile.resolve()
        args.profile.mkdir(parents=True, exist_ok=True)
    here = 2 if args.check_cpu else about["gpus_here"]
    for row in args.rows.split(",") if args.rows else [name for name, (gpus, _) in ROWS.items() if gpus <= here]:
        try:
            line = measure(row, args, end)
        except Exception as error:  # this row is lost, the others are not
            line = {"benchmark": "gpu", "row": row, "error": f"{type(error).__name__}: {error}"}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
