"""Tables of workers: one row each that tells all that matters at a glance, and what only a closer look asks for.

A column without a figure is left out, so a page of CPU workers has no empty columns about power.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from guava_nb.render.values import (
    DASH,
    or_dash,
    short_rate,
    show_bytes,
    show_bytes_pair,
    show_joules,
    show_percent,
    show_seconds,
    show_watts,
)
from guava_nb.render.view import Table
from guava_nb.status import WorkerStatus

__all__ = ["by_name", "device_words", "glance", "is_there", "traffic", "worker_notes", "workers_at_the_end"]

#: What makers write into the names of their devices and tells a reader nothing.
_MARKS = re.compile(r"\((R|TM|C)\)|\b(Processor|CPU|NVIDIA|GeForce|\d+-Core)\b|@ ?[\d.]+ ?GHz", re.IGNORECASE)
#: Workers that are not here any more.
_GONE = ("lost", "left")

Cell = Callable[[WorkerStatus], str]


def is_there(worker: WorkerStatus) -> bool:
    """Whether it is here, or may come back to its place."""
    return worker.state not in _GONE


def by_name(workers: Sequence[WorkerStatus]) -> list[WorkerStatus]:
    """One worker for each name, in the order of names, so that rows keep their places whoever joins first.

    One that was lost and came back is one, with what it did before and since.
    """
    named: dict[str, WorkerStatus] = {}
    for worker in workers:
        before = named.get(worker.name)
        if before is None:
            named[worker.name] = worker
            continue
        now = before if is_there(before) and not is_there(worker) else worker
        joules = [one.joules for one in (before, worker) if one.joules is not None]
        named[worker.name] = replace(
            now,
            samples=before.samples + worker.samples,
            out_bytes=before.out_bytes + worker.out_bytes,
            in_bytes=before.in_bytes + worker.in_bytes,
            joules=sum(joules) if joules else None,
        )
    return sorted(named.values(), key=_natural)


def _natural(worker: WorkerStatus) -> list[tuple[int, str]]:
    """The order of a name in which local-2 stands before local-10."""
    return [(int(part), "") if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", worker.name)]


def device_words(device: str, name: str) -> str:
    """Torch's name of a device and what is worth reading of its maker's: "cuda:0 Tesla T4"."""
    short = " ".join(_MARKS.sub(" ", name).split())
    return device if short in ("", device) else f"{device} {short}"


def glance(workers: Sequence[WorkerStatus]) -> Table:
    """One row per worker: state, speed, device, cost, link."""
    return _table(_GLANCE, workers)


def traffic(workers: Sequence[WorkerStatus]) -> Table:
    """What was done and sent, what is on its way, who waits for whom; of the workers that are here."""
    there = [worker for worker in workers if is_there(worker)]
    known = [w for w in there if w.samples or w.queued_batches or w.worker_waits is not None]
    return _table(_TRAFFIC, known)


def workers_at_the_end(workers: Sequence[WorkerStatus]) -> Table:
    """What each worker did in a run that is over."""
    return _table(_END, workers)


def worker_notes(workers: Sequence[WorkerStatus], told: Sequence[str]) -> tuple[str, ...]:
    """One sentence for each worker of which there is something to say that is not told already."""
    return tuple(
        f"{worker.name}: {worker.detail}"
        for worker in workers
        if worker.detail and not any(worker.detail in note for note in told)
    )


def _table(columns: Sequence[tuple[str, Cell]], workers: Sequence[WorkerStatus]) -> Table:
    """The columns in which a worker has something; rows of workers that are gone are faint."""
    cells = [(name, [cell(worker) for worker in workers]) for name, cell in columns]
    kept = [(name, column) for name, column in cells if any(cell not in ("", DASH) for cell in column)]
    faint = frozenset(row for row, worker in enumerate(workers) if not is_there(worker))
    rows = tuple(zip(*(column for _, column in kept), strict=True)) if workers else ()
    return Table(tuple(name for name, _ in kept), rows, faint=faint)


def _live(show: Cell) -> Cell:
    """Of what is measured now: a worker that is away or gone has nothing."""
    return lambda worker: show(worker) if is_there(worker) and worker.state != "suspect" else DASH


def _of_gpu(show: Cell) -> Cell:
    return lambda worker: show(worker) if worker.device != "cpu" else DASH


def _of_machine(show: Cell) -> Cell:
    """The figures are of the whole machine where a worker works on its processor."""
    return lambda worker: show(worker) if worker.device == "cpu" else DASH


def _busy(worker: WorkerStatus) -> str:
    return or_dash(worker.busy, show_percent)


def _state(worker: WorkerStatus) -> str:
    return "away" if worker.state == "suspect" else worker.state


def _memory(worker: WorkerStatus) -> str:
    if worker.memory_used_bytes is None or worker.memory_bytes is None:
        return DASH
    return show_bytes_pair(worker.memory_used_bytes, worker.memory_bytes)


def _in_flight(worker: WorkerStatus) -> str:
    return f"{worker.queued_batches} batches, {show_bytes(worker.queued_bytes)}" if worker.queued_batches else DASH


def _who_waits(worker: WorkerStatus) -> str:
    if worker.worker_waits is None or worker.data_waits is None:
        return DASH
    who = "GPU" if worker.device.startswith("cuda") else "worker"
    return f"{who} waits for data {show_percent(worker.worker_waits)}, data waits for {who} {show_percent(worker.data_waits)}"


def _device(worker: WorkerStatus) -> str:
    return device_words(worker.device, worker.device_name)


def _joules(worker: WorkerStatus) -> str:
    return or_dash(worker.joules, show_joules)


_WHO: tuple[tuple[str, Cell], ...] = (
    ("worker", lambda worker: worker.name),
    ("device", _device),
    ("state", _state),
    ("share", lambda worker: or_dash(worker.share, show_percent)),
)
_GLANCE: tuple[tuple[str, Cell], ...] = (
    *_WHO,
    ("step time", _live(lambda worker: or_dash(worker.step_s, show_seconds))),
    ("GPU busy", _live(_of_gpu(_busy))),
    ("GPU memory", _live(_of_gpu(_memory))),
    ("CPU busy", _live(_of_machine(_busy))),
    ("RAM in use", _live(_of_machine(_memory))),
    ("power", _live(lambda worker: or_dash(worker.power_w, show_watts))),
    ("energy", _joules),
    # Before it has worked, nothing was sent that says how fast the line is.
    ("link to", _live(lambda worker: or_dash(worker.rate_out_bytes_s, short_rate) if worker.samples else DASH)),
    ("link from", _live(lambda worker: or_dash(worker.rate_in_bytes_s, short_rate) if worker.samples else DASH)),
    ("round trip", _live(lambda worker: or_dash(worker.round_trip_s, show_seconds))),
    ("waits", _live(lambda worker: or_dash(worker.worker_waits, show_percent))),
)
_TRAFFIC: tuple[tuple[str, Cell], ...] = (
    ("work", lambda worker: worker.name),
    ("samples", lambda worker: str(worker.samples)),
    ("in flight", _in_flight),
    ("out", lambda worker: or_dash(worker.out_bytes, show_bytes)),
    ("in", lambda worker: or_dash(worker.in_bytes, show_bytes)),
    ("idle in a step", lambda worker: or_dash(worker.wait_s, show_seconds)),
    ("who waits", _who_waits),
)
_END: tuple[tuple[str, Cell], ...] = (
    *_WHO,
    ("samples", lambda worker: str(worker.samples)),
    ("energy", _joules),
    ("out", lambda worker: or_dash(worker.out_bytes, show_bytes)),
    ("in", lambda worker: or_dash(worker.in_bytes, show_bytes)),
)
