"""The energy of a run as a record for people, JSON and tables: what each worker used, and what it bought."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from guava_nb.config.units import show_float
from guava_nb.errors import ConfigError
from guava_nb.telemetry.machine import RATES
from guava_nb.telemetry.window import J_PER_WH, per, times

__all__ = ["EnergyRecord", "energy_record", "peak_flops"]

# What well-known devices can do at most: dense matrix products, from their makers' data sheets, in operations a second.
#
# For the share of a device's peak that training reaches. A device that is not listed has no share; nothing is guessed.

#: name: (fp32, fp16 and bf16). fp32 is without TF32, which torch leaves off for matrix products. Order matters: longest first.
_PEAKS: tuple[tuple[str, float | None, float | None], ...] = (
    (r"\bH200\b|\bH100 80GB HBM3\b|\bH100 SXM", 66.9e12, 989.5e12),
    (r"\bH100 PCIe\b", 51.2e12, 756e12),
    (r"\bH100 NVL\b", 60e12, 835e12),
    (r"\bA100\b", 19.5e12, 312e12),
    (r"\bL40S\b", 91.6e12, 362e12),
    (r"\bL4\b", 30.3e12, 121e12),
    (r"\bA10\b", 31.2e12, 125e12),
    (r"\bV100\b", 15.7e12, 125e12),
    (r"\bT4\b", 8.1e12, 65e12),
    (r"\bP100\b", 9.3e12, 18.7e12),
    (r"\bRTX 4090\b", 82.6e12, 165.2e12),
    (r"\bRTX 3090\b", 35.6e12, 71e12),
)


def peak_flops(device_name: str, precision: str) -> float | None:
    """Return a device's peak for "fp32", "fp16" or "bf16"; None where it is not known, or for other precisions."""
    if precision not in ("fp32", "fp16", "bf16"):
        return None
    for pattern, single, half in _PEAKS:
        if re.search(pattern, device_name):
            return single if precision == "fp32" else half
    return None


#: What is told of a worker's machine.
_MACHINE = ("gpu_busy", "gpu_memory_used_bytes", "cpu_busy", "host_memory_used_bytes", *RATES)


class EnergyRecord(Mapping[str, Any]):
    """A read-only mapping; its lists of rows make tables: `pandas.DataFrame(record["workers"])`, or `["tasks"]`.

    Keys: `run_id, joules, seconds, samples, steps, tokens, j_per_sample, j_per_step, j_per_token, watt_hours, co2e_g, cost,
    epochs, workers, tasks`. What was not measured is None, and so are tokens that were not asked for. `workers` has one row
    per worker, phases in columns of their own (what its machine was busy with is the mean over the run); `tasks` one per
    worker and name that its code gave with `energy_task`. Tasks overlap phases and each other: another view of the same time.
    """

    def __init__(self, values: dict[str, Any], curves: dict[str, list[tuple[float, float]]]) -> None:
        """Keep finished figures.

        Args:
            values: by key.
            curves: (seconds since its run was prepared, watts) per worker, thinned.
        """
        self._values = values
        self.curves = curves

    @property
    def rows(self) -> list[dict[str, Any]]:
        """One flat dict per worker, as `record["workers"]`."""
        return [dict(row) for row in self._values["workers"]]

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        """One line."""
        joules = self["joules"]
        total = "not measured" if joules is None else f"{show_float(joules)} J"
        count = len(self["workers"])
        workers = f"{count} worker{'' if count == 1 else 's'}"
        return f"EnergyRecord({self['run_id']}: {total}, {workers}, {self['samples']} samples)"


