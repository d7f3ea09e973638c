"""What reaches the loss of step sync within 3 % at 1/4,000 of its bytes: variants of partial averaging, on one device.

    python -m tests.benchmarks.frontier_reach [--steps 10000] [--limit-s 560]

First the cases of `frontier` that had not been run, with three seeds; then variants that all send 1/4,000 of the bytes of step
sync, with one seed; then the best of these, and what is best of each kind taken together, with three. Lines as of `frontier`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from guava_nb.outer_methods.outer_methods import OuterMethod
from guava_nb.wire_formats.ascending_indices import index_bytes
from guava_nb.wire_formats.error_feedback import ErrorFeedback
from guava_nb.wire_formats.packed_bits import packed_bytes
from guava_nb.wire_formats.top_k import TopK
from tests.benchmarks.frontier import Case, OnDevice, Runs, known_cases, outer, report, train
from tests.benchmarks.frontier_models import TASKS

MEMBERS, FOLD, TASK = 4, 4035.0, "gpt-0.4M"
NUMEL = sum(math.prod(shape) for shape in TASKS[TASK].shapes().values())
NEVER_RUN = (
    "step", "its part of the tokens alone", "average-5-15-30-60", "average-5-15-30-60+int4", "partial-5-15-30-60 1/64",
    "average-5+int4", "average-15+int4", "average-30+int4", "average-60+int4", "average-30 after a tenth by step sync",
    "nesterov-30 after a tenth by step sync", "partial-15 1/64 after a tenth by step sync",
)  # fmt: skip
SCHEDULES: dict[str, tuple[tuple[float, float, float], ...]] = {  # begin, times the steps of a round, times the bytes
    "": ((0.0, 1.0, 1.0),),
    "density falls": ((0.0, 1.0, 2.0), (0.25, 1.0, 1.0), (0.5, 1.0, 0.5)),
    "density rises": ((0.0, 1.0, 0.5), (0.5, 1.0, 1.0), (0.75, 1.0, 2.0)),
    "density rises steeply": ((0.0, 1.0, 0.25), (0.5, 1.0, 1.0), (0.75, 1.0, 2.5)),
    "rounds grow": ((0.0, 0.5, 1.0), (1 / 3, 1.0, 1.0), (2 / 3, 2.0, 1.0)),
    "rounds shrink": ((0.0, 2.0, 1.0), (1 / 3, 1.0, 1.0), (2 / 3, 0.5, 1.0)),
}


@dataclass(frozen=True)
class Variant:
    """A variant of partial averaging.

    Attributes:
        others: what becomes of the rest of a worker at elements that only others sent: it is kept, less by what they sent in
            the same direction (credit), forgotten (adopt), or the weight stays where it was (stay).
        merged: the hub sends each worker the places and signs of the others in one message, with the mean of their magnitudes.
    """

    every: int = 30
    bits: int = 1
    chunk: int = 65536
    rate: float = 1.0
    others: str = "kept"
    schedule: str = ""
    merged: bool = False

    @property
    def name(self) -> str:
        words = [f"partial-{self.every}", f"{self.bits} bit of {self.chunk}"]
        words += [f"x{self.rate:g}"] if self.rate != 1 else []
        words += [self.others] if self.others != "kept" else []
        return ", ".join([*words, *([self.schedule] if self.schedule else []), *(["merged"] if self.merged else [])])


class Reach(Case):
    """A case of a variant: each phase has a format of its own, as dense as its bytes allow."""

    def __init__(self, variant: Variant) -> None:
        method = dataclasses.replace(outer("partial", variant.rate), learning_rate=variant.rate)
        super().__init__(variant.name, method, variant.every)
        self.variant, self.now = variant, 0
        phases = SCHEDULES[variant.schedule]
        self.phases = tuple((begin, round(longer * variant.every)) for begin, longer, _ in phases)
        self.formats = [
            self.fitted(every, FOLD / much) for (_, every), (_, _, much) in zip(self.phases, phases, strict=True)
        ]

    def fitted(self, every: int, fold: float) -> TopK:
        low, high = 1, self.variant.chunk
        while low < high:
            count = (low + high + 1) // 2
            fits = self.bytes_of(self.format_of(count)) * fold <= 8 * NUMEL * every
            low, high = (count, high) if fits else (low, count - 1)
        return self.format_of(low)

    def format_of(self, count: int) -> TopK:
        return TopK(count, self.variant.chunk, self.variant.bits, of_senders=True)

    def bytes_of(self, wire: TopK) -> int:
        each = wire.encoded_bytes(NUMEL)
        if not self.variant.merged:
            return each * MEMBERS
        down = 0
        for rows, length, count in wire._sections(NUMEL):
            most = min(length, (MEMBERS - 1) * count)
            down += 2 * rows + index_bytes(rows, length, most) + packed_bytes(rows * (MEMBERS - 1) * count, 1)
        return each + down

    def message(self) -> TopK:
        return self.formats[self.now]

    def bytes_of_exchange(self, members: int) -> int:
        return self.bytes_of(self.message())


class ReachRuns(Runs):
    """Runs among which are variants."""

    def step(self, index: int, rows: Tensor) -> None:
        for case in self.cases:
            if isinstance(case, Reach):
                case.now = case.begun(self.steps).index(case._phase(index, self.steps))
        super().step(index, rows)

    def _end_round(self, number: int, method: OuterMethod) -> None:
        case = self.cases[number]
        if not isinstance(case, Reach):
            super()._end_round(number, method)
            return
        went = self.start[number].unsqueeze(1) - self.weights[number]
        self.feedback[number] = ErrorFeedback(OnDevice(case.message()))
        sent = self._sent(number, went)
        if case.variant.merged:
            rows = sent.view(*sent.shape[:2], -1, case.variant.chunk)
            rows = rows.sign() * rows.abs().amax(-1, keepdim=True).mean(1, keepdim=True)
            sent = rows.view_as(sent)
        sent = sent[..., : self.numel]
        count = (sent != 0).sum(1)
        moved, rest = sent.sum(1) / count.clamp(min=1) * method.learning_rate, went - sent
        is_others, each = (sent == 0) & (count > 0).unsqueeze(1), moved.unsqueeze(1)
        if case.variant.others == "credit":
            less = torch.minimum(rest.abs(), each.abs()) * each.sign() * (rest.sign() == each.sign())
            rest = torch.where(is_others, rest - less, rest)
        elif case.variant.others == "adopt":
            rest = rest.masked_fill(is_others, 0.0)
        elif case.variant.others == "stay":
            rest = torch.where(is_others, rest - each, rest)
        self.start[number] = self.start[number] - moved
        self.weights[number] = self.start[number].unsqueeze(1) - rest
        self.exchanged[number] += case.bytes_of_exchange(self.members)


def explored() -> list[Variant]:
    """Each at 1/4,000 of the bytes."""
    found = [Variant(every) for every in (15, 30, 45, 60, 90)]
    found += [Variant(every, 2, 4096) for every in (15, 30, 60)] + [Variant(30, 2), Variant(30, 1, 4096)]
    found += [Variant(every, merged=True) for every in (30, 60)]
    found += [Variant(30, rate=rate) for rate in (1.2, 1.4, 1.7, 2.0, 2.5)]
    found += [Variant(15, rate=1.4), Variant(60, rate=1.4), Variant(60, rate=1.7)]
    found += [Variant(30, others=what) for what in ("credit", "adopt", "stay")] + [Variant(15, others="adopt")]
    found += [Variant(30, schedule=one) for one in SCHEDULES if one]
    found += [Variant(30, schedule="density rises", rate=rate) for rate in (1.4, 1.7)]
    found += [Variant(30, schedule="density rises steeply", rate=1.4), Variant(30, schedule="density falls", rate=1.4)]
    found.append(Variant(60, schedule="density rises", rate=1.4))
    return found + [Variant(30, others=what, rate=1.7) for what in ("credit", "adopt")]


def chosen(losses: dict[Variant, float], most: int) -> list[Variant]:
    """The plain one, what is best of each kind taken together with three lengths of a round, and the best."""
    base, found = Variant(), [Variant(30, 2, 4096)]
    best = base
    for kind in ("others", "rate", "schedule"):
        alike = [one for one in losses if dataclasses.replace(one, **{kind: getattr(base, kind)}) == base]
        better = min(alike, key=losses.__getitem__)
        if losses[better] < losses[base] * 0.998:
            best = dataclasses.replace(best, **{kind: getattr(better, kind)})
    for every in (20, 30, 45, 60):
        found.append(dataclasses.replace(best, every=every))
    merged = min((one for one in losses if one.merged), key=losses.__getitem__)
    if losses[merged] < losses.get(dataclasses.replace(merged, merged=False), 0.0) * 0.998:
        found.append(dataclasses.replace(best, every=merged.every, merged=True))
    found += sorted(losses, key=losses.__getitem__)
    return list(dict.fromkeys(found))[:most]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--limit-s", type=float, default=560.0)
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    device, task = torch.device("cuda" if torch.cuda.is_available() else "cpu"), TASKS[TASK]
    began = time.monotonic()
    known = {one.name: one for one in known_cases()}

    def trained(cases: Sequence[Case], seeds: int, plain: Tensor | None) -> tuple[Tensor, float]:
        since = time.monotonic()
        runs = train(task, cases, seeds, MEMBERS, given.steps, device, ReachRuns)
        ended = report(TASK, runs, plain)
        print(json.dumps({"cases": len(cases), "seconds": round(time.monotonic() - since, 1)}), flush=True)
        return ended, (time.monotonic() - since) / (len(cases) * seeds)

    def fitting(count: int, seeds: int, each_s: float, kept_s: float = 0.0) -> int:
        left_s = given.limit_s - kept_s - (time.monotonic() - began)
        return max(1, min(count, int(left_s / (1.05 * each_s * seeds))))

    ended, each_s = trained([known[name] for name in NEVER_RUN], given.seeds, None)
    plain, variants = ended[0], explored()
    variants = variants[: fitting(len(variants), 1, each_s, kept_s=6 * given.seeds * each_s)]
    ended, each_s = trained([Reach(one) for one in variants], 1, plain)
    best = chosen(dict(zip(variants, ended[:, 0].tolist(), strict=True)), len(NEVER_RUN))
    best = best[: fitting(len(best), given.seeds, each_s)]
    trained([Reach(one) for one in best], given.seeds, plain)


if __name__ == "__main__":
    main()
