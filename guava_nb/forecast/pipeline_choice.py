"""In which order stages work on how many micro-batches, by what they compute and their lines carry. Pure arithmetic.

A step is played through with the orders of torch's schedules: gpipe does all forwards and then all backwards, so that what passes
between stages travels while they compute; 1f1b keeps few micro-batches alive and waits for the line between them. More
micro-batches leave stages idle for less time, and each costs a message both ways.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from guava_nb.config.units import show_bytes, show_time

__all__ = ["PipelineChoice", "StageLine", "StagePace", "choose_pipeline", "step_seconds"]

#: What a micro-batch costs a stage each way beside computing it: records, encoding, torch's own work.
_MESSAGE_S = 0.003
_MOST_MICRO_BATCHES = 32
#: A choice that is faster by less than this part is not worth more micro-batches, or more memory.
_WORTH = 0.03


@dataclass(frozen=True, slots=True)
class StagePace:
    """One stage, for a whole batch; `compute_s` of forward and backward, None: not known."""

    name: str
    compute_s: float | None


@dataclass(frozen=True, slots=True)
class StageLine:
    """What joins a stage to the next one.

    Attributes:
        forward_bytes, backward_bytes: of a whole batch.
        forward_bytes_s, backward_bytes_s: what the line carries a second; None: not known.
        delay_s: from one stage to the other.
    """

    forward_bytes: float
    backward_bytes: float
    forward_bytes_s: float | None
    backward_bytes_s: float | None
    delay_s: float


@dataclass(frozen=True, slots=True)
class PipelineChoice:
    """What was chosen, and why, as one sentence."""

    schedule: str
    micro_batches: int
    sentence: str


def choose_pipeline(
    stages: Sequence[StagePace], lines: Sequence[StageLine], rows: int, otherwise: int
) -> PipelineChoice:
    """Choose a schedule and a number of micro-batches.

    Args:
        stages: in their order, one a worker.
        lines: between them, one fewer.
        rows: of a batch.
        otherwise: micro-batches where something is not known, with 1f1b.
    """
    if problem := _unknown(stages, lines):
        return PipelineChoice(
            "1f1b", otherwise, f"schedule auto: 1f1b with {_parts(otherwise)}, because {problem} is not known"
        )
    counts = [count for count in (1, 2, 4, 8, 16, _MOST_MICRO_BATCHES) if count <= rows]
    timed = {
        (name, count): step_seconds(name, count, stages, lines)
        for name in ("1f1b", "gpipe")
        for count in counts
        if name == "gpipe" or count >= len(stages)
    }
    least = min(timed.values())
    # The fewest micro-batches that are about as fast; of equals 1f1b, which keeps the activations of few of them.
    schedule, count = min(
        (key for key, value in timed.items() if value <= least * (1 + _WORTH)), key=lambda key: (key[1], key[0])
    )
    return PipelineChoice(schedule, count, _sentence(schedule, count, stages, lines, timed))


def step_seconds(schedule: str, count: int, stages: Sequence[StagePace], lines: Sequence[StageLine]) -> float:
    """Return how long a step takes in which a batch is cut into `count` micro-batches."""
    total, num = [one.compute_s or 0.0 for one in stages], len(stages)
    cost = {way: [each * part / count + _MESSAGE_S for each in total] for way, part in (("F", 1 / 3), ("B", 2 / 3))}
    orders = [list(_order(schedule, count, num, stage)) for stage in range(num)]
    free, sent = [0.0] * num, [0.0] * num  # when a stage has done its last work; when its last message has left
    busy: dict[tuple[str, int], float] = {}  # until when a line carries something, by way and its earlier stage
    arrived = {("F", 0, number): 0.0 for number in range(count)}
    arrived |= {("B", num - 1, number): 0.0 for number in range(count)}
    while any(orders):
        for stage, order in enumerate(orders):
            while order and (order[0][0], stage, order[0][1]) in arrived:
                way, number = order.pop(0)
                waits = sent[stage] if schedule == "1f1b" else 0.0
                free[stage] = max(free[stage], arrived[way, stage, number], waits) + cost[way][stage]
                other = stage + (1 if way == "F" else -1)
                if 0 <= other < num:
                    line, key = lines[min(stage, other)], (way, min(stage, other))
                    busy[key] = max(busy.get(key, 0.0), free[stage]) + _carried_s(line, way) / count
                    sent[stage] = busy[key]
                    arrived[way, other, number] = busy[key] + line.delay_s
    return max(free)


def _carried_s(line: StageLine, way: str) -> float:
    nbytes, rate = (
        (line.forward_bytes, line.forward_bytes_s) if way == "F" else (line.backward_bytes, line.backward_bytes_s)
    )
    return nbytes / (rate or math.inf)


def _order(schedule: str, count: int, stages: int, stage: int) -> Iterator[tuple[str, int]]:
    """The forwards and backwards of a stage, as torch's schedules do them."""
    warm = count if schedule == "gpipe" else min(count, stages - stage)
    yield from (("F", number) for number in range(warm))
    for number in range(count):
        yield "B", number
        if warm + number < count:
            yield "F", warm + number


def _unknown(stages: Sequence[StagePace], lines: Sequence[StageLine]) -> str:
    lacking = [one.name for one in stages if not one.compute_s]
    if lacking:
        return f"how fast {' and '.join(lacking)} compute{'s' if len(lacking) == 1 else ''}"
    for line, one, other in zip(lines, stages[:-1], stages[1:], strict=True):
        if not (line.forward_bytes_s and line.backward_bytes_s):
            return f"the rate of the line from {one.name} to {other.name}"
    return ""


def _sentence(
    schedule: str,
    count: int,
    stages: Sequence[StagePace],
    lines: Sequence[StageLine],
    timed: dict[tuple[str, int], float],
) -> str:
    least = timed[schedule, count]
    other = "gpipe" if schedule == "1f1b" else "1f1b"
    others = [value for (name, _), value in timed.items() if name == other]
    beside = f" ({other} at best {show_time(min(others))})" if others else ""
    at = max(range(len(lines)), key=lambda k: _carried_s(lines[k], "F") + 2 * lines[k].delay_s) if lines else None
    line = (
        ""
        if at is None
        else f"; {show_bytes(round(lines[at].forward_bytes))} of a batch pass from {stages[at].name} to {stages[at + 1].name} at "
        f"{show_bytes(round(lines[at].forward_bytes_s or 0))}/s, {show_time(2 * lines[at].delay_s)} there and back"
    )
    busiest = max(one.compute_s or 0.0 for one in stages)
    return (
        f"schedule auto: {schedule} with {_parts(count)}, a step of about {show_time(least)}{beside}, of which the slowest stage "
        f"computes {show_time(busiest)}{line}"
    )


def _parts(count: int) -> str:
    return f"{count} micro-batch{'es' if count > 1 else ''}"
