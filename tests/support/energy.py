"""A run's energy as a report has it: one worker measured, one that shares its board, one without a sensor."""

from __future__ import annotations

from typing import Any

from guava_nb.engine.energy_record import EnergyRecord, energy_record

CURVES = {"w0": [(1.0, 190.0), (2.0, 210.0), (3.0, 200.0)]}


def report() -> dict[str, Any]:
    phases = {"forward": {"seconds": 2.0, "joules": 400.0}, "waiting": {"seconds": 8.0, "joules": 1600.0}}
    return {
        "run_id": "run-1", "energy_j": 2000.0, "samples": 1000, "steps": 100, "wall_s": 10.0,
        "workers": [{"worker": "w0", "samples": 500}, {"worker": "w1", "samples": 500}],
        "energy": [
            {
                "worker": "w0", "device": "Tesla T4", "joules": 2000.0, "method": "NVML energy counter", "seconds": 10.0,
                "phases": phases, "epochs": [900.0, 1100.0], "flops_per_sample": 1e9, "why": "",
            },
            {
                "worker": "w1", "device": "Tesla T4", "joules": None, "method": "in the figure of w0: the same board",
                "seconds": 10.0, "phases": {}, "epochs": [None, None], "flops_per_sample": None, "why": "",
            },
            {"worker": "w2", "device": "A CPU", "joules": None, "method": "not measured", "why": "no sensor"},
        ],
    }  # fmt: skip


def record(**factors: float) -> EnergyRecord:
    return energy_record(report(), CURVES, "fp16", **factors)
