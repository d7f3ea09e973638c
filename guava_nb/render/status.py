"""Makes views of what the orchestrator and a worker say about themselves."""

from __future__ import annotations

import time
from collections.abc import Sequence

from guava_nb.render.epochs import epoch_table
from guava_nb.render.values import show_bytes, show_float, show_joules, show_rate, show_seconds, show_used
from guava_nb.render.view import Curve, Progress, Table, View
from guava_nb.render.workers import by_name, glance, is_there, traffic, worker_notes, workers_at_the_end
from guava_nb.status import RunStatus, Status, Validated, WorkerStatus

__all__ = [
    "awaited_workers",
    "program_view",
    "ready_workers",
    "run_view",
    "session_view",
    "summary_view",
    "waiting_view",
]

#: Newest epochs that a table has while a run goes on, and at its end.
_EPOCHS, _EPOCHS_AT_THE_END = 5, 30
#: States of a run in which it works.
_AT_WORK = ("preparing", "training", "validating", "stopping")


def ready_workers(status: Status) -> int:
    """How many workers can take part now."""
    return sum(worker.state in ("ready", "working") for worker in status.workers)


def awaited_workers(workers: Sequence[WorkerStatus]) -> str:
    """Whose connections broke and how long they are waited for, when no other worker is here; "" when one is."""
    away = [worker for worker in workers if worker.state == "suspect"]
    if not away or any(worker.state in ("ready", "working") for worker in workers):
        return ""
    known = [worker.awaited_s for worker in away if worker.awaited_s is not None]
    names = ", ".join(worker.name for worker in away)
    return f"{names} to come back" + (f", up to {show_seconds(round(max(known)))} more" if known else "")


def session_view(status: Status) -> View:
    """A whole session: where it listens, who is there, what runs. Never the join code."""
    facts = [("mode", _mode(status)), ("workers", _ready_of_expected(status))]
    facts += [("tunnel", status.tunnel)] if status.tunnel else []
    facts += [("shared cells", ", ".join(status.cells))] if status.cells else []
    facts += [("diary", status.diary)] if status.diary else []
    run = status.run
    if run is not None:
        facts += [
            ("run", f"{_state(run, status.workers)}, {_headline(run, status.workers)}"),
            ("wire", _wire(run)),
            *_budget(run),
            *_path(run),
            *_batch(run),
            *_loaded(run),
            *_at_risk(run),
            *_energy(run),
        ]
    doing = tuple(filter(None, (status.tunnel_note, status.state_note)))
    notes = (*doing, *status.notes, *((run.message,) if run is not None and run.message else ()))
    headline = f"{status.state} at {status.address}" if status.address else status.state
    there = _taking_part(status.workers, run is not None)
    epochs = () if run is None else run.epochs[-_EPOCHS:]
    tables = (Table((), tuple(facts)), epoch_table(epochs), glance(there), traffic(there))
    return View("session", headline, None, tables, (*worker_notes(there, notes), *notes))


def _mode(status: Status) -> str:
    """The mode that is chosen; where a run in another one goes on, both."""
    run = status.run
    if run is None or run.state not in (*_AT_WORK, "waiting") or run.mode == status.mode:
        return status.mode
    return f"{run.mode}; {status.mode} from the next run on"


def _ready_of_expected(status: Status) -> str:
    ready, expected = ready_workers(status), status.expected_workers
    return f"{ready} ready{',' if ready > expected else ' of'} {expected} expected"


def run_view(run: RunStatus, workers: Sequence[WorkerStatus] = (), notices: Sequence[str] = ()) -> View:
    """A run while it goes: a bar, the numbers beside it, the workers and what happened to them below it.

    Args:
        run: its state.
        workers: of the session.
        notices: sentences of the session, oldest first.
    """
    progress = Progress(run.step, run.total_steps)
    facts = (
        ("wire", _wire(run)),
        *_budget(run),
        *_path(run),
        *_batch(run),
        *_loaded(run),
        *_at_risk(run),
        *_energy(run),
    )
    there = _taking_part(workers)
    title, headline, notes = _state(run, workers), _headline(run, workers), _notes(run, notices)
    tables = (Table((), facts), epoch_table(run.epochs[-_EPOCHS:]), glance(there))
    return View(title, headline, progress, tables, (*worker_notes(there, notes), *notes), _curve(run))


