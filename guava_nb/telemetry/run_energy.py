"""What the workers tell of their energy, as the orchestrator adds it up: per worker, run, epoch, phase; each board once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from guava_nb.protocol.messages import AskEnergy, BoardEnergy, Energy, Hello, Message
from guava_nb.status import DeviceUse
from guava_nb.telemetry import NOT_MEASURED
from guava_nb.telemetry.device_curves import DeviceCurves
from guava_nb.telemetry.machine import RATES
from guava_nb.telemetry.window import total_joules

__all__ = ["EnergyBook", "RunEnergy"]

T = TypeVar("T")
Tell = Callable[[int, Message], bool]
#: Samples that a member has done in a run, and tokens, None where they are not counted.
Worked = Callable[[int], tuple[int, float | None]]

#: Seconds that the end of a run waits for the workers' last figures.
LAST_WORD_S = 1.0
#: Shortest stretch that becomes a point of the watt curve, and how many are kept.
_CURVE_S, _CURVE_POINTS = 0.5, 2000


class EnergyBook:
    """The newest report of each member, and the answers to questions. From any thread.

    Attributes:
        asked: mark of the last question; they count from 1.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._newest: dict[int, Energy] = {}
        self.asked = 0
        self._listeners: list[RunEnergy] = []

    def take(self, rank: int, message: Energy) -> None:
        """A member reported."""
        with self._changed:
            self._newest[rank] = message
            for run in self._listeners:
                run.heard(rank, message)
            self._changed.notify_all()

    def forget(self, rank: int) -> None:
        """Forget this member, unless it worked in the present run."""
        with self._changed:
            self._newest.pop(rank, None)
            for run in self._listeners:
                run.forget(rank)

    def newest(self, rank: int) -> Energy | None:
        """Return a member's last report."""
        return self._newest.get(rank)

    def ask(self, run_id: str, ranks: Iterable[int], tell: Tell) -> tuple[int, list[int]]:
        """Ask members for their figures as of now; returns the mark, and those who were asked."""
        with self._changed:
            self.asked += 1
            mark = self.asked
        return mark, [rank for rank in ranks if tell(rank, AskEnergy(run_id, mark))]

    def follow(self, run: RunEnergy) -> None:
        """Have a run hear all reports from now on."""
        with self._changed:
            self._listeners = [run]

    def read(self, of_run: Callable[[], T]) -> T:
        """Return what a run made of the reports that it has heard, while it hears none."""
        with self._changed:
            return of_run()

    def leave(self, run: RunEnergy) -> None:
        """Let a run hear nothing more."""
        with self._changed:
            self._listeners = [other for other in self._listeners if other is not run]

    def wait(self, ready: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until reports have made a condition true."""
        with self._changed:
            return self._changed.wait_for(ready, timeout_s)


@dataclass(slots=True)
class _Heard:
    """What one member told in a run: its last word, and what it said at marks."""

    last: Energy
    marks: dict[int, Energy] = field(default_factory=dict)
    curve: list[tuple[float, float]] = field(default_factory=list)
    machine: dict[str, tuple[float, int]] = field(default_factory=dict)  # sum and number of what its machine showed

    def look(self, report: Energy) -> None:
        """Note how busy its machine was."""
        rates = dict(zip(RATES, report.rates, strict=False))
        shown = {
            "gpu_busy": report.busy,
            "gpu_memory_used_bytes": report.memory_used_bytes,
            "cpu_busy": report.cpu_busy,
            "host_memory_used_bytes": report.host_memory_used_bytes,
            **rates,
        }
        for name, value in shown.items():
            if value is not None:
                total, count = self.machine.get(name, (0.0, 0))
                self.machine[name] = (total + value, count + 1)


class RunEnergy:
    """One run's energy.

    Args:
        book: of the session.
        run_id: of the run.
        tell: sends a message to a member; False when it is gone.
        name: of a member.
        hello: what a member said of its device and its machine.
        worked: what a member has done in this run so far.
        clock: seconds.
    """

    def __init__(
        self,
        book: EnergyBook,
        run_id: str,
        tell: Tell,
        name: Callable[[int], str],
        hello: Callable[[int], Hello],
        worked: Worked,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._book, self._run_id, self._tell, self._name, self._hello = book, run_id, tell, name, hello
        self._worked, self._clock, self._begun = worked, clock, clock()
        self._devices = DeviceCurves()
        self._heard: dict[int, _Heard] = {}
        self._epochs: list[int] = []  # marks at the end of each epoch
        self._members: set[int] = set()
        book.follow(self)

    def heard(self, rank: int, message: Energy) -> None:
        """A member reported; the book's lock is held."""
        if message.run_id != self._run_id:
            return
        known = self._heard.setdefault(rank, _Heard(message))
        _draw(known.curve, known.last, message)
        known.last = message
        known.look(message)
        hello = self._hello(rank)
        self._devices.heard(self._name(rank), hello.host_id or hello.hostname, self._clock() - self._begun, message)
        if 0 < message.mark <= self._book.asked:
            known.marks[message.mark] = message

    def forget(self, rank: int) -> None:
        """A member is long gone; the book's lock is held. What it did counts, if it worked here."""
        if rank not in self._members:
            self._heard.pop(rank, None)

    def takes_part(self, ranks: Iterable[int]) -> None:
        """Note who works in this run."""
        self._members.update(ranks)

    def end_epoch(self, ranks: Iterable[int]) -> int:
        """An epoch ended: ask for figures, and wait for nothing; returns the place of its figures among those of epochs."""
        mark, _ = self._book.ask(self._run_id, ranks, self._tell)
        self._epochs.append(mark)
        return len(self._epochs) - 1

    def end(self, ranks: Iterable[int]) -> None:
        """The run ended: take the last report of every worker, waiting a moment for it."""
        mark, asked = self._book.ask(self._run_id, ranks, self._tell)
        self._book.wait(lambda: all(mark in self._marks_of(rank) for rank in asked), LAST_WORD_S)
        self._book.leave(self)
        done = {rank: self._worked(rank) for rank in self._members | set(self._heard)}
        self._worked = lambda rank: done.get(rank, (0, None))  # the session's next run counts anew

    def _marks_of(self, rank: int) -> dict[int, Energy]:
        known = self._heard.get(rank)
        return {} if known is None else known.marks

    # -------------------------------------------------------------------------------------------------------- figures

    def records(self) -> list[dict[str, Any]]:
        """Return one dict per worker: worker, device, joules or None, method, and what else is known.

        A board that several workers share stands with the first of them; the others say with whom. From any thread.
        """
        owners: dict[str, str] = {}
        return self._book.read(
            lambda: [self._record(rank, owners) for rank in sorted(self._members | set(self._heard))]
        )

    def joules(self) -> float | None:
        """Return the run's joules, each board counted once; None when nothing was measured."""
        known = [record["joules"] for record in self.records() if record["joules"] is not None]
        return sum(known) if known else None

    def curves(self) -> dict[str, list[tuple[float, float]]]:
        """Return (seconds since it prepared the run, watts of all its boards) per worker, thinned; of those measured only."""
        return self._book.read(
            lambda: {self._name(rank): list(known.curve) for rank, known in sorted(self._heard.items()) if known.curve}
        )

    def devices(self) -> tuple[DeviceUse, ...]:
        """Return how the workers' devices were used so far; each once, also where workers share one."""
        return self._book.read(self._devices.uses)

    def _record(self, rank: int, owners: dict[str, str]) -> dict[str, Any]:
        name = self._name(rank)
        samples, tokens = self._worked(rank)
        record: dict[str, Any] = {
            "worker": name, "device": self._hello(rank).device_name, "joules": None, "method": NOT_MEASURED,
            "samples": samples, "tokens": tokens,
        }  # fmt: skip
        known = self._heard.get(rank)
        if known is None:
            return {**record, "why": "no report came"}
        last = known.last
        mine, shared = _apart(last.boards, name, owners)
        methods = dict.fromkeys(board.method for board in mine if board.joules is not None)
        if methods:
            record |= {"joules": total_joules(mine), "method": " + ".join(methods)}
        elif shared:
            record["method"] = f"in the figure of {', '.join(sorted(set(shared.values())))}: the same board"
        return {
            **record,
            "seconds": last.seconds,
            "boards": [_board(board, shared.get(board.key)) for board in last.boards],
            "phases": {part.phase: {"seconds": part.seconds, "joules": part.joules} for part in last.phases},
            "tasks": {t.task: {"seconds": t.seconds, "joules": t.joules, "times": t.times} for t in last.tasks},
            "epochs": self._epochs_of(known, [board.key for board in mine]),
            "machine": {name: total / count for name, (total, count) in known.machine.items()},
            "flops_per_sample": last.flops,
            "why": last.why,
        }

    def _epochs_of(self, known: _Heard, keys: list[str]) -> list[float | None]:
        """Joules of each epoch, those of boards that count for this worker."""
        found: list[float | None] = []
        before: float | None = 0.0
        for mark in self._epochs:
            then = known.marks.get(mark)
            total = None if then is None else total_joules(board for board in then.boards if board.key in keys)
            found.append(None if total is None or before is None else total - before)
            before = total
        return found


def _draw(curve: list[tuple[float, float]], before: Energy, now: Energy) -> None:
    """Add the average power between two reports; those close together say nothing new."""
    then, joules = total_joules(before.boards), total_joules(now.boards)
    if then is None or joules is None or now.seconds < before.seconds + _CURVE_S:
        return
    curve.append((now.seconds, (joules - then) / (now.seconds - before.seconds)))
    if len(curve) > _CURVE_POINTS:
        del curve[1::2]


def _apart(
    boards: Iterable[BoardEnergy], name: str, owners: dict[str, str]
) -> tuple[list[BoardEnergy], dict[str, str]]:
    """Split boards into those that count here and those that count elsewhere, with where."""
    mine, shared = [], {}
    for board in boards:
        owner = owners.setdefault(board.key, name) if board.joules is not None else name
        if owner == name:
            mine.append(board)
        else:
            shared[board.key] = owner
    return mine, shared


def _board(board: BoardEnergy, counted_at: str | None) -> dict[str, Any]:
    return {
        "name": board.name,
        "method": board.method if board.joules is not None else NOT_MEASURED,
        "joules": board.joules,
        "readings": board.readings,
        "uncovered_s": board.uncovered_s,
        "too_short": board.too_short,
        "counted_at": counted_at,
        "problem": board.problem,
    }
