"""The energy of a run as a view. What was not measured is said with its reason, never shown as 0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from guava_nb.render.values import NOT_MEASURED, show_float, show_joules, show_percent, show_seconds, show_watts
from guava_nb.render.view import Table, View

__all__ = ["energy_view"]

_PHASES = ("forward", "backward", "exchange", "update", "waiting", "other")


def energy_view(record: Mapping[str, Any]) -> View:
    """Return the view of an energy record, see `guava_nb.engine.energy_record`."""
    rows: Sequence[Mapping[str, Any]] = record["workers"]
    tables = (Table((), tuple(_facts(record))), _workers(rows), _phases(rows), _speed(rows))
    reasons = dict.fromkeys(f"{row['worker']}: {row['why']}" for row in rows if row["why"])
    notes = list(reasons)
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
        ("in watt hours", f"{record['watt_hours']:.3g} Wh"),
    ]
    if len(record["epochs"]) > 1:
        facts.append(("per epoch", ", ".join(show_joules(joules) for joules in record["epochs"])))
    if record["co2e_g"] is not None:
        facts.append(("CO2 equivalent", f"{record['co2e_g']:.3g} g, by the factor given"))
    if record["cost"] is not None:
        facts.append(("cost", f"{record['cost']:.3g}, by the price given"))
    return facts


def _workers(rows: Sequence[Mapping[str, Any]]) -> Table:
    columns = ("worker", "device", "energy", "on average", "per sample", "method")
    return Table(columns, tuple(_worker(row) for row in rows))


def _worker(row: Mapping[str, Any]) -> tuple[str, ...]:
    known = row["joules"] is not None
    return (
        row["worker"],
        row["device"],
        show_joules(row["joules"]) if known else "-",
        show_watts(row["watts"]) if known else "-",
        show_joules(row["j_per_sample"]) if known and row["j_per_sample"] is not None else "-",
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


def _speed(rows: Sequence[Mapping[str, Any]]) -> Table:
    columns = ("computing", "operations a second", "of the device's peak", "operations per joule")
    made = [
        (
            row["worker"],
            f"{show_float(row['flops_per_s'], 3)} FLOP/s",
            "-" if row["share_of_peak"] is None else show_percent(row["share_of_peak"]),
            "-" if row["flops_per_joule"] is None else f"{show_float(row['flops_per_joule'], 3)} FLOP/J",
        )
        for row in rows
        if row["flops_per_s"] is not None
    ]
    return Table(columns, tuple(made))