def energy_record(
    report: Mapping[str, Any],
    curves: dict[str, list[tuple[float, float]]],
    precision: str,
    grams_per_kwh: float | None = None,
    price_per_kwh: float | None = None,
) -> EnergyRecord:
    """Make the record of a run.

    Args:
        report: what `Run.report` gives.
        curves: watts over time per worker.
        precision: of the run, for the peak of its devices.
        grams_per_kwh: CO2 equivalent of a kilowatt hour where the machines stand; nothing is assumed without it.
        price_per_kwh: in any currency.

    Raises:
        ConfigError: a factor is negative.
    """
    for name, factor in (("grams_per_kwh", grams_per_kwh), ("price_per_kwh", price_per_kwh)):
        if factor is not None and not factor >= 0:
            raise ConfigError(f"{name} {factor!r}: a factor of at least 0")
    joules, samples, steps = report["energy_j"], report["samples"], report["steps"]
    tokens, watt_hours = report["tokens"], per(joules, J_PER_WH)
    values = {
        "run_id": report["run_id"],
        "joules": joules,
        "seconds": report["wall_s"],
        "samples": samples,
        "steps": steps,
        "tokens": tokens,
        "j_per_sample": per(joules, samples),
        "j_per_step": per(joules, steps),
        "j_per_token": per(joules, tokens),
        "watt_hours": watt_hours,
        "co2e_g": times(watt_hours, grams_per_kwh),
        "cost": times(watt_hours, price_per_kwh),
        "epochs": _epochs([one.get("epochs", []) for one in report["energy"]]),
        "workers": [_row(one, precision) for one in report["energy"]],
        "tasks": [row for one in report["energy"] for row in _tasks(one)],
    }
    return EnergyRecord(values, curves)


def _row(one: Mapping[str, Any], precision: str) -> dict[str, Any]:
    joules, seconds, flops = one["joules"], one.get("seconds"), one.get("flops_per_sample")
    samples, tokens, machine = one["samples"], one["tokens"], one.get("machine", {})
    phases = one.get("phases", {})
    computing = sum(phases.get(phase, {}).get("seconds", 0.0) for phase in ("forward", "backward"))
    flops_s = None if not flops or not computing else flops * samples / computing
    peak = peak_flops(one["device"], precision)
    return {
        "worker": one["worker"],
        "device": one["device"],
        "method": one["method"],
        "joules": joules,
        "watts": per(joules, seconds),
        "seconds": seconds,
        "samples": samples,
        "tokens": tokens,
        "j_per_sample": per(joules, samples),
        "j_per_token": per(joules, tokens),
        **_reach(one),
        **{f"{phase}_s": part["seconds"] for phase, part in phases.items()},
        **{f"{phase}_j": part["joules"] for phase, part in phases.items()},
        "flops_per_s": flops_s,
        "share_of_peak": None if flops_s is None or peak is None else flops_s / peak,
        "flops_per_joule": None if not flops or not joules else flops * samples / joules,
        **{name: machine.get(name) for name in _MACHINE},
        "why": one.get("why", ""),
    }


def _tasks(one: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"worker": one["worker"], "task": name, **figures} for name, figures in one.get("tasks", {}).items()]


def _reach(one: Mapping[str, Any]) -> dict[str, Any]:
    """How far the figure goes: seconds of it that no reading covers, a stretch too short to say much, the last fault."""
    measured = [board for board in one.get("boards", ()) if board["joules"] is not None]
    return {
        "uncovered_s": max((board["uncovered_s"] for board in measured), default=None),
        "too_short": any(board["too_short"] for board in measured) if measured else None,
        "problem": next((board["problem"] for board in one.get("boards", ()) if board["problem"]), ""),
    }


def _epochs(of_workers: Sequence[Sequence[float | None]]) -> list[float | None]:
    """Joules of each epoch over all workers that were measured in it; None where no worker was."""
    longest = max((len(epochs) for epochs in of_workers), default=0)
    found: list[float | None] = []
    for k in range(longest):
        known = [epochs[k] for epochs in of_workers if k < len(epochs) and epochs[k] is not None]
        found.append(sum(joules for joules in known if joules is not None) if known else None)
    return found