def summary_view(run: RunStatus, workers: Sequence[WorkerStatus] = (), notices: Sequence[str] = ()) -> View:
    """A run after its end: what was done, how fast from start to end, at which cost on the wire.

    Args:
        run: its state.
        workers: of the session.
        notices: sentences of the session, oldest first.
    """
    facts: list[tuple[str, str]] = [
        ("steps", f"{_steps(run)}, {run.samples} samples"),
        ("time", f"{show_seconds(run.elapsed_s)}{_from_to(run)}, {show_rate(_average_rate(run), 'samples')}"),
        ("loss", _loss_path(run)),
    ]
    facts += [("validation", _validation(run.val[-1]))] if run.val else []
    facts += [("wire", _wire(run)), *_budget(run), *_path(run), *_batch(run), *_at_risk(run), *_energy(run)]
    there = _taking_part(workers)
    tables = (Table((), tuple(facts)), epoch_table(run.epochs[-_EPOCHS_AT_THE_END:]), workers_at_the_end(there))
    told = notices if run.state == "failed" else _notes(run, notices)  # the error itself comes after the summary
    notes = (*worker_notes(there, told), *told)
    return View(run.state, "", Progress(run.step, run.total_steps), tables, notes, _curve(run))


def waiting_view(workers: Sequence[WorkerStatus], expected: int, left_s: float | None = None, advice: str = "") -> View:
    """A session while it waits for workers: who is here, how many are missing.

    Args:
        workers: of the session.
        expected: workers that are waited for.
        left_s: seconds until the waiting ends; None leaves that out.
        advice: what to do meanwhile; not shown when all are here.
    """
    there = _taking_part(workers, ran=False)
    here = sum(worker.state in ("ready", "working") for worker in there)
    more = "" if left_s is None or here >= expected else f", up to {show_seconds(max(0, round(left_s)))} more"
    notes = (*worker_notes(there, ()), advice) if advice and here < expected else worker_notes(there, ())
    return View("waiting", f"{here} of {expected} workers are here{more}", None, (glance(there),), notes)


def program_view(state: str, name: str, elapsed_s: float, workers: Sequence[WorkerStatus]) -> View:
    """A program on the workers: how long it has run, and what each worker does meanwhile.

    Args:
        elapsed_s: seconds since it began.
        workers: that run it.
        state: "running", or how it ended.
        name: of the program.
    """
    there = _taking_part(workers, ran=False)
    took = "less than 1 s" if elapsed_s < 1 else show_seconds(int(elapsed_s))
    return View(state, f"{name}, {took}", None, (glance(there),), worker_notes(there, ()))


def _from_to(run: RunStatus) -> str:
    if run.began_at is None or run.ended_at is None:
        return ""
    began, ended = (time.strftime("%H:%M:%S", time.localtime(at)) for at in (run.began_at, run.ended_at))
    return f" from {began} to {ended}"


def _curve(run: RunStatus) -> Curve | None:
    """Two points make a line; fewer say no more than the number beside them."""
    if len(run.losses) < 2:
        return None
    last = None if run.total_steps is None else run.steps_before + run.total_steps
    val = tuple((step, loss) for step, loss, *_ in run.val)
    return Curve(run.losses, val, run.scores, run.learning_rates, run.gradient_norms, last, run.devices)


def _notes(run: RunStatus, notices: Sequence[str]) -> tuple[str, ...]:
    return (*notices, *((run.message,) if run.message else ()))


def _state(run: RunStatus, workers: Sequence[WorkerStatus]) -> str:
    """What a run does; it waits when no worker is here."""
    return "waiting" if run.state in _AT_WORK and awaited_workers(workers) else run.state


