"""Final loss against bytes: step sync with each wire format beside rounds of local steps, many runs at once on one device.

    python -m tests.benchmarks.frontier [--steps 10000] [--seeds 3] [--cases NAMES] [--list]
    ... --tasks gpt-3M digits --workers 4 2 --limit-s 250 --cases step+int8 nesterov-30 nesterov-60+int4 "partial-15 1/64"

A byte-level GPT of 0.39 M parameters learns the sources of Python's standard library on 4 workers of 8 x 96 bytes a step, AdamW;
`--tasks` takes others of `frontier_models.py`. `--limit-s` divides so many seconds among all pairs of a task and a number of
workers, and each takes as many steps as fit. Workers are rows of stacked tensors: no process and no line is between them. What
they exchange goes through the product's own formats, error feedback and outer step, so losses are those of the algorithm and
bytes those of its messages. Cases see the same batches seed by seed. Prints one JSON line for each case: validation loss on what
was not trained on, its part above that of step sync (mean over seeds, in percent), and the bytes up plus down at a worker, where
8 bytes a parameter and step are 1; all of them pass the orchestrator (`orchestrator_share`).
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from guava_nb.outer_methods.outer_methods import OUTER_METHODS, OuterMethod, sparse_format
from guava_nb.wire_formats.error_feedback import ErrorFeedback
from guava_nb.wire_formats.registry import WIRE_FORMATS
from guava_nb.wire_formats.top_k import TopK
from guava_nb.wire_formats.wire_format import WireFormat
from tests.benchmarks.frontier_models import EVALUATED, TASKS, Task

PEAK_RATE, WARM_STEPS, WEIGHT_DECAY, BETAS = 2e-3, 100, 0.1, (0.9, 0.95)
#: The first steps of a task, which compile it; those after them, which tell how many fit into a time; how much of it is used.
_FIRST, _TIMED, _MARGIN = 6, 60, 0.9
_CHUNK = 4096


@dataclass
class Case:
    """One way to exchange. `method` None: the gradients of every step, in `wire`; `every` 0: not at all.

    `phases` begin at a part of the run, and have another number of steps of a round each, 0 where the gradients of every step are
    exchanged as they are. A round ends with its phase. () is `every` for all of it.
    """

    name: str
    method: OuterMethod | None = None
    every: int = 1
    wire: WireFormat | None = None
    numel: int = 0
    phases: tuple[tuple[float, int], ...] = ()

    def exchanges_gradients(self, index: int, steps: int) -> bool:
        """Whether step n (from 0) exchanges gradients."""
        return self.method is None or (bool(self.phases) and self._phase(index, steps)[1] == 0)

    def ends_round(self, index: int, steps: int) -> bool:
        """Whether a round of local steps ends with step n (from 0)."""
        begin, every = self._phase(index, steps)
        if self.method is None or not every:
            return False
        is_last = index + 1 == steps or self._phase(index + 1, steps)[0] != begin
        return (index + 1 - begin) % every == 0 or is_last

    def _phase(self, index: int, steps: int) -> tuple[int, int]:
        """Return the first step of the phase of a step, and the steps of its rounds."""
        return next(phase for phase in reversed(self.begun(steps)) if phase[0] <= index)

    def begun(self, steps: int) -> list[tuple[int, int]]:
        """Return of each phase its first step, and the steps of its rounds."""
        return [(math.ceil(part * steps), every) for part, every in self.phases or ((0.0, self.every),)]

    def message(self) -> WireFormat:
        """Return the format of what a member sends."""
        if self.wire is not None:
            return self.wire
        return WIRE_FORMATS["fp32"] if self.method is None else self.method.wire_format

    @property
    def is_forwarded(self) -> bool:
        """Whether a member gets the messages of all others, as of sparse ones."""
        return isinstance(self.message(), TopK)

    def bytes_of_exchange(self, members: int) -> int:
        """Return the bytes up plus down at a worker."""
        return self.message().encoded_bytes(self.numel) * (members if self.is_forwarded else 2)


def rate(step: int, steps: int) -> float:
    """Return the inner learning rate of step n (from 0): warm-up, then a cosine to a tenth."""
    if step < WARM_STEPS:
        return PEAK_RATE * (step + 1) / WARM_STEPS
    done = (step - WARM_STEPS) / max(1, steps - WARM_STEPS)
    return PEAK_RATE * (0.55 + 0.45 * math.cos(math.pi * done))


def outer(name: str, learning_rate: float | None = None, density: float = 1 / 64, bits: int = 2) -> OuterMethod:
    """Return an outer method, with another learning rate, or of a sparse one with other messages."""
    known = OUTER_METHODS[name]
    wire = sparse_format(density, bits) if isinstance(known.wire_format, TopK) else known.wire_format
    return replace(known, learning_rate=learning_rate or known.learning_rate, wire_format=wire)


class OnDevice(WireFormat):
    """A format whose messages stay on their device: the same numbers, sooner."""

    def __init__(self, inner: WireFormat) -> None:
        self.inner, self.name, self.is_exact = inner, inner.name, inner.is_exact

    def encoded_bytes(self, numel: int, dtype: torch.dtype = torch.float32) -> int:
        return self.inner.encoded_bytes(numel, dtype)

    def encode(self, flat: Tensor) -> Tensor:  # type: ignore[override]
        return self.inner.encode_tensor(flat)

    def decode(
        self, message: Tensor, numel: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> Tensor:
        return self.inner.decode_tensor(message, numel, dtype)

    def _encode(self, values: Tensor) -> Sequence[Tensor]:
        return self.inner._encode(values)

    def _decode(self, raw: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        return self.inner._decode(raw, numel, dtype)


# --------------------------------------------------------------------------------------------------------------- the runs


def _read(feedback: ErrorFeedback, number: int, flat: Tensor) -> Tensor:
    """Return what every receiver reads in the message of a tensor, `[numel]`."""
    return feedback.wire_format.decode(feedback.encode(number, flat), flat.numel(), flat.dtype, flat.device)


@cache
def compiled(task: Task) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the losses of a task, compiled once for each number of models."""
    return torch.compile(task.losses, dynamic=False)


