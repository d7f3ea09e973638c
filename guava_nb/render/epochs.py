"""Tables over a run's epochs, and over the runs of a session."""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Iterable, Mapping, Sequence

from guava_nb.render.values import DASH, or_dash, show_float, show_joules, show_seconds
from guava_nb.render.view import Table, View
from guava_nb.status import EpochFigures, RunStatus

__all__ = ["epoch_table", "runs_csv", "runs_view", "without_empty"]

#: Settings that every table of runs would repeat.
_UNTOLD = ("run_id", "mode", "precision")
_KILLED = (
    "the kernel ended while it trained; its row has what was written down last, up to 10 s before that. Where it was the newest "
    "run and its workers are still here, the same %guava_train line with --resume session goes on with it"
)


def epoch_table(epochs: Sequence[EpochFigures]) -> Table:
    """One row per epoch that was ended: losses, metrics, learning rate, time, joules; columns without any figure are left out."""
    names = dict.fromkeys(name for epoch in epochs for name, _ in epoch.val)
    head = (
        "epoch",
        "loss",
        *(f"val {name}" if name == "loss" else name for name in names),
        "learning rate",
        "time",
        "energy",
    )
    rows = [
        (
            str(epoch.epoch),
            or_dash(epoch.loss, show_float),
            *(or_dash(dict(epoch.val).get(name), show_float) for name in names),
            or_dash(epoch.learning_rate, show_float),
            or_dash(epoch.took_s, show_seconds),
            or_dash(epoch.joules, show_joules),
        )
        for epoch in epochs
    ]
    return without_empty(head, rows)


def runs_view(runs: Sequence[RunStatus], note: str = "") -> View:
    """One row per run: how it ended, what came of it, and the settings in which runs differ.

    Args:
        note: on runs that are not shown.
    """
    names = _differing(runs)
    scores = dict.fromkeys(name for run in runs for name, points in run.scores if points)
    head = ("run", "state", "began", "epochs", "steps", "loss", "val loss", *scores, "time", "energy", *names)
    rows = [
        (
            run.run_id,
            run.state,
            DASH if run.began_at is None else time.strftime("%d %b %H:%M", time.localtime(run.began_at)),
            f"{run.epoch} of {run.num_epochs}",
            f"{run.step} or more" if run.state == "killed" else str(run.step),
            or_dash(run.loss, show_float),
            or_dash(run.val[-1][1] if run.val else None, show_float),
            *(or_dash(_last(run, name), show_float) for name in scores),
            show_seconds(run.elapsed_s),
            or_dash(run.joules, show_joules),
            *(dict(run.settings).get(name, DASH) for name in names),
        )
        for run in runs
    ]
    killed = [run.run_id for run in runs if run.state == "killed"]
    notes = [f"Killed ({', '.join(killed)}): {_KILLED}"] if killed else []
    notes += [note] if note else []
    return View("runs", f"{len(runs)} of this notebook", None, (without_empty(head, rows),), tuple(notes))


def _last(run: RunStatus, name: str) -> float | None:
    points = dict(run.scores).get(name)
    return points[-1][1] if points else None


def _differing(runs: Sequence[RunStatus]) -> list[str]:
    names = dict.fromkeys(name for run in runs for name, _ in run.settings if name not in _UNTOLD)
    return [name for name in names if len({dict(run.settings).get(name) for run in runs}) > 1]


def runs_csv(runs: Iterable[RunStatus]) -> str:
    """Every point of the curves of runs as CSV; those of devices have seconds since the run began instead of a step."""
    out = io.StringIO()
    rows = csv.writer(out, lineterminator="\n")
    rows.writerow(("run", "figure", "step", "value", "seconds", "workers"))
    for run in runs:
        curves: Mapping[str, Iterable[tuple[int, float]]] = {
            "loss": run.losses,
            "val loss": [(step, loss) for step, loss, *_ in run.val],
            **{f"val {name}": points for name, points in run.scores},
            "learning rate": run.learning_rates,
            "gradient norm": run.gradient_norms,
        }
        rows.writerows(
            (run.run_id, name, step, repr(value), "", "") for name, points in curves.items() for step, value in points
        )
        for one in run.devices:
            kind, memory = ("GPU", "GPU memory") if one.is_gpu else ("CPU", "RAM in use")
            for name, points in ((f"{kind} busy", one.busy), (f"{memory} bytes", one.memory_used_bytes)):
                rows.writerows((run.run_id, name, "", repr(value), at, one.workers) for at, value in points)
    return out.getvalue()


def without_empty(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """The columns in which some row has something."""
    if not rows:
        return Table((), ())
    kept = [k for k in range(len(head)) if any(row[k] != DASH for row in rows)]
    return Table(tuple(head[k] for k in kept), tuple(tuple(row[k] for k in kept) for row in rows))
