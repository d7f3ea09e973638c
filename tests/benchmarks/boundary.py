"""Final loss of a pipeline whose activations and their gradients are rounded between stages, many runs at once on one device.

    python -m tests.benchmarks.boundary [--task gpt-0.4M] [--steps 5000] [--rows 3000] [--seeds 3] [--cases NAMES]

A byte-level GPT in as many stages as it has layers, on so many rows of the sources of Python's standard library. All runs are
rows of stacked tensors, and see the same batches seed by seed; formats are the product's. A case is a wire format, alone (as the
product sends) or with one kind of error feedback:

    +slot       what a place in the batch left out is added to what stands there in the next step, forward and backward
    +back       the same, backward only
    +sample     forward the difference to what the same sample sent last time travels (AQ-SGD, arXiv:2206.01299); says something
                only where rows come again: with less than two epochs such a case is left out

Prints one JSON line for each case: loss of a validation with exact activations, and its part above that of fp32 in percent.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from guava_nb.wire_formats.registry import WIRE_FORMATS
from tests.benchmarks.frontier import BETAS, WEIGHT_DECAY, rate
from tests.benchmarks.frontier_models import EVALUATED, TASKS, ByteGPT

CASES = (
    "fp32",
    "bf16",
    "int8",
    "int8+slot",
    "int8+back",
    "int8+sample",
    "int4",
    "int4+slot",
    "int4+back",
    "int4+sample",
)
BATCH, _FIRST, _TIMED, _MARGIN = 16, 5, 40, 0.85


class Boundary:
    """What passes between stages, of all cases: `[cases * seeds, B * T, width]`, cases outermost."""

    def __init__(self, cases: Sequence[str], seeds: int, rows: int, device: torch.device) -> None:
        self.kinds = [tuple(case.partition("+")[::2]) for case in cases]
        self.seeds, self.num_rows, self.device = seeds, rows, device
        self.ids = torch.zeros(seeds, BATCH, dtype=torch.long, device=device)
        self._kept: dict[tuple[int, int, str], Tensor] = {}

    def between(self, layer: int, value: Tensor) -> Tensor:
        crossed: Tensor = value if layer == 0 else _Crossing.apply(value, self, layer)  # type: ignore[no-untyped-call]
        return crossed

    def sent(self, layer: int, way: str, value: Tensor) -> Tensor:
        """Return what the other side reads."""
        parts = value.detach().chunk(len(self.kinds))
        return torch.cat([self._read(number, layer, way, part) for number, part in enumerate(parts)])

    def _read(self, number: int, layer: int, way: str, part: Tensor) -> Tensor:
        (wire, feedback), key = self.kinds[number], (number, layer, way)
        if feedback == "sample" and way == "forward":
            return self._of_samples(key, wire, part)
        if feedback == "slot" or (feedback == "back" and way == "backward"):
            wanted = part + self._kept.get(key, 0.0)
            found = _rounded(wire, wanted)
            self._kept[key] = wanted - found
            return found
        return _rounded(wire, part)

    def _of_samples(self, key: tuple[int, int, str], wire: str, part: Tensor) -> Tensor:
        each = part.view(self.seeds, BATCH, -1)
        if key not in self._kept:
            self._kept[key] = torch.zeros(self.seeds, self.num_rows, each.shape[2], device=self.device)
        kept, seeds = self._kept[key], torch.arange(self.seeds, device=self.device).unsqueeze(1)
        before = kept[seeds, self.ids]
        found = before + _rounded(wire, each - before)
        kept[seeds, self.ids] = found
        return found.view_as(part)


def _rounded(wire: str, value: Tensor) -> Tensor:
    one, flat = WIRE_FORMATS[wire], value.reshape(-1)
    return value if one.is_exact else one.decode_tensor(one.encode_tensor(flat), flat.numel()).view_as(value)


class _Crossing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, boundary: Boundary, layer: int) -> Tensor:
        ctx.at = (boundary, layer)
        return boundary.sent(layer, "forward", value).clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        boundary, layer = ctx.at
        return boundary.sent(layer, "backward", gradient), None, None


def train(task: ByteGPT, learned: Tensor, cases: Sequence[str], seeds: int, steps: int) -> Tensor:
    """Train all cases at once on rows `[rows, T + 1]`; returns their weights, `[cases, seeds, numel]`."""
    device = learned.device
    boundary = Boundary(cases, seeds, len(learned), device)
    firsts = torch.stack([task.initial(seed) for seed in range(seeds)]).to(device)
    weights = firsts.repeat(len(cases), 1)
    first, second = torch.zeros_like(weights), torch.zeros_like(weights)
    generators = [torch.Generator().manual_seed(1000 + seed) for seed in range(seeds)]
    orders = [torch.empty(0, dtype=torch.long)] * seeds
    for index in range(steps):
        if len(orders[0]) < BATCH:
            orders = [torch.randperm(len(learned), generator=one) for one in generators]
        boundary.ids = torch.stack([order[:BATCH] for order in orders]).to(device)
        orders = [order[BATCH:] for order in orders]
        weights.requires_grad_()
        rows = learned[boundary.ids].repeat(len(cases), 1, 1)
        (gradient,) = torch.autograd.grad(task.losses(weights, rows, boundary.between).sum(), weights)
        weights = weights.detach()
        first.lerp_(gradient, 1 - BETAS[0])
        second.mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
        now = rate(index, steps)
        weights.mul_(1 - now * WEIGHT_DECAY)
        root = (second / (1 - BETAS[1] ** (index + 1))).sqrt_().add_(1e-8)
        weights.addcdiv_(first, root, value=-now / (1 - BETAS[0] ** (index + 1)))
    return weights.view(len(cases), seeds, -1)


@torch.no_grad()
def validated(task: ByteGPT, weights: Tensor) -> Tensor:
    """Return the validation losses, `[cases, seeds]`."""
    flat, generator = weights.flatten(0, 1), torch.Generator().manual_seed(12345)
    total = torch.zeros(len(flat), device=flat.device)
    for _ in range(EVALUATED):
        rows = task.held_out(generator)
        total += task.losses(flat, rows.expand(len(flat), *rows.shape))
    return (total / EVALUATED).view(weights.shape[:2])


def main() -> None:
    """Print one line for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--task", choices=[name for name, task in TASKS.items() if isinstance(task, ByteGPT)], default="gpt-0.4M"
    )
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--rows", type=int, default=3000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--cases", nargs="+", default=list(CASES))
    parser.add_argument(
        "--limit-s", type=float, default=0.0, help="as many steps as fit into so many seconds, up to --steps"
    )
    given = parser.parse_args()
    task, began = TASKS[given.task], time.monotonic()
    assert isinstance(task, ByteGPT)
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    task.load(device)
    learned = task.pieces(given.rows)
    cases, steps = ["fp32", *(one for one in given.cases if one != "fp32")], given.steps
    if given.limit_s:
        train(task, learned, cases, given.seeds, _FIRST).sum().item()
        timed = time.monotonic()
        train(task, learned, cases, given.seeds, _TIMED).sum().item()
        step_s, left_s = (time.monotonic() - timed) / _TIMED, given.limit_s - (time.monotonic() - began)
        steps = max(20, min(steps, int(_MARGIN * left_s / step_s)))
    epochs = steps * BATCH / len(learned)
    cases = [one for one in cases if epochs >= 2 or not one.endswith("+sample")]
    ended = validated(task, train(task, learned, cases, given.seeds, steps))
    for name, losses in zip(cases, ended, strict=True):
        wire, above = WIRE_FORMATS[name.partition("+")[0]], (losses / ended[0] - 1) * 100
        row = {
            "benchmark": "boundary", "task": given.task, "case": name, "stages": task.layers, "steps": steps,
            "epochs": round(epochs, 2),
            "bytes_share": wire.encoded_bytes(1 << 20) / (4 << 20), "loss": round(float(losses.mean()), 4),
            "above_percent": round(float(above.mean()), 2), "each": [round(float(one), 2) for one in above],
        }  # fmt: skip
        print(json.dumps(row), flush=True)
    print(json.dumps({"seconds": round(time.monotonic() - began, 1)}), flush=True)


if __name__ == "__main__":
    main()
