"""The energy of a run as a view. What was not measured is said with its reason, never shown as 0."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from guava_nb.render.epochs import without_empty
from guava_nb.render.values import (
    NOT_MEASURED,
    or_dash,
    show_bytes,
    show_float,
    show_joules,
    show_operations,
    show_percent,
    show_seconds,
    show_watts,
)
from guava_nb.render.view import Table, View

__all__ = ["energy_view"]

_PHASES = ("forward", "backward", "exchange", "update", "waiting", "other")


def energy_view(record: Mapping[str, Any]) -> View:
    """Return the view of an energy record, see `guava_nb.telemetry.energy_record`."""
    rows: Sequence[Mapping[str, Any]] = record["workers"]
    tasks: Sequence[Mapping[str, Any]] = record["tasks"]
    facts = Table((), tuple(_facts(record)))
    tables = (facts, _workers(rows), _phases(rows), _tasks(tasks), _speed(rows), _machines(rows))
    notes = [*_reasons(rows), *(note for row in rows for note in _doubts(row))]
    if tasks:
        notes.append("Tasks overlap phases, and each other where one is within another: another view of the same time.")
    if record["joules"] is not None:
        notes.append("Figures are of whole boards, as their sensors give them: other programs there are in them.")
    headline = show_joules(record["joules"]) if record["joules"] is not None else NOT_MEASURED
    return View("energy", f"of {record['run_id']}: {headline}", None, tables, tuple(notes))


def _facts(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    if record["joules"] is None:
        return []
    facts = [
        ("per sample", show_joules(record["j_per_sample"])),
        ("per step", show_joules(record["j_per_step"])),
        ("in watt hours", f"{show_float(record['watt_hours'], 3)} Wh"),
    ]
    if record["tokens"] is not None:
        each = NOT_MEASURED if record["j_per_token"] is None else show_joules(record["j_per_token"])
        facts.insert(1, ("per token", f"{each}, {record['tokens']:,.0f} tokens"))
    if len(record["epochs"]) > 1:
        facts.append(("per epoch", ", ".join(show_joules(joules) for joules in record["epochs"])))
    if record["co2e_g"] is not None:
        facts.append(("CO2 equivalent", f"{show_float(record['co2e_g'], 3)} g, by the factor given"))
    if record["cost"] is not None:
        facts.append(("cost", f"{show_float(record['cost'], 3)}, by the price given"))
    return facts


def _reasons(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Why nothing was measured, each reason once with those that it holds for."""
    workers: dict[str, list[str]] = {}
    for row in rows:
        if row["why"]:
            workers.setdefault(row["why"], []).append(row["worker"])
    for why, names in workers.items():
        names = list(dict.fromkeys(names))
        yield f"{f'all {len(names)} workers' if len(names) == len(rows) > 3 else ', '.join(names)}: {why}"


def _doubts(row: Mapping[str, Any]) -> Iterator[str]:
    """Sentences on what makes a worker's figure say less than it seems to."""
    if row["joules"] is None:
        if row["problem"]:
            yield f"{row['worker']}: {row['problem']}"
        return
    if row["too_short"]:
        yield f"{row['worker']}: the run was hardly longer than the pace of the sensor, so its energy says little."
    missing_s, seconds = row["uncovered_s"] or 0.0, row["seconds"] or 0.0
    if missing_s > max(1.0, 0.01 * seconds):  # a reading more or less is no gap
        why = f" ({row['problem']})" if row["problem"] else ""
        yield (
            f"{row['worker']}: no reading covers {show_seconds(missing_s)} of {show_seconds(seconds)}{why}; their energy is "
            "not in its figure."
        )


def _workers(rows: Sequence[Mapping[str, Any]]) -> Table:
    per_token = any(row["tokens"] is not None for row in rows)
    counted = ("per sample", "per token") if per_token else ("per sample",)
    columns = ("worker", "device", "energy", "on average", *counted, "method")
    return Table(columns, tuple(_worker(row, per_token) for row in rows))


def _worker(row: Mapping[str, Any], per_token: bool) -> tuple[str, ...]:
    counted = (row["j_per_sample"], row["j_per_token"]) if per_token else (row["j_per_sample"],)
    return (
        row["worker"],
        row["device"],
        or_dash(row["joules"], show_joules),
        or_dash(row["watts"], show_watts),
        *(or_dash(each, show_joules) for each in counted),
        row["method"],
    )


def _phases(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Time by phase, and energy where it was measured."""
    there = [phase for phase in _PHASES if any(f"{phase}_s" in row for row in rows)]
    made = []
    for row in rows:
        if any(f"{phase}_s" in row for phase in there):
            made.append((row["worker"], *(_phase(row, phase) for phase in there)))
    return Table(("time by phase", *there), tuple(made))


def _phase(row: Mapping[str, Any], phase: str) -> str:
    if f"{phase}_s" not in row:
        return "-"
    joules = row.get(f"{phase}_j")
    seconds = show_seconds(row[f"{phase}_s"]) if row[f"{phase}_s"] else ""
    parts = [seconds, show_joules(joules) if joules is not None else ""]
    return ", ".join(part for part in parts if part) or "-"


def _tasks(tasks: Sequence[Mapping[str, Any]]) -> Table:
    """What the user's own code named."""
    columns = ("task", "worker", "times", "time", "energy", "each time")
    made = [
        (
            row["task"],
            row["worker"],
            str(row["times"]),
            show_seconds(row["seconds"]),
            or_dash(row["joules"], show_joules),
            or_dash(None if row["joules"] is None or not row["times"] else row["joules"] / row["times"], show_joules),
        )
        for row in tasks
    ]
    return Table(columns, tuple(made))


def _machines(rows: Sequence[Mapping[str, Any]]) -> Table:
    """How busy the workers' GPUs and machines were on average, as their systems tell."""
    used = {"gpu_busy": "GPU busy", "gpu_memory_used_bytes": "GPU memory", "cpu_busy": "CPU busy",
            "host_memory_used_bytes": "RAM in use"}  # fmt: skip
    rates = {"disk_read_bytes_s": "disk read", "disk_write_bytes_s": "disk written",
             "network_out_bytes_s": "network out", "network_in_bytes_s": "network in"}  # fmt: skip
    names = {**used, **rates}
    made = [
        (row["worker"], *("-" if row.get(name) is None else _use(name, row[name]) for name in names))
        for row in rows
        if any(row.get(name) is not None for name in names)  # a record of an older version has fewer
    ]
    return without_empty(("machine of", *names.values()), made)


def _use(name: str, value: float) -> str:
    if name.endswith("_busy"):
        return show_percent(value)
    return show_bytes(round(value)) + ("/s" if name.endswith("_s") else "")


def _speed(rows: Sequence[Mapping[str, Any]]) -> Table:
    columns = ("computing", "operations a second", "of the device's peak", "operations per joule")
    made = [
        (
            row["worker"],
            show_operations(row["flops_per_s"], "s"),
            or_dash(row["share_of_peak"], show_percent),
            "-" if row["flops_per_joule"] is None else show_operations(row["flops_per_joule"], "J"),
        )
        for row in rows
        if row["flops_per_s"] is not None
    ]
    return Table(columns, tuple(made))