class Runs:
    """All cases and seeds side by side: weights and Adam's moments `[cases, seeds, members, numel]`."""

    def __init__(
        self, task: Task, cases: Sequence[Case], seeds: int, members: int, steps: int, device: torch.device
    ) -> None:
        self.task, self.cases, self.seeds, self.members = task, cases, seeds, members
        self.steps, self.device = steps, device
        firsts = torch.stack([task.initial(seed) for seed in range(seeds)]).to(device)
        self.numel = firsts.shape[1]
        # Fused, a step takes 0.4 of its time on a GPU.
        self.losses = compiled(task) if device.type == "cuda" else task.losses
        self.start = firsts.expand(len(cases), -1, -1).clone()  # of the open rounds
        self.weights = self.start.unsqueeze(2).repeat(1, 1, members, 1)
        self.first, self.second = torch.zeros_like(self.weights), torch.zeros_like(self.weights)
        self.exchanged = [0] * len(cases)
        self.momentum: list[Tensor | None] = [None] * len(cases)
        self.feedback = [
            ErrorFeedback(OnDevice(one.message()), one.method.decay if one.method else 1.0) for one in cases
        ]
        self.hub = [ErrorFeedback(OnDevice(one.message())) for one in cases]
        for one in cases:
            one.numel = self.numel

    def step(self, index: int, rows: Tensor) -> None:
        """Take one inner step of all members on rows `[seeds, members, B, ...]`, then end the rounds that end here."""
        flat = self.weights.view(-1, self.numel).requires_grad_()
        given = rows.expand(len(self.cases), *rows.shape).reshape(-1, *rows.shape[2:])
        (gradient,) = torch.autograd.grad(self.losses(flat, given).sum(), flat)
        self.weights = self.weights.detach()
        gradient = gradient.view_as(self.weights)
        for number, case in enumerate(self.cases):
            if case.method is None:
                gradient[number] = self._mean(number, gradient[number]).unsqueeze(1)
                self.exchanged[number] += case.bytes_of_exchange(self.members)
            elif case.exchanges_gradients(index, self.steps):
                gradient[number] = gradient[number].mean(1, keepdim=True)
                self.exchanged[number] += 8 * self.numel
        self._adam(index, gradient)
        for number, case in enumerate(self.cases):
            if case.method is not None and case.exchanges_gradients(index, self.steps):
                self.start[number] = self.weights[number, :, 0]  # all have the same
            elif case.method is not None and case.ends_round(index, self.steps):
                self._end_round(number, case.method)

    def _adam(self, index: int, gradient: Tensor) -> None:
        beta1, beta2 = BETAS
        self.first.lerp_(gradient, 1 - beta1)
        self.second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        now = rate(index, self.steps)
        self.weights.mul_(1 - now * WEIGHT_DECAY)
        scale = now / (1 - beta1 ** (index + 1))
        root = (self.second / (1 - beta2 ** (index + 1))).sqrt_().add_(1e-8)
        self.weights.addcdiv_(self.first, root, value=-scale)

    def _sent(self, number: int, each: Tensor) -> Tensor:
        """Return what is read of what each member sends of `[seeds, members, numel]`; the whole, padded to whole chunks.

        So one message of all has the same bits as the messages of each side by side.
        """
        feedback = self.feedback[number]
        wire = feedback.wire_format.inner
        padded = functional.pad(each, (0, -self.numel % (wire.chunk if isinstance(wire, TopK) else _CHUNK)))
        if feedback.wire_format.is_exact:
            return padded
        decoded = _read(feedback, number, padded.reshape(-1))
        feedback.commit()
        return decoded.view_as(padded)

    def _mean(self, number: int, each: Tensor) -> Tensor:
        """Return what members read of the mean of what each sends, `[seeds, numel]` of `[seeds, members, numel]`."""
        mean = self._sent(number, each).mean(1)
        if not (self.cases[number].is_forwarded or self.hub[number].wire_format.is_exact):
            mean = _read(self.hub[number], number, mean.reshape(-1)).view_as(mean)
            self.hub[number].commit()
        return mean[..., : self.numel]

    def _end_round(self, number: int, method: OuterMethod) -> None:
        went, rest = self.start[number].unsqueeze(1) - self.weights[number], None
        if method.keeps_rest:
            self.feedback[number] = ErrorFeedback(self.feedback[number].wire_format)  # the rest is in `went`
            sent = self._sent(number, went)[..., : self.numel]
            mean, rest = sent.sum(1) / (sent != 0).sum(1).clamp(min=1), went - sent
        else:
            mean = self._mean(number, went)
        after, self.momentum[number] = method.step(self.start[number], mean, self.momentum[number])
        self.start[number], self.weights[number] = after, after.unsqueeze(1)
        if rest is not None:
            self.weights[number] -= rest
        self.exchanged[number] += self.cases[number].bytes_of_exchange(self.members)

    @torch.no_grad()
    def validated(self) -> Tensor:
        """Return the validation loss of each case and seed, `[cases, seeds]`."""
        lone = [number for number, case in enumerate(self.cases) if not case.every]
        for number, case in enumerate(self.cases):
            if case.method is None:
                self.start[number] = self.weights[number, :, 0]
        self.start[lone] = self.weights[lone, :, 0]
        flat = self.start.view(-1, self.numel)
        generator = torch.Generator().manual_seed(12345)
        total = torch.zeros(flat.shape[0], device=self.device)
        for _ in range(EVALUATED):
            rows = self.task.held_out(generator)
            total += self.task.losses(flat, rows.expand(flat.shape[0], *rows.shape))
        return (total / EVALUATED).view(len(self.cases), self.seeds)


