"""How often workers should exchange over their lines: every step, or after rounds of local steps. Pure arithmetic.

It is told what the lines and the workers do a second and what a step sends, and reckons the seconds of a step of one worker
alone, of step sync and of rounds of several lengths. Exactness is worth a quarter of a step's computing; more than that goes
to rounds, of which the shortest one is taken where workers wait for the line a tenth of the time. An exchange travels while they
take the first steps of the next round (`sync_delay`), as many as it takes and at most half of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from guava_nb.config.units import show_bytes, show_time

__all__ = ["ROUNDS", "SyncChoice", "SyncWork", "Way", "WorkerPace", "choose_sync"]

#: Optimizer steps of a round that may be chosen.
ROUNDS = (5, 15, 30, 60)
#: Of a step's computing, what the line may take where every step is exchanged; of all time, where rounds are.
_STEP_SHARE, _ROUND_SHARE = 0.25, 0.1
#: How much longer an exchange may take than was reckoned and still be covered by the steps of a delay.
_MARGIN = 1.25
#: Of partial averaging with 1/64 of the elements and its usual outer step: where the validation losses of small language models
#: ended beside that of step sync, for rounds of so many steps (tests/benchmarks/RESULTS.md).
_MEASURED = {5: "0.9 % below to 1.4 % above", 15: "0.8 % above"}
#: Of the time, how much breaks of lines may cost in a forecast.
_MOST_LOST = 0.9
#: How many times faster than the slowest worker the fastest one is where local steps are dealt by pace.
_UNLIKE = 1.5


@dataclass(frozen=True, slots=True)
class WorkerPace:
    """What one worker does a second; None: not known.

    Attributes:
        name: of the worker.
        samples_s: samples that it computes a second.
        up_bytes_s, down_bytes_s: of its line, from it and to it.
        round_trip_s: of its line.
        share: its part of the samples, relative to the others'.
        breaks_s: how often a second its line passes nothing for a while; break_s: for how long, on average.
    """

    name: str
    samples_s: float | None = None
    up_bytes_s: float | None = None
    down_bytes_s: float | None = None
    round_trip_s: float = 0.0
    share: float = 1.0
    breaks_s: float = 0.0
    break_s: float = 0.0

    @property
    def lacks(self) -> str:
        """What is not known of it, in words; "" for nothing."""
        unknown = [("how fast its line is", self.up_bytes_s and self.down_bytes_s), ("its step time", self.samples_s)]
        return " and ".join(what for what, value in unknown if not value)


@dataclass(frozen=True, slots=True)
class SyncWork:
    """What a run does.

    Attributes:
        samples: of an optimizer step, at all workers together.
        sample_bytes: that travel to a worker for each of them.
        up_bytes, down_bytes: of one exchange, from each worker and to it.
        buckets: messages that make up such an exchange: their ways up and down overlap.
        other_bytes: of the whole run, at all workers together, beside its exchanges; None: not known.
        steps, steps_per_epoch: optimizer steps; a round ends with its epoch. None: not known.
        sync_delay: local steps of the next round that workers take while an exchange travels, where the user has chosen.
        round_up_bytes, round_down_bytes: as those of an exchange, where rounds of local steps end with another one.
        density: part of the elements of a pseudo-gradient that a round sends; None: all.
        round_wire: wire format of such a round; "" where it is not told.
    """

    samples: float
    sample_bytes: float
    up_bytes: float
    down_bytes: float
    buckets: int = 1
    other_bytes: float | None = None
    steps: int | None = None
    steps_per_epoch: int | None = None
    sync_delay: int = 0
    round_up_bytes: float | None = None
    round_down_bytes: float | None = None
    density: float | None = None
    round_wire: str = ""

    def exchanged(self, every: int) -> tuple[float, float]:
        """Return the bytes of an exchange after `every` steps, from each worker and to it."""
        if every > 1 and self.round_up_bytes is not None and self.round_down_bytes is not None:
            return self.round_up_bytes, self.round_down_bytes
        return self.up_bytes, self.down_bytes

    def exchanges_per_step(self, every: int) -> float:
        """Return how many exchanges there are for an optimizer step where rounds have `every` of them."""
        each = self.steps_per_epoch
        return 1 / every if not each else math.ceil(each / every) / each


@dataclass(frozen=True, slots=True)
class Way:
    """One way to train, per optimizer step. Times are NaN where they are not known.

    Attributes:
        name: what it is called in a table.
        every: optimizer steps between exchanges; 0 for one worker alone.
        compute_s: of the slowest worker.
        seconds: of a step, with the line.
        sync_delay: local steps that an exchange travels beside.
        run_bytes: of the run, in both directions; None: not known.
        run_s: of the run; None: not known.
    """

    name: str
    every: int
    compute_s: float
    seconds: float
    sync_delay: int = 0
    run_bytes: float | None = None
    run_s: float | None = None

    @property
    def line_share(self) -> float:
        """Which part of the time workers wait for the line."""
        return 1 - self.compute_s / self.seconds if self.seconds else 0.0

    @property
    def time(self) -> str:
        """Of the run, else of a step, in words."""
        if math.isnan(self.seconds):
            return "-"
        return f"{show_time(self.seconds)} a step" if self.run_s is None else show_time(self.run_s)


@dataclass(frozen=True, slots=True)
class SyncChoice:
    """What was chosen, and why.

    Attributes:
        sync, sync_every, sync_delay: as options of a run.
        sentence: what was chosen, why, and what it costs; "" where the user chose.
        ways: all that were weighed; none where something is not known.
        warning: that it takes longer than one worker alone would; "" where it does not, or that is not known.
        is_uneven: faster workers take more local steps.
    """

    sync: str
    sync_every: int
    sentence: str
    ways: tuple[Way, ...] = ()
    warning: str = ""
    is_uneven: bool = False
    sync_delay: int = 0

    @property
    def chosen(self) -> Way | None:
        """The way that was chosen."""
        return next((way for way in self.ways if way.every == self.sync_every), None)

    def rows(self) -> list[tuple[str, ...]]:
        """Return the rows of a table: a way, its bytes, its time, whose numbers it gives."""
        return [
            (
                f"{way.name}{' (chosen)' if way.every == self.sync_every else ''}",
                "-" if way.run_bytes is None else show_bytes(round(way.run_bytes)),
                way.time,
                "another algorithm" if way.every > 1 else "plain PyTorch's",
            )
            for way in self.ways
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        kept = ("sync", "sync_every", "sentence", "warning")
        ways = [{"every": way.every, "bytes": way.run_bytes, "seconds": way.run_s} for way in self.ways]
        return {**{name: getattr(self, name) for name in kept}, "ways": ways}


def choose_sync(
    work: SyncWork, paces: Sequence[WorkerPace], refused: str = "", asked: int = 0, measured: bool = False
) -> SyncChoice:
    """Choose between step sync and rounds of local steps.

    Args:
        work: of the run.
        paces: of its workers.
        refused: why rounds cannot be; "" where they can.
        asked: optimizer steps between exchanges where the user has chosen; 0: they are chosen here.
        measured: in rounds a faster worker may take more local steps.

    Returns:
        Step sync where rounds cannot be or something is not known, and where the line takes no more than a quarter of a step's
        computing or rounds are not faster by a quarter. Else the shortest round of `ROUNDS` of which the line takes a tenth, or
        the fastest one.
    """
    why = _why_step(paces, refused)
    dealt = [replace(pace, share=pace.samples_s or 1.0) for pace in paces] if measured and _are_unlike(paces) else paces
    lengths = sorted({1, *ROUNDS, asked or 1})
    lone, ways = (
        alone(work, paces),
        [
            together(work, paces if every == 1 else dealt, every, work.sync_delay if every == asked else None)
            for every in lengths
        ],
    )
    if len(paces) < 2 or any(pace.lacks for pace in paces):
        told = f"sync auto: an exchange in every step, with the numbers of plain PyTorch, because {why}"
        timeless = [replace(way, compute_s=math.nan, seconds=math.nan, run_s=None) for way in (lone, *ways)]
        return SyncChoice("step", asked or 1, told, tuple(timeless) if len(paces) > 1 else ())
    chosen, reason = _chosen(ways, why, asked)
    warning = ""
    if chosen.seconds > lone.seconds:
        warning = (
            f"{_called(chosen)} over these lines would take longer than {lone.name}: about {chosen.time} against "
            f"{lone.time}{_advice(ways, lone, chosen)}"
        )
    sync = "step" if chosen.every == 1 else "local"
    sentence = (
        ""
        if asked
        else f"sync auto: {_called(chosen)}, because {reason}; {_cost(chosen, ways[0], lone, dealt, work)}{_breaks(paces)}"
    )
    uneven = sync == "local" and dealt is not paces
    return SyncChoice(sync, chosen.every, sentence, (lone, *ways), warning, uneven, chosen.sync_delay)


def alone(work: SyncWork, paces: Sequence[WorkerPace]) -> Way:
    """Return how one worker, the best of them, does all samples by itself: it exchanges nothing."""

    def seconds(pace: WorkerPace) -> float:
        coming_s = work.samples * work.sample_bytes / (pace.down_bytes_s or math.inf)
        return max(work.samples / (pace.samples_s or math.inf), coming_s)

    best = min(paces, key=seconds)
    compute_s = work.samples / (best.samples_s or math.inf)
    return _way(work, f"{best.name} alone", 0, compute_s, seconds(best), 0.0)


def together(work: SyncWork, paces: Sequence[WorkerPace], every: int, sync_delay: int | None = None) -> Way:
    """Return how all workers train with an exchange after `every` steps.

    Batches are sent ahead, so computing and what it waits for overlap with them; an exchange overlaps with the local steps of a
    delay only, and that of an epoch's last round with none. Buckets that are complete come down while others go up.

    Args:
        sync_delay: local steps that an exchange travels beside; None: as many as it takes, with a break of a line where lines
            break, at most half of a round.
    """
    total = sum(pace.share for pace in paces)
    rate = work.exchanges_per_step(every)
    parts = [(pace, work.samples * pace.share / total) for pace in paces]
    compute_s = max(samples / (pace.samples_s or math.inf) for pace, samples in parts)
    up_bytes, down_bytes = work.exchanged(every)
    up_s = max(up_bytes / (pace.up_bytes_s or math.inf) for pace in paces)
    down_s = max(down_bytes / (pace.down_bytes_s or math.inf) for pace in paces)
    exchange_s = max(up_s, down_s) + min(up_s, down_s) / work.buckets + max(pace.round_trip_s for pace in paces)
    coming_s = max(
        (samples * work.sample_bytes + rate * down_bytes) / (pace.down_bytes_s or math.inf) for pace, samples in parts
    )
    name = "step sync" if every == 1 else f"local, rounds of {every} steps"
    covering_s = _MARGIN * exchange_s + max(pace.break_s for pace in paces)
    delay = every // 2 if sync_delay is None else sync_delay
    if sync_delay is None and covering_s < delay * compute_s:
        delay = math.ceil(covering_s / compute_s)
    covered_s = min(exchange_s, min(delay, every - 1) * compute_s)
    last_rate = 1 / work.steps_per_epoch if work.steps_per_epoch else 0.0
    seconds = max(compute_s + rate * exchange_s - (rate - last_rate) * covered_s, coming_s)
    spare_s = max(0.0, min(delay, every - 1) * compute_s - exchange_s)
    lost_s = [pace.breaks_s * _lost_s(pace.break_s, seconds / rate, exchange_s, spare_s) for pace in paces]
    seconds /= 1 - min(_MOST_LOST, sum(lost_s))
    return _way(work, name, every, compute_s, seconds, rate * len(paces) * (up_bytes + down_bytes), delay)


def _lost_s(break_s: float, round_s: float, exchange_s: float, spare_s: float) -> float:
    """Return for how long all workers wait because of one break of a line, on average.

    It delays an exchange that is under way, or that would begin before it is over; all else of a round goes on.

    Args:
        break_s: of the break.
        round_s: between two exchanges.
        exchange_s: of one.
        spare_s: how much later one may end before workers wait for it.
    """
    beyond_s = max(0.0, break_s - spare_s)
    return min(break_s, beyond_s * (exchange_s + beyond_s / 2) / round_s) if round_s else break_s


def _way(
    work: SyncWork, name: str, every: int, compute_s: float, seconds: float, step_bytes: float, sync_delay: int = 0
) -> Way:
    if work.steps is None:
        return Way(name, every, compute_s, seconds, sync_delay)
    run_bytes = None if work.other_bytes is None else work.other_bytes + work.steps * step_bytes
    return Way(name, every, compute_s, seconds, sync_delay, run_bytes, work.steps * seconds)


def _why_step(paces: Sequence[WorkerPace], refused: str) -> str:
    if refused:
        return refused
    if len(paces) < 2:
        return "there is only one worker"
    return "; ".join(f"{pace.lacks} at {pace.name} is not known" for pace in paces if pace.lacks)


def _chosen(ways: Sequence[Way], why: str, asked: int) -> tuple[Way, str]:
    """Return the way to go and the reason; `ways` begin with step sync."""
    step, rounds = ways[0], ways[1:]
    line_s = step.seconds - step.compute_s
    takes = f"with one in every step the line would take {show_time(line_s)} beside {show_time(step.compute_s)} of computing"
    if asked or why:
        return next(way for way in ways if way.every == (asked or 1)), why
    if line_s <= _STEP_SHARE * step.compute_s:
        told = f"the line takes {show_time(line_s)} of it beside {show_time(step.compute_s)} of computing"
        return step, f"{told}, less than a quarter"
    best = min(rounds, key=lambda way: way.seconds)  # of equal ones the shortest
    if best.seconds > step.seconds / (1 + _STEP_SHARE):
        return step, f"{takes}, and rounds of local steps {show_time(best.seconds)} in all, hardly less"
    fitting = next((way for way in rounds if way.line_share <= _ROUND_SHARE), None)
    if fitting is None:
        fitting = best
    return fitting, f"{takes}, and in these rounds workers wait for it {fitting.line_share:.0%} of the time"


def _called(way: Way) -> str:
    if way.every == 1:
        return "an exchange in every step"
    goes_on = f", which travels during the next {way.sync_delay} (sync_delay)" if way.sync_delay else ""
    return f"an exchange after each {way.every} local steps{goes_on}"


def _are_unlike(paces: Sequence[WorkerPace]) -> bool:
    """Whether some workers are so much faster that others should not wait for as many local steps of theirs."""
    rates = [pace.samples_s or 0.0 for pace in paces]
    return max(rates) > _UNLIKE * min(rates)


def _cost(chosen: Way, step: Way, lone: Way, paces: Sequence[WorkerPace], work: SyncWork) -> str:
    """Say what a choice costs in bytes, time and exactness."""
    sent = "" if chosen.run_bytes is None else f"{show_bytes(round(chosen.run_bytes))} and "
    told = f"{sent}about {chosen.time}"
    beside = f"{lone.name}: {lone.time}"
    if chosen.every == 1:
        return f"{told} ({beside}), and the numbers are those of plain PyTorch on one machine"
    if step.run_bytes is not None:
        beside = f"with an exchange in every step {show_bytes(round(step.run_bytes))} and {step.time}; {beside}"
    return (
        f"{told} ({beside}), and not the numbers of plain PyTorch: an average of the weights that {len(paces)} workers reach in "
        f"{_local_steps(chosen.every, paces)}{_sent(work, chosen.every)}"
    )


def _sent(work: SyncWork, every: int) -> str:
    """Say what it is worth that pseudo-gradients do not travel as they are."""
    density = work.density
    if density is None:
        return (
            f", sent as {work.round_wire} (wire): what a message leaves out is sent with the next one"
            if work.round_wire
            else ""
        )
    measured = _MEASURED.get(every) if density == 1 / 64 else None
    told = f", of which the largest 1/{1 / density:.3g} travels and the rest stays with its worker"
    if measured is None:
        return f"{told}; what that costs in loss was not measured for rounds of {every} steps"
    return (
        f"{told}; measured with small language models, after 10,000 steps the loss was {measured} that of an exchange in "
        "every step; shorter runs lose more, and so may other models"
    )


def _breaks(paces: Sequence[WorkerPace]) -> str:
    """Say what breaks of lines these times count."""
    silent = [
        f"{show_time(pace.break_s)} every {show_time(1 / pace.breaks_s)} from {pace.name}"
        for pace in paces
        if pace.breaks_s
    ]
    return (
        f". So far nothing came for {', for '.join(silent)}: these times are for lines that go on so" if silent else ""
    )


def _local_steps(every: int, paces: Sequence[WorkerPace]) -> str:
    total = sum(pace.share for pace in paces)
    steps = [round(every * len(paces) * pace.share / total) for pace in paces]
    return f"{every} steps each" if len(set(steps)) == 1 else f"{min(steps)} to {max(steps)} steps, each by its pace"


def _advice(ways: Sequence[Way], lone: Way, chosen: Way) -> str:
    better = next((way for way in ways if way.every > 1 and way.seconds < lone.seconds), None)
    if better is not None and chosen.every == 1:
        return (
            f". sync='auto' (--sync auto) exchanges less often: after each {better.every} local steps it takes about "
            f"{better.time}, with other numbers than plain PyTorch's"
        )
    return f". Have only {lone.name.removesuffix(' alone')} join, or give the others a faster line"