def _headline(run: RunStatus, workers: Sequence[WorkerStatus] = ()) -> str:
    """The numbers of one line; those not known yet are left out, a bar has no room for excuses."""
    awaited = awaited_workers(workers) if run.state in _AT_WORK else ""
    total = "" if run.total_steps is None else f"/{run.total_steps}"
    resumed = f" since step {run.steps_before}" if run.steps_before else ""
    parts = [f"for {awaited}"] if awaited else []
    parts += [f"for workers, up to {show_seconds(round(run.waits_s))} more"] if run.waits_s is not None else []
    parts += [f"epoch {run.epoch}/{run.num_epochs}", f"step {run.step}{total}{resumed}"]
    parts += [f"round {run.rounds}"] if run.rounds else []
    parts += [f"loss {show_float(run.loss)}"] if run.loss is not None else []
    parts += [f"val {_validation(run.val[-1])}"] if run.val else []
    waits = bool(awaited) or run.waits_s is not None
    rate = (
        run.samples_per_s if run.state in _AT_WORK else _average_rate(run)
    )  # its end is no speed, and the summary's is
    parts += [show_rate(rate, "samples")] if rate is not None and not waits else []
    left_s = None if waits else _left_s(run)
    parts += [f"{show_seconds(max(1, round(left_s)))} left"] if left_s is not None else []
    return ", ".join(parts)


def _average_rate(run: RunStatus) -> float | None:
    """Samples a second from start to end; None where there were none."""
    return run.samples / run.elapsed_s if run.samples and run.elapsed_s else None


def _left_s(run: RunStatus) -> float | None:
    """Seconds until the end at the present speed; None while that is not known."""
    if run.state not in _AT_WORK or not (run.total_steps and run.step and run.samples and run.samples_per_s):
        return None
    return max(0, run.total_steps - run.step) * (run.samples / run.step) / run.samples_per_s


def _steps(run: RunStatus) -> str:
    if not run.steps_before:
        return f"{run.step} in {run.epoch} of {run.num_epochs} epochs"
    return f"{run.step} after {run.steps_before} done before, now at epoch {run.epoch} of {run.num_epochs}"


def _validation(point: Validated) -> str:
    _, *figures = point
    named = zip(("loss", "accuracy", "perplexity"), figures, strict=False)
    return " ".join(f"{name} {show_float(value)}" for name, value in named if value is not None)


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


def _batch(run: RunStatus) -> list[tuple[str, str]]:
    return [("batch", run.batch)] if run.batch else []


def _loaded(run: RunStatus) -> list[tuple[str, str]]:
    if not run.loaded_batches:
        return []
    return [("loaded", f"{run.loaded_batches} batches, {show_bytes(run.loaded_bytes)}, ready to be sent")]


def _at_risk(run: RunStatus) -> list[tuple[str, str]]:
    """What would be done again if the workers' processes were killed now, or their disks lost; and what it goes on from."""
    rows = [("weights", run.approximate)] if run.approximate else []
    if run.state not in _AT_WORK:
        return rows
    if run.at_risk_s is None or run.at_risk_killed_s is None:
        return [*rows, ("at risk", "nothing: several workers, or the orchestrator, hold the newest state")]
    killed, vanished = (
        _work_lost(seconds, steps)
        for seconds, steps in ((run.at_risk_killed_s, run.at_risk_killed_steps), (run.at_risk_s, run.at_risk_steps))
    )
    text = f"{killed} if the process that has the state were killed now, {vanished} if its disk were lost, too"
    return [*rows, ("at risk", text)]


def _work_lost(seconds: float, steps: int | None) -> str:
    if not steps:
        return "nothing"
    took = "less than 1 s" if seconds < 1 else show_seconds(round(seconds))
    return f"{took} of work ({steps} step{'' if steps == 1 else 's'})"


def _energy(run: RunStatus) -> list[tuple[str, str]]:
    """Nothing where nothing is measured: %guava_energy says why."""
    if run.joules is None:
        return []
    parts = [show_joules(run.joules)]
    parts += [f"{show_joules(run.joules / run.samples)} per sample"] if run.samples else []
    if run.total_steps and run.step and not run.steps_before and run.num_epochs > 1:
        parts.append(f"{show_joules(run.joules / run.step * run.total_steps / run.num_epochs)} per epoch")
    return [("energy", ", ".join(parts))]


def _taking_part(workers: Sequence[WorkerStatus], ran: bool = True) -> list[WorkerStatus]:
    """Without those that were gone before the run began; before any run, without those that left."""
    return by_name([w for w in workers if is_there(w) or (w.samples or w.out_bytes if ran else w.state == "lost")])
