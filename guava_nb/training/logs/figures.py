"""From the records of a run to what a status shows of them: curves and the table of epochs. Pure."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from typing import Any

from guava_nb.status import EpochFigures, Points

__all__ = ["CURVE_POINTS", "curves", "epoch_figures", "epoch_joules", "points", "scores", "thin"]

#: Points of a curve in a status; enough for any screen.
CURVE_POINTS = 500
#: Epochs that a status has; those left out are the first.
_EPOCHS = 200

Record = dict[str, Any]


def thin(records: list[Record], most: int = CURVE_POINTS) -> list[Record]:
    """Return at most about `most` records, evenly spaced, the last one always among them."""
    if len(records) <= most:
        return list(records)
    stride = -(-len(records) // most)
    kept = records[::stride]
    return kept if kept[-1] is records[-1] else [*kept, records[-1]]


def points(records: Sequence[Record], name: str) -> Points:
    """Return (step, value) of the records that have this value."""
    return tuple((record["step"], float(record[name])) for record in records if record.get(name) is not None)


def curves(
    history: list[Record],
    validations: Sequence[Record],
    epochs: Sequence[Record],
    energy: Callable[[], Sequence[Record]],
) -> dict[str, Any]:
    """Return what a status has of them, by the names there.

    Args:
        history: a record per committed step.
        validations: a record per validation.
        epochs: a record per ended epoch.
        energy: gives a record per worker, with the joules of its epochs.
    """
    drawn = thin(history)
    rates = (record["learning_rate"] for record in reversed(history[-20:]))
    return {
        "loss": history[-1]["loss"] if history else None,
        "learning_rate": next((rate for rate in rates if rate is not None), None),
        "val": tuple((v["step"], v["loss"], v["accuracy"], v.get("perplexity")) for v in validations),
        "losses": points(drawn, "loss"),
        "learning_rates": points(drawn, "learning_rate"),
        "gradient_norms": points(drawn, "gradient_norm"),
        "scores": scores(validations),
        "epochs": epoch_figures(epochs, history, validations, energy),
    }


def scores(validations: Sequence[Record]) -> tuple[tuple[str, Points], ...]:
    """Return what validations measured beside the loss, as curves by name."""
    names = dict.fromkeys(name for record in validations for name, value in record.items() if _is_score(name, value))
    kept = thin(list(validations))
    return tuple((name, points(kept, name)) for name in names)


def _is_score(name: str, value: Any) -> bool:
    return name not in ("step", "loss", "samples") and _is_number(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def epoch_joules(energy: Sequence[Record], figure: int) -> float | None:
    """Return the joules of one epoch of all workers that measured; None while one of them has not told its own.

    Args:
        energy: records of workers, see `Run.energy`.
        figure: number of the epoch in them.
    """
    each = [worker.get("epochs", []) for worker in energy if worker["joules"] is not None]
    told = [epochs[figure] for epochs in each if len(epochs) > figure]
    known = [joules for joules in told if joules is not None]
    return sum(known) if known and len(known) == len(each) else None


def epoch_figures(
    epochs: Sequence[Record],
    history: Sequence[Record],
    validations: Sequence[Record],
    energy: Callable[[], Sequence[Record]],
) -> tuple[EpochFigures, ...]:
    """Return the table of the epochs that were ended.

    Args:
        epochs, history, validations, energy: as for `curves`.
    """
    first = max(0, len(epochs) - _EPOCHS)
    measured = energy() if epochs else ()
    made = []
    for number, record in enumerate(epochs[first:], first):
        before = epochs[number - 1] if number else {"step": -1, "seconds": 0.0}
        of_it = history[: bisect.bisect_right(history, record["step"], key=lambda one: one["step"])]
        told = validations[: bisect.bisect_right(validations, record["step"], key=lambda one: one["step"])]
        rates = (one["learning_rate"] for one in reversed(of_it[-20:]))
        last = told[-1] if told and told[-1]["step"] > before["step"] else {}
        made.append(
            EpochFigures(
                epoch=record["epoch"],
                loss=None if math.isnan(record["loss"]) else record["loss"],
                val=tuple((k, float(v)) for k, v in last.items() if k not in ("step", "samples") and _is_number(v)),
                learning_rate=next((rate for rate in rates if rate is not None), None),
                took_s=record["seconds"] - before["seconds"],
                joules=epoch_joules(measured, record["figure"]) if "figure" in record else None,
            )
        )
    return tuple(made)
