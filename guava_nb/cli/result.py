"""What the demo leaves behind: a table for a person and a JSON file for a program, from the same report."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from guava_nb.config.state_folder import write_private
from guava_nb.errors import ConfigError
from guava_nb.render.values import show_bytes, show_float, show_percent, show_seconds
from guava_nb.render.view import Table, View

__all__ = ["check_report_path", "result_view", "write_report"]

Report = Mapping[str, Any]

#: Kinds of traffic in the order they are shown.
WIRE_KINDS = ("sample", "gradient", "activation", "parameter", "control")


def result_view(report: Report) -> View:
    """Make the result table of a finished run from `Run.report()`."""
    facts = [
        ("mode", _mode(report)),
        ("steps", f"{report['steps']} in {_count(report['epochs'], 'epoch')}"),
        ("samples", _samples(report)),
        ("loss", _loss(report["train_loss"])),
        ("accuracy", _accuracy(report.get("val"))),
        ("time", _time(report)),
        *_wire(report["wire"]),
    ]
    facts += [("parity", _parity(report["parity"]))] if report.get("parity") else []
    return View("Result", tables=(Table((), tuple(facts)), _workers(report)))


def check_report_path(path: Path) -> None:
    """Refuse a path that cannot be written, before the training and not after it.

    Raises:
        ConfigError: no such folder, no permission, or a folder of that name.
    """
    if path.is_dir():
        raise ConfigError(f"--report {path} is a folder; give the name of a file")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--report {path}: there is no folder {path.absolute().parent}; make it first")
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise ConfigError(f"--report {path} cannot be written: no permission")


def write_report(path: Path, report: Report) -> None:
    """Write the report as one JSON object; a reader never sees half of it.

    Raises:
        ConfigError: the file cannot be written.
    """
    text = json.dumps(report, indent=2, allow_nan=False) + "\n"
    try:
        write_private(path.absolute(), text.encode())
    except OSError as error:
        raise ConfigError(f"--report {path} cannot be written: {error}") from error


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _mode(report: Report) -> str:
    zero = f", ZeRO {report['zero_stage']}" if report.get("zero_stage") else ""
    mesh = f" ({report['mesh']}{zero})" if report.get("mesh") else ""
    return f"{report['mode']}, {_count(len(report['workers']), 'worker')}{mesh}"


def _samples(report: Report) -> str:
    return f"{report['samples']}, {report['lost_samples']} lost, {report['duplicated_samples']} doubled"


def _loss(losses: list[float]) -> str:
    return f"{show_float(losses[0])} at the first step, {show_float(losses[-1])} at the last" if losses else "no steps"


def _accuracy(val: Report | None) -> str:
    if val is None or val.get("accuracy") is None:
        return "not measured"
    return f"{val['accuracy']:.4f} on {val['samples']} images held out of training (loss {show_float(val['loss'])})"


def _time(report: Report) -> str:
    step_s = report["step_s"]
    return f"{show_seconds(report['wall_s'])}, step {show_seconds(step_s['p50'])} (95 %: {show_seconds(step_s['p95'])})"


def _wire(wire: Report) -> list[tuple[str, str]]:
    kinds = [f"{kind} {show_bytes(count)}" for kind in WIRE_KINDS if (count := wire.get(f"{kind}_bytes"))]
    uncounted = [f"{kind}s" for kind in WIRE_KINDS if wire.get(f"{kind}_bytes", 0) is None]
    kinds += [f"{' and '.join(uncounted)} directly between the workers: not counted"] if uncounted else []
    totals = f"{show_bytes(wire['out_bytes'])} out, {show_bytes(wire['in_bytes'])} in"
    return [("wire", totals), *([("wire by kind", ", ".join(kinds))] if kinds else [])]


def _parity(parity: Report) -> str:
    differences = f"weights {parity['max_abs_diff']:.2g}, losses {parity['max_loss_diff']:.2g}"
    judged = "weights" if parity["precision"] == "fp64" else "losses"
    verdict = "equal" if parity["ok"] else "NOT equal"
    return (
        f"{verdict} to plain PyTorch in {parity['precision']}: {differences} (limit for {judged} {parity['limit']:.0e})"
    )


def _workers(report: Report) -> Table:
    samples = report["samples"] or 1
    rows = [
        (str(w["worker"]), str(w["device"]), str(w["samples"]), show_percent(w["samples"] / samples), str(w["state"]))
        for w in report["workers"]
    ]
    return Table(("worker", "device", "samples", "share", "state"), tuple(rows))
