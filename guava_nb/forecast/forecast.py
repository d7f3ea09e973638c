"""What a run will send and receive, reckoned before it: the arithmetic, and the record that a person sees.

Pure: it is told what a step, a batch, a state takes (see `guava_nb.forecast.run_parts`) and adds up. Bytes are those of the
orchestrator's sessions with all headers, before encryption, uncompressed.
"""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from guava_nb.cluster.traffic import KINDS, NOTHING, Traffic
from guava_nb.config.units import show_bytes, show_time
from guava_nb.forecast.sync_choice import SyncChoice

__all__ = ["Feeding", "Forecast", "Parts", "Saving", "seconds_for"]

_ROWS_OF_EPOCHS = 4  # more different ones are summed up
#: Bytes a second of the lines that are named where none was measured.
_USUAL_LINES = ((1_250_000, "10 Mbit/s"), (12_500_000, "100 Mbit/s"))
#: Epochs of a run that are counted one by one: each takes some microseconds, whenever a run begins.
_COUNTED_EPOCHS = 1000


@dataclass(frozen=True, slots=True)
class Feeding:
    """One loader, pass after pass.

    Attributes:
        batches, rows: of one pass; None where the loader cannot tell.
        batch: orders and structure of one batch of which rows travel, answers included.
        held: the same where all rows are held by the workers.
        row: one sample.
        key: what names one sample where workers keep samples.
        travel: part of the samples that travels in each pass, 0 to 1; the last one holds for all later ones.
    """

    batches: int | None
    rows: float | None
    batch: Traffic
    row: Traffic
    held: Traffic = NOTHING
    key: float = 0.0
    travel: tuple[float, ...] = (1.0,)

    def squeezed(self, left: Callable[[Traffic], Traffic]) -> Feeding:
        """The same, of whose bytes `left` says what compression leaves."""
        return replace(self, batch=left(self.batch), row=left(self.row), held=left(self.held))

    def part(self, number: int, share: float = 1.0) -> Traffic | None:
        """What pass `number`, from 0, or a part of it takes; None where the loader cannot tell how long it is."""
        if self.batches is None or self.rows is None:
            return None
        travel = self.travel[min(number, len(self.travel) - 1)]
        return self._some(self.batches * share, self.rows * share, travel)

    def one_batch(self, number: int = 0, rows: float = 0.0) -> Traffic:
        """What one batch of so many samples takes in pass `number`."""
        return self._some(1.0, rows, self.travel[min(number, len(self.travel) - 1)])

    def _some(self, batches: float, rows: float, travel: float) -> Traffic:
        if travel <= 0.0:
            return self.held * batches + Traffic.going("control", self.key * rows)
        # Where few rows travel, most batches have one all the same: they count as samples, orders included.
        return self.batch * batches + Traffic.going("sample", self.key * rows) + self.row * (rows * travel)


