"""Two stages of a pipeline behind emulated home lines: schedules, micro-batches and wire formats side by side.

    python -m tests.benchmarks.pipeline_link [--line home] [--steps 12] [--cases 1f1b-4 gpipe-8 auto auto+int8]

A byte-level GPT on the sources of Python's standard library; each worker is a process behind a line of its own, the orchestrator
behind another one (`home_link.LINES`). A case is a schedule with its micro-batches, or `auto`, with `+` and a wire format. Each
block sleeps for a part of a batch's `--batch-s`, a third forward and the rest backward, as on a slower device, so that two cores
suffice. Prints one JSON line for each case: seconds of a step (median), tokens a second, the part of the time in which a stage
computed (its sleep beside all), activation bytes at the orchestrator, loss of the last steps, and what `auto` told.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from guava_nb import Orchestrator
from tests.benchmarks import home_link
from tests.benchmarks.home_link import CONTEXT, LINES, rows_of_text

CELL = (
    home_link.CELL
    + f"""
class Pause(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(2 * ctx.seconds)
        return gradient, None

class Slow(Block):
    def __init__(self, width, row_s):
        super().__init__(width, 4)
        self.row_s = row_s

    def forward(self, x):
        return Pause.apply(super().forward(x), self.row_s / 3 * len(x))

class Embed(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding({CONTEXT}, width)

    def forward(self, x):
        return self.bytes(x.long()) + self.places(torch.arange(x.shape[1]))

def piped(width, layers, row_s):
    head = [nn.LayerNorm(width), nn.Linear(width, 256, bias=False)]
    return nn.Sequential(Embed(width), *(Slow(width, row_s) for _ in range(layers)), *head)

def language_loss(logits, targets):
    return functional.cross_entropy(logits.flatten(0, 1), targets.long().flatten())
"""
)


def case(orchestrator: Orchestrator, name: str, args: argparse.Namespace) -> dict[str, Any]:
    way, _, wire = name.partition("+")
    schedule, _, count = way.partition("-")
    settings = {"pipeline_schedule": schedule, **({"micro_batches": int(count)} if count else {})}
    orchestrator.set_mode("pipeline", path="relay", pipeline_split=str(1 + args.layers // 2), **settings)
    rows = rows_of_text(args.steps * args.batch, 20).tensors[0]
    data = DataLoader(TensorDataset(rows[:, :-1], rows[:, 1:]), batch_size=args.batch)
    began = time.monotonic()
    run = orchestrator.start_training(
        data, criterion="language_loss", optimizer="AdamW", optimizer_args={"lr": args.lr}, progress=False, threads=1,
        fresh=True, check="off", seed=1, wire=wire or "fp32",
    )  # fmt: skip
    ends = [record["seconds"] for record in run.history]
    each = [later - earlier for earlier, later in zip(ends[1:-1], ends[2:], strict=True)]  # the first ones learn shapes
    step_s = statistics.median(each)
    trained = orchestrator._replica_sets.trained
    assert trained is not None and trained.spec.parallel is not None
    shape = trained.spec.parallel
    told = [text for _, text in orchestrator._notices.numbered(20) if text.startswith("schedule auto")]
    return {
        "benchmark": "pipeline_link", "case": name, "line": args.line, "schedule": shape.schedule,
        "micro_batches": shape.micro_batches, "steps": len(run.history), "step_s": round(step_s, 3),
        "tokens_s": round(args.batch * CONTEXT / step_s), "busy": round(args.batch_s / 2 / step_s, 3),
        "activation_bytes_step": round((run.wire.activation_bytes or 0) / len(run.history)),
        "train_loss": round(sum(record["loss"] for record in run.history[-4:]) / 4, 4),
        "whole_s": round(time.monotonic() - began, 1), "lost_samples": run.lost_samples,
        "told": told[-1:] if schedule == "auto" else [],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--line", choices=LINES, default="home")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument(
        "--batch-s", type=float, default=1.6, help="what a batch takes a worker that has the whole model"
    )
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument(
        "--cases", nargs="+", default=["1f1b-4", "gpipe-4", "gpipe-8", "1f1b-4+int8", "auto", "auto+int8"]
    )
    args = parser.parse_args()
    args.workers, args.table, args.row_s = 2, 0, 0.0
    torch.set_num_threads(1)
    with home_link.session(2, args) as orchestrator:
        orchestrator.share(CELL, "piped")
        row_s = args.batch_s / args.batch / args.layers
        orchestrator.register_model("piped", {"width": args.width, "layers": args.layers, "row_s": row_s})
        for name in args.cases:
            print(json.dumps(case(orchestrator, name, args)), flush=True)


if __name__ == "__main__":
    main()
