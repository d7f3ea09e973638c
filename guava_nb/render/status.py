"""Makes views of what the orchestrator and a worker say about themselves."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol

from guava_nb.engine.status import RunStatus, Status, WorkerStatus
from guava_nb.render.values import (
    NOT_MEASURED,
    short_bytes,
    show_bytes,
    show_float,
    show_joules,
    show_percent,
    show_rate,
    show_seconds,
    show_used,
    show_watts,
)
from guava_nb.render.view import Curve, Progress, Table, View

__all__ = ["WorkerSelf", "awaited_workers", "ready_workers", "run_view", "session_view", "summary_view", "worker_view"]

#: What makers write into the names of their devices and nobody reads.
_MARKS = re.compile(r"\((R|TM|C)\)|\b(Processor|CPU)\b(?= )", re.IGNORECASE)

#: Workers that are not here any more, and states of a run in which it works.
_GONE = ("lost", "left")
_AT_WORK = ("preparing", "training", "validating", "stopping")


class WorkerSelf(Protocol):
    """What a worker knows of itself; `step` is None or 0 before its first one."""

    @property
    def state(self) -> str: ...  # noqa: D102
    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def step(self) -> int | None: ...  # noqa: D102
    @property
    def device(self) -> str: ...  # noqa: D102
    @property
    def address(self) -> str: ...  # noqa: D102
    @property
    def detail(self) -> str: ...  # noqa: D102


def ready_workers(status: Status) -> int:
    """How many workers can take part now."""
    return sum(worker.state in ("ready", "working") for worker in status.workers)


def awaited_workers(workers: Sequence[WorkerStatus]) -> str:
    """Whose connections broke and how long they are waited for, when nobody else is here; "" when somebody is."""
    away = [worker for worker in workers if worker.state == "suspect"]
    if not away or any(worker.state in ("ready", "working") for worker in workers):
        return ""
    known = [worker.awaited_s for worker in away if worker.awaited_s is not None]
    names = ", ".join(worker.name for worker in away)
    return f"{names} to come back" + (f", up to {show_seconds(round(max(known)))} more" if known else "")


def session_view(status: Status) -> View:
    """A whole session: where it listens, who is there, what runs. Never the join code."""
    facts = [("mode", status.mode), ("workers", f"{ready_workers(status)} ready of {status.expected_workers} expected")]
    facts += [("tunnel", status.tunnel)] if status.tunnel else []
    facts += [("shared cells", ", ".join(status.cells))] if status.cells else []
    run = status.run
    if run is not None:
        facts += [
            ("run", f"{_state(run, status.workers)}, {_headline(run, status.workers)}"),
            ("wire", _wire(run)),
            *_budget(run),
            *_path(run),
            *_loaded(run),
        ]
    doing = (status.tunnel_note,) if status.tunnel_note else ()
    notes = (*doing, *status.notes, *((run.message,) if run is not None and run.message else ()))
    headline = f"{status.state} at {status.address}" if status.address else status.state
    there = _taking_part(status.workers, run is not None)
    tables = (Table((), tuple(facts)), _workers(there), _feeding(there), _devices(there))
    return View("session", headline, None, tables, notes)


def run_view(run: RunStatus, workers: Sequence[WorkerStatus] = (), notices: Sequence[str] = ()) -> View:
    """A run while it goes: a bar, the numbers beside it, the workers and what happened to them below it."""
    progress = Progress(run.step, run.total_steps)
    facts = (("wire", _wire(run)), *_budget(run), *_path(run), *_loaded(run), *_energy(run))
    there = _taking_part(workers)
    tables = (Table((), facts), _workers(there), _feeding(there), _devices(there))
    title, headline = _state(run, workers), _headline(run, workers)
    return View(title, headline, progress, tables, _notes(run, notices), _curve(run))


def summary_view(run: RunStatus, workers: Sequence[WorkerStatus] = (), notices: Sequence[str] = ()) -> View:
    """A run after its end: what was done, how fast from start to end, at which cost on the wire."""
    average = run.samples / run.elapsed_s if run.samples and run.elapsed_s else None
    facts: list[tuple[str, str]] = [
        ("steps", f"{_steps(run)}, {run.samples} samples"),
        ("time", f"{show_seconds(run.elapsed_s)}, {show_rate(average, 'samples')}"),
        ("loss", _loss_path(run)),
    ]
    facts += [("validation", _validation(run.val[-1]))] if run.val else []
    facts += [("wire", _wire(run)), *_budget(run), *_path(run), *_energy(run)]
    tables = (Table((), tuple(facts)), _workers(_taking_part(workers)))
    told = notices if run.state == "failed" else _notes(run, notices)  # the error itself comes after the summary
    return View(run.state, "", Progress(run.step, run.total_steps), tables, tuple(told), _curve(run))


def _curve(run: RunStatus) -> Curve | None:
    """Two points make a line; fewer say no more than the number beside them."""
    if len(run.losses) < 2:
        return None
    return Curve(run.losses, tuple((step, loss) for step, loss, _ in run.val))


def worker_view(worker: WorkerSelf) -> View:
    """A worker seen from its own notebook."""
    step = f"step {worker.step}" if worker.step else "no step yet"
    ended = worker.state in ("left", "failed", "crashed")
    headline = f"{worker.state}, {step}" if ended else f"{worker.state} on {worker.device} for {worker.address}, {step}"
    return View(f"worker {worker.name}".rstrip(), headline, notes=(worker.detail,) if worker.detail else ())


def _notes(run: RunStatus, notices: Sequence[str]) -> tuple[str, ...]:
    return (*notices, *((run.message,) if run.message else ()))


def _state(run: RunStatus, workers: Sequence[WorkerStatus]) -> str:
    """What a run does; it waits when nobody is here to do it."""
    return "waiting" if run.state in _AT_WORK and awaited_workers(workers) else run.state


def _headline(run: RunStatus, workers: Sequence[WorkerStatus] = ()) -> str:
    """The numbers of one line; those not known yet are left out, a bar has no room for excuses."""
    awaited = awaited_workers(workers) if run.state in _AT_WORK else ""
    total = "" if run.total_steps is None else f"/{run.total_steps}"
    resumed = f" since step {run.steps_before}" if run.steps_before else ""
    parts = [f"for {awaited}"] if awaited else []
    parts += [f"epoch {run.epoch}/{run.num_epochs}", f"step {run.step}{total}{resumed}"]
    parts += [f"loss {show_float(run.loss)}"] if run.loss is not None else []
    parts += [f"val {_validation(run.val[-1])}"] if run.val else []
    parts += [show_rate(run.samples_per_s, "samples")] if run.samples_per_s is not None and not awaited else []
    return ", ".join(parts)


def _steps(run: RunStatus) -> str:
    if not run.steps_before:
        return f"{run.step} in {run.epoch} of {run.num_epochs} epochs"
    return f"{run.step} after the {run.steps_before} of the checkpoint, now at epoch {run.epoch} of {run.num_epochs}"


def _validation(point: tuple[int, float, float | None]) -> str:
    _, loss, accuracy = point
    return f"loss {show_float(loss)}" + ("" if accuracy is None else f" accuracy {show_float(accuracy)}")


def _loss_path(run: RunStatus) -> str:
    if not run.losses:
        return show_float(run.loss)
    return f"{show_float(run.losses[0][1])} at the start, {show_float(run.losses[-1][1])} at the end"


def _wire(run: RunStatus) -> str:
    wire = run.wire
    parts = [f"{show_bytes(wire.out_bytes)} out", f"{show_bytes(wire.in_bytes)} in"]
    named = [
        ("samples", wire.sample_bytes),
        ("gradients", wire.gradient_bytes),
        ("activations", wire.activation_bytes),
        ("parameters", wire.parameter_bytes),
        ("control", wire.control_bytes),
    ]
    detail = ", ".join(f"{name} {show_bytes(count)}" for name, count in named if count)
    uncounted = " and ".join(name for name, count in named if count is None)
    direct = f"; {uncounted} are exchanged directly between the workers: not counted" if uncounted else ""
    return ", ".join(parts) + (f" ({detail})" if detail else "") + direct


def _budget(run: RunStatus) -> list[tuple[str, str]]:
    if not run.budget_bytes:
        return []
    return [("budget", show_used(run.wire.out_bytes + run.wire.in_bytes, run.budget_bytes))]


def _path(run: RunStatus) -> list[tuple[str, str]]:
    return [("path", run.path)] if run.path else []


def _loaded(run: RunStatus) -> list[tuple[str, str]]:
    if not run.loaded_batches:
        return []
    return [("loaded", f"{run.loaded_batches} batches, {show_bytes(run.loaded_bytes)}, ready to be sent")]


def _energy(run: RunStatus) -> list[tuple[str, str]]:
    """Nothing where nothing is measured: %guava_energy says why."""
    if run.joules is None:
        return []
    each = f", {show_joules(run.joules / run.samples)} per sample" if run.samples else ""
    return [("energy", f"{show_joules(run.joules)}{each}")]


def _devices(workers: Sequence[WorkerStatus]) -> Table:
    """How busy each device is and what it draws; only those that tell something."""
    columns = ("device", "busy", "memory", "power", "energy")
    return Table(
        columns,
        tuple(_device_row(worker) for worker in workers if worker.memory_bytes is not None and _is_there(worker)),
    )


def _device_row(worker: WorkerStatus) -> tuple[str, ...]:
    used = worker.memory_used_bytes
    return (
        worker.name,
        "-" if worker.busy is None else show_percent(worker.busy),
        "-" if used is None else f"{show_bytes(used)} of {show_bytes(worker.memory_bytes)}",
        "-" if worker.power_w is None else show_watts(worker.power_w),
        "-" if worker.joules is None else show_joules(worker.joules),
    )


def _feeding(workers: Sequence[WorkerStatus]) -> Table:
    """How data reaches each worker, and who waits for whom; only those of whom something is known."""
    there = [w for w in workers if _is_there(w)]
    known = [w for w in there if w.queued_batches or w.rate_out_bytes_s is not None or w.worker_waits is not None]
    columns = ("feeding", "in flight", "link to it", "link from it", "round trip", "who waits")
    return Table(columns, tuple(_feeding_row(worker) for worker in known))


def _feeding_row(worker: WorkerStatus) -> tuple[str, ...]:
    def rate(bytes_s: float | None) -> str:
        return "-" if bytes_s is None else f"{show_bytes(round(bytes_s))}/s"

    return (
        worker.name,
        f"{worker.queued_batches} batches, {show_bytes(worker.queued_bytes)}",
        rate(worker.rate_out_bytes_s),
        rate(worker.rate_in_bytes_s),
        "-" if worker.round_trip_s is None else show_seconds(worker.round_trip_s),
        _who_waits(worker),
    )


def _who_waits(worker: WorkerStatus) -> str:
    if worker.worker_waits is None or worker.data_waits is None:
        return NOT_MEASURED
    who = "GPU" if worker.device.startswith("cuda") else "worker"
    return f"{who} waits for data {show_percent(worker.worker_waits)}, data waits for {who} {show_percent(worker.data_waits)}"


def _taking_part(workers: Sequence[WorkerStatus], ran: bool = True) -> list[WorkerStatus]:
    """Without those that were gone before the run began; before any run, without those that left."""
    return [w for w in workers if _is_there(w) or (w.samples or w.out_bytes if ran else w.state == "lost")]


def _is_there(worker: WorkerStatus) -> bool:
    return worker.state not in _GONE


def _workers(workers: Sequence[WorkerStatus]) -> Table:
    columns = ("worker", "state", "device", "share", "compute", "wait", "samples", "out", "in", "note")
    return Table(columns, tuple(_worker_row(worker) for worker in workers))


def _worker_row(worker: WorkerStatus) -> tuple[str, ...]:
    name = " ".join(_MARKS.sub("", worker.device_name).split())
    device = worker.device if name in ("", worker.device) else f"{worker.device} {name}"
    return (
        worker.name,
        "away" if worker.state == "suspect" else worker.state,
        device,
        "-" if worker.share is None else show_percent(worker.share),
        "-" if worker.step_s is None else show_seconds(worker.step_s),
        "-" if worker.wait_s is None else show_seconds(worker.wait_s),
        str(worker.samples),
        short_bytes(worker.out_bytes),
        short_bytes(worker.in_bytes),
        worker.detail,
    )