@dataclass(frozen=True, slots=True)
class Parts:
    """What a run consists of.

    Attributes:
        start: before the first step: source, state and group.
        step: an optimizer step without its batches.
        train: batches; `batches` counts those of the loader.
        accumulation: loader batches per optimizer step.
        epochs: passes that are left to do, the first one perhaps a part of one.
        done: optimizer steps before them, of the runs that this one goes on from.
        validation: batches to validate on; None without.
        val_interval: optimizer steps between validations; None validates after each epoch.
        state: the whole state, once back to the orchestrator.
        state_every: optimizer steps after which it comes (snapshots, checkpoints); `each_epoch`: after every epoch but the last.
        ends_with_state: the state of the last step comes back at the end.
    """

    start: Traffic
    step: Traffic
    train: Feeding
    accumulation: int
    epochs: tuple[float, ...]
    validation: Feeding | None = None
    val_interval: int | None = None
    state: Traffic = NOTHING
    state_every: tuple[int, ...] = ()
    each_epoch: bool = False
    ends_with_state: bool = True
    done: int = 0

    def squeezed(self, left: Callable[[Traffic], Traffic]) -> Parts:
        """The same, of whose bytes `left` says what compression leaves."""
        start, step, state = map(left, (self.start, self.step, self.state))
        val = self.validation and self.validation.squeezed(left)
        return replace(self, start=start, step=step, train=self.train.squeezed(left), validation=val, state=state)

    @property
    def steps_per_epoch(self) -> int | None:
        """Optimizer steps of a whole epoch."""
        return None if self.train.batches is None else math.ceil(self.train.batches / self.accumulation)

    def steps(self) -> int | None:
        """Optimizer steps of the run."""
        each = self.steps_per_epoch
        return None if each is None else sum(round(each * share) for share in self.epochs)

    def one_step(self, rows: float) -> Traffic:
        """What an optimizer step on so many samples takes in the first pass."""
        return self.step + self.train.one_batch(0, rows / self.accumulation) * self.accumulation

    def epoch(self, number: int) -> Traffic | None:
        """What an epoch takes, validation and snapshots included; None where its length is not known."""
        each, share = self.steps_per_epoch, self.epochs[number]
        total = self.train.part(number, share)
        if each is None or total is None:
            return None
        first = round(each * self.epochs[0]) + each * (number - 1) if number else 0  # the first alone may be a part
        before = self.done + first
        after = before + round(each * share)
        for passed in range(*self._passes(number, before, after)):
            walked = None if self.validation is None else self.validation.part(passed)
            if walked is None:
                return None
            total = total + walked
        return total + self.step * (after - before) + self.state * self._states(number, before, after)

    def _passes(self, number: int, before: int, after: int) -> tuple[int, int]:
        """Validations before this epoch and up to its end, of so many steps each."""
        if self.validation is None:
            return 0, 0
        every = self.val_interval
        if every is None:
            return number, number + 1
        already = self.done // every
        return before // every - already, after // every - already

    def _states(self, number: int, before: int, after: int) -> int:
        steps = {step for every in self.state_every for step in range((before // every + 1) * every, after + 1, every)}
        return len(steps | {after} if self.each_epoch and number < len(self.epochs) - 1 else steps)

    def end(self) -> Traffic:
        """What comes back at the end, unless it came with the last snapshot."""
        steps = self.steps()
        there = steps is not None and any((self.done + steps) % every == 0 for every in self.state_every)
        return self.state if self.ends_with_state and not there else NOTHING

    def every_epoch(self) -> tuple[Traffic, ...]:
        """What each epoch takes, as far as it is known how long one is."""
        return tuple(epoch for number in range(len(self.epochs)) if (epoch := self.epoch(number)) is not None)

    def run(self) -> Traffic | None:
        """What all of it takes; None where the length of an epoch is not known.

        Of a run of very many epochs, as one that is to be stopped by hand, those after the first ones count as the last of them.
        """
        first = [self.epoch(number) for number in range(min(len(self.epochs), _COUNTED_EPOCHS))]
        known = [epoch for epoch in first if epoch is not None]
        if len(known) < len(first):
            return None
        more = len(self.epochs) - len(known)
        return sum(known, self.start + self.end()) + (known[-1] * more if more else NOTHING)


@dataclass(frozen=True, slots=True)
class Saving:
    """Something that would make the run smaller: what to do, and what it would take then."""

    what: str
    run_bytes: int
    per_step: bool = False  # the bytes are those of a step: the length of the run is not known


def seconds_for(traffic: Traffic, rates: tuple[float | None, float | None]) -> float | None:
    """Return how long the bytes take at least at these bytes a second out and in, which overlap; None: not measured."""
    parts = [(nbytes, rate) for nbytes, rate in zip((traffic.out_bytes, traffic.in_bytes), rates, strict=True)]
    if any(rate is None and nbytes for nbytes, rate in parts):
        return None
    return max((nbytes / rate for nbytes, rate in parts if rate), default=0.0)


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a run will send and receive at the orchestrator; nothing was started.

    Attributes:
        mode, workers: of the run.
        steps: optimizer steps of the run; None where the loader has no length. steps_per_epoch likewise.
        start, step, validation, end, run: bytes before the first step, of a step, of a validation, of what comes back at
            the end, of all; `run` is None where the length of an epoch is not known.
        epochs: of each epoch, validations and snapshots included.
        rates_bytes_s: measured on the lines out and in; None: not measured yet.
        encrypted: TLS adds about 0.2 %, which is not in these figures.
        savings: what would make it smaller.
        notes: what the figures do not hold, one sentence each.
        first_epoch: number of the first of the epochs, which is not 1 after a checkpoint.
        only_ends: all steps of that first one are done; only what ends it, its validation, is left.
        sync: how often to exchange, chosen or compared with the other ways; None: not known.
    """

    mode: str
    workers: int
    steps: int | None
    steps_per_epoch: int | None
    start: Traffic
    step: Traffic
    validation: Traffic | None
    end: Traffic
    epochs: tuple[Traffic, ...]
    run: Traffic | None
    rates_bytes_s: tuple[float | None, float | None] = (None, None)
    encrypted: bool = True
    budget_bytes: int = 0
    savings: tuple[Saving, ...] = ()
    notes: tuple[str, ...] = field(default=())
    first_epoch: int = 1
    only_ends: bool = False
    sync: SyncChoice | None = None

    @property
    def run_bytes(self) -> int | None:
        """Both directions of the run together."""
        return None if self.run is None else round(self.run.total_bytes)

    @property
    def seconds(self) -> float | None:
        """How long the bytes of the run take at least; None where they, or the lines, are not known."""
        return None if self.run is None else seconds_for(self.run, self.rates_bytes_s)

    def columns(self) -> list[tuple[str, Traffic]]:
        """What is worth a row of its own, with its name."""
        before = [("start", self.start), ("step", self.step), ("validation", self.validation)]
        rows = [*before, *self._epoch_rows(), ("end", self.end), ("run", self.run)]
        return [(name, traffic) for name, traffic in rows if traffic is not None]

    def _epoch_rows(self) -> list[tuple[str, Traffic]]:
        """Epochs that take the same share a row; of many different ones those in the middle do, with their sum."""
        every = range(len(self.epochs))
        alike = [list(same) for _, same in itertools.groupby(every, key=lambda index: self.epochs[index].record())]
        rows = [(self._named(which, ", each"), self.epochs[which[0]]) for which in alike]
        if len(rows) > _ROWS_OF_EPOCHS:
            middle = range(alike[2][0], alike[-1][0])
            rows[2:-1] = [(self._named(middle, ", together"), sum((self.epochs[i] for i in middle), NOTHING))]
        return rows

    def _named(self, which: Sequence[int], how: str) -> str:
        first, last = which[0] + self.first_epoch, which[-1] + self.first_epoch
        return f"epoch {first}" if first == last else f"epochs {first} to {last}{how}"

    def answers(self) -> list[str]:
        """What one asks for first: how long it takes, whether the budget is enough, what would make it smaller."""
        chosen = [] if self.sync is None else [text for text in (self.sync.sentence, self.sync.warning) if text]
        return [*chosen, *self._times(), *self._budget(), *map(self._saving, self.savings)]

    def sentences(self) -> list[str]:
        """What else is to be said beside the figures."""
        encrypted = "Counted before encryption: TLS, and WebSocket where it is used, add about 0.2 %."
        return [*self._each_worker(), *self.notes, *([encrypted] if self.encrypted else [])]

    def _each_worker(self) -> list[str]:
        """Whose bytes the table has, and what one of several workers has of them."""
        traffic, when = (self.step, "a step") if self.run is None else (self.run, "the run")
        if self.workers < 2:
            return []
        down, up = (show_bytes(round(nbytes / self.workers)) for nbytes in (traffic.out_bytes, traffic.in_bytes))
        return [
            f"Out and in are what this machine sends and receives for all {self.workers} workers together; each of them receives "
            f"{down} and sends {up} in {when}, on average."
        ]

    def _times(self) -> list[str]:
        said = []
        if self.run is None:
            said.append("The loader has no length, so only a step can be reckoned, not an epoch or the run.")
        if self.only_ends:
            said.append(f"All steps of epoch {self.first_epoch} are done; its validation is left, and counted.")
        ways = zip(self.rates_bytes_s, ("out", "in"), strict=True)
        lines = [f"{show_bytes(round(rate))}/s {way}" for rate, way in ways if rate is not None]
        if self.seconds is not None:
            said.append(
                f"At the measured {' and '.join(lines)} the bytes of the run take at least {show_time(self.seconds)}."
            )
        elif len(lines) < 2:
            said.append(f"{self._usual_times()}%guava_doctor with the join code measures it where a worker is.")
        return said

    def _usual_times(self) -> str:
        """The rate of the line is not known: the time on two common ones."""
        run = self.run
        if run is None:
            return "How fast the line is was not measured here: "
        times = [f"{show_time(seconds_for(run, (rate, rate)) or 0.0)} at {name}" for rate, name in _USUAL_LINES]
        return f"At least {' or '.join(times)} each way; how fast the line is was not measured here: "

    def _budget(self) -> list[str]:
        if not self.budget_bytes:
            return []
        budget = show_bytes(self.budget_bytes)
        if self.run_bytes is None:
            return [f"Budget {budget}: the run stops before it is passed, wherever it is then."]
        if self.run_bytes > self.budget_bytes:
            part = self.budget_bytes / self.run_bytes
            return [f"Budget {budget}: not enough; the run would stop after about {part:.0%} of it, with a checkpoint."]
        return [f"Budget {budget}: enough, {show_bytes(self.budget_bytes - self.run_bytes)} remain."]

    def _saving(self, saving: Saving) -> str:
        now = round(self.step.total_bytes) if saving.per_step else self.run_bytes
        what = "a step" if saving.per_step else "the run"
        less = "" if not now else f", {1 - saving.run_bytes / now:.0%} less"
        return f"Smaller: {saving.what}: {show_bytes(saving.run_bytes)} for {what}{less}."

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data; bytes under the names of `run.wire`."""

        def plain(traffic: Traffic | None) -> dict[str, int] | None:
            return None if traffic is None else traffic.record()

        known = ("mode", "workers", "steps", "steps_per_epoch", "run_bytes", "seconds", "budget_bytes")
        return {
            **{name: getattr(self, name) for name in known},
            **{name: plain(getattr(self, name)) for name in ("start", "step", "validation", "end", "run")},
            "epochs": [plain(epoch) for epoch in self.epochs],
            "rate_out_bytes_s": self.rates_bytes_s[0],
            "rate_in_bytes_s": self.rates_bytes_s[1],
            "savings": [
                {"what": s.what, "bytes": s.run_bytes, "of": "step" if s.per_step else "run"} for s in self.savings
            ],
            "notes": list(self.notes),
            "sync": None if self.sync is None else self.sync.to_dict(),
        }

    def ways(self) -> list[tuple[str, ...]]:
        """Return the rows of the table of ways to exchange, its head first; none where they are not known."""
        rows = [] if self.sync is None else self.sync.rows()
        return [("exchange", "bytes", "time", "numbers"), *rows] if rows else []

    def cells(self) -> list[tuple[str, ...]]:
        """Return the rows of its table: a name, bytes out and in, bytes by kind."""
        return [
            (name, *map(_shown, (traffic.out_bytes, traffic.in_bytes, *map(traffic.of, KINDS))))
            for name, traffic in self.columns()
        ]

    def __repr__(self) -> str:
        """The whole forecast as text."""
        tables = [*_lines(self.ways()), *_lines([("", "out", "in", *KINDS), *self.cells()])]
        return "\n".join([self.headline(), *self.answers(), *tables, *self.sentences()])

    def headline(self) -> str:
        """One line: what, how long, how much."""
        workers = f"{self.workers} worker{'' if self.workers == 1 else 's'}"
        trained = len(self.epochs) - self.only_ends
        length = f"{self.steps} steps in {trained} epoch{'' if trained == 1 else 's'}"
        if self.steps is None:
            length = "unknown length"
        elif not trained:
            length = f"no step, only the validation that ends epoch {self.first_epoch}"
        total = "" if self.run_bytes is None else f", {show_bytes(self.run_bytes)} in all"
        return f"forecast: {self.mode} mode, {workers}, {length}{total}"

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(repr(self))}</pre>"


def _lines(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a table as lines of text."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def _shown(nbytes: float) -> str:
    return show_bytes(round(nbytes)) if round(nbytes) else "-"