def train(task: Task, cases: Sequence[Case], seeds: int, members: int, steps: int, device: torch.device) -> Runs:
    """Train all cases at once and return them as they ended."""
    task.load(device)
    runs = Runs(task, cases, seeds, members, steps, device)
    generators = [torch.Generator(device=device).manual_seed(1000 + seed) for seed in range(seeds)]
    for index in range(steps):
        runs.step(index, task.draw(generators, members))
    return runs


def steps_in(limit_s: float, task: Task, cases: Sequence[Case], seeds: int, members: int, device: torch.device) -> int:
    """Return how many steps fit into so many seconds, those that tell it included: a multiple of 60, at least 60."""
    began = time.monotonic()
    train(task, cases, seeds, members, _FIRST, device).weights.sum().item()
    timed = time.monotonic()
    train(task, cases, seeds, members, _TIMED, device).weights.sum().item()
    step_s, left_s = (time.monotonic() - timed) / _TIMED, limit_s - (time.monotonic() - began)
    return max(60, int(_MARGIN * left_s / step_s) // 60 * 60)


def report(name: str, runs: Runs) -> None:
    """Print one line for each case."""
    ended = runs.validated()
    plain = next((n for n, one in enumerate(runs.cases) if one.name == "step"), None)
    for number, case in enumerate(runs.cases):
        share = runs.exchanged[number] / (8 * runs.numel * runs.steps)
        row = {
            "task": name,
            "parameters": runs.numel,
            "workers": runs.members,
            "case": case.name,
            "steps": runs.steps,
            "bytes_share": share,
            "fold": round(1 / share, 1) if share else None,
            "orchestrator_share": share * runs.members,
            "loss": round(float(ended[number].mean()), 4),
            "losses": [round(float(one), 4) for one in ended[number]],
        }
        if plain is not None:
            above = (ended[number] / ended[plain] - 1) * 100
            row |= {
                "above_step_percent": round(float(above.mean()), 2),
                "each": [round(float(one), 2) for one in above],
            }
        print(json.dumps(row), flush=True)


def known_cases() -> Iterator[Case]:
    """Yield the cases of the table."""
    yield Case("step")
    for wire in ("bf16", "int8", "int4"):
        yield Case(f"step+{wire}", wire=WIRE_FORMATS[wire])
    yield Case("its part of the tokens alone", outer("average"), 0)
    yield Case("average-30", outer("average"), 30)
    for every in (5, 15, 30, 60):
        yield Case(f"average-{every}+int4", outer("average"), every, WIRE_FORMATS["int4"])
    growing = ((0.0, 5), (0.25, 15), (0.5, 30), (0.75, 60))
    yield Case("average-5-15-30-60", outer("average"), phases=growing)
    yield Case("average-5-15-30-60+int4", outer("average"), wire=WIRE_FORMATS["int4"], phases=growing)
    yield Case("partial-5-15-30-60 1/64", outer("partial"), phases=growing)
    for name, method in (("average-30", "average"), ("nesterov-30", "nesterov"), ("partial-15 1/64", "partial")):
        every = 15 if method == "partial" else 30
        yield Case(f"{name} after a tenth by step sync", outer(method), phases=((0.0, 0), (0.1, every)))
    for every in (5, 15, 30, 60, 120):
        yield Case(f"nesterov-{every}", outer("nesterov"), every)
    for every in (15, 30, 60):
        yield Case(f"nesterov-{every}+int4", outer("nesterov"), every, WIRE_FORMATS["int4"])
    for every in (5, 15, 30, 60, 120):
        yield Case(f"sparse-{every}", outer("sparse"), every)
    for every, part in (
        (5, 64), (5, 128), (5, 256), (10, 64), (10, 128), (10, 256), (15, 32), (15, 64), (15, 128), (15, 256),
        (30, 64), (30, 128), (60, 64), (60, 128),
    ):  # fmt: skip
        yield Case(f"partial-{every} 1/{part}", outer("partial", density=1 / part), every)
    for every, part, step in (
        (5, 4, 1.4), (5, 8, 1.4), (5, 16, 1.4), (5, 64, 1.4), (15, 64, 1.4), (30, 64, 1.4), (60, 64, 1.4), (60, 40, 1.4),
        (60, 40, 1.7),
    ):  # fmt: skip
        yield Case(f"partial-{every} 1/{part} x{step}", outer("partial", step, 1 / part), every)
    for every, part, step in (
        (15, 160, 1.4), (15, 176, 1.4), (30, 72, 1.4), (30, 78, 1.4), (60, 32, 1.7), (60, 34, 1.4), (60, 34, 1.7),
    ):  # fmt: skip
        yield Case(f"partial-{every} 1/{part} 1 bit x{step}", outer("partial", step, 1 / part, bits=1), every)


def main() -> None:
    """Print one line for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--cases", nargs="+", help="only these; step is always among them")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=["gpt-0.4M"])
    parser.add_argument("--workers", nargs="+", type=int, default=[4])
    parser.add_argument(
        "--limit-s", type=float, default=0.0, help="seconds of all tasks; as many steps as fit, up to --steps"
    )
    parser.add_argument("--no-step", action="store_true", help="leave step out")
    parser.add_argument("--list", action="store_true", help="print the names of all cases")
    given = parser.parse_args()
    always = () if given.no_step else ("step",)
    cases = [one for one in known_cases() if not given.cases or one.name in (*always, *given.cases)]
    if given.list:
        print("\n".join(one.name for one in cases))
        return
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    pairs = [(name, members) for name in given.tasks for members in given.workers]
    ends = time.monotonic() + given.limit_s
    for number, (name, members) in enumerate(pairs):
        began, steps = time.monotonic(), given.steps
        if given.limit_s:
            part_s = max(1.0, (ends - began) / (len(pairs) - number))
            steps = min(steps, steps_in(part_s, TASKS[name], cases, given.seeds, members, device))
        report(name, train(TASKS[name], cases, given.seeds, members, steps, device))
        print(
            json.dumps({"task": name, "cases": len(cases), "seconds": round(time.monotonic() - began, 1)}), flush=True
        )


if __name__ == "__main__":
    main()
