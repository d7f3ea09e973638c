"""A run's energy as a report has it: one worker measured, one that shares its board, one without a sensor."""

from __future__ import annotations

from typing import Any

from guava_nb.telemetry.energy_record import EnergyRecord, energy_record

CURVES = {"w0": [(1.0, 190.0), (2.0, 210.0), (3.0, 200.0)]}


def report() -> dict[str, Any]:
    phases = {"forward": {"seconds": 2.0, "joules": 400.0}, "waiting": {"seconds": 8.0, "joules": 1600.0}}
    return {
        "run_id": "run-1", "energy_j": 2000.0, "samples": 1000, "steps": 100, "wall_s": 10.0,
        "tokens": 20_000.0,
        "energy": [
            {
                "worker": "w0", "device": "Tesla T4", "joules": 2000.0, "method": "NVML energy counter", "seconds": 10.0,
                "phases": phases, "epochs": [900.0, 1100.0], "flops_per_sample": 1e9, "why": "", "samples": 500,
                "tokens": 10_000.0, "machine": {"cpu_busy": 0.5, "disk_read_bytes_s": 3e6},
                "tasks": {"attention": {"seconds": 1.5, "joules": 300.0, "times": 100}},
                "boards": [{"joules": 2000.0, "uncovered_s": 4.0, "too_short": False, "problem": "GPU is lost"}],
            },
            {
                "worker": "w1", "device": "Tesla T4", "joules": None, "method": "in the figure of w0: the same board",
                "seconds": 10.0, "phases": {}, "epochs": [None, None], "flops_per_sample": None, "why": "", "samples": 500,
                "tokens": 10_000.0,
            },
            {
                "worker": "w2", "device": "A CPU", "joules": None, "method": "not measured", "why": "no sensor",
                "samples": 0, "tokens": None,
            },
        ],
    }  # fmt: skip


def record(**factors: float) -> EnergyRecord:
    return energy_record(report(), CURVES, "fp16", **factors)
