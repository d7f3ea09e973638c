"""A run's committed steps, validations and epochs as rows of numbers, as a reader on another thread gets them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from guava_nb.training.logs.figures import epoch_joules
from guava_nb.training.run import Run

__all__ = ["KINDS", "Row", "RunReader"]

#: What rows there are, and the numbers that each of a kind has; None: those that the first of them has.
KINDS: Mapping[str, tuple[str, ...] | None] = {
    "steps": ("step", "epoch", "loss", "learning_rate", "samples", "samples_per_s", "seconds", "joules"),
    "validations": None,
    "epochs": ("step", "epoch", "loss", "learning_rate", "samples", "samples_per_s", "seconds", "joules"),
}
#: For so long a row waits for a learning rate, or for joules, that a worker tells a moment after the commit.
_LATE_S = 5.0


class Row(NamedTuple):
    """One step, validation or epoch.

    Attributes:
        kind: one of `KINDS`.
        step: optimizer steps so far.
        values: numbers by name; of a step `joules` are those of the run so far, of an epoch its own. None: not known.
    """

    kind: str
    step: int
    values: dict[str, float | None]


class RunReader:
    """Reads what a run commits, from a thread of its own.

    Args:
        run: whose history is read.
        steps_before, epochs_before: of the runs that this one goes on from and counts none of.
    """

    def __init__(self, run: Run, steps_before: int = 0, epochs_before: int = 0) -> None:
        """Nothing was read yet."""
        self._run, self._steps_before, self._epochs_before = run, steps_before, epochs_before
        self._seen: tuple[list[dict[str, Any]], ...] = ([], [], [])
        self._began = time.monotonic()

    @property
    def counts(self) -> tuple[int, int]:
        """Steps and epochs that were read, with those of the runs before."""
        steps, _, epochs = self._seen
        return (
            self._steps_before + (int(steps[-1]["step"]) if steps else 0),
            self._epochs_before + (int(epochs[-1]["epoch"]) if epochs else 0),
        )

    def read(self, is_over: bool) -> tuple[int | None, list[Row]]:
        """Return what is new.

        Args:
            is_over: the run has ended: nothing is waited for.

        Returns:
            The step up to which rows hold, where the run went back over some that were returned, else None; and new rows.
        """
        new, went_back = self._run.follow(self._seen)
        back = min((int(record["step"]) for record in went_back), default=0) - 1
        if went_back:
            self._forget_after(back)
            new, _ = self._run.follow(self._seen)
        rows: list[Row] = []
        for seen, make, records in zip(self._seen, (self._step, self._validation, self._epoch), new, strict=True):
            for record in records:
                if not is_over and self._is_late(record):
                    break
                rows.append(make(record))
                seen.append(record)
        self._add_joules(rows)
        rows.sort(key=lambda row: row.step)
        return (back + self._steps_before if went_back else None), rows

    def _forget_after(self, step: int) -> None:
        for seen in self._seen:
            while seen and int(seen[-1]["step"]) > step:
                seen.pop()

    def forget(self, rows: list[Row]) -> int:
        """Return these rows once more, because they were not kept; returns the step up to which all were kept."""
        kept = min(row.step for row in rows) - 1
        self._forget_after(kept - self._steps_before)
        return kept

    def _is_late(self, record: dict[str, Any]) -> bool:
        """Whether a number of it may still come."""
        if self._run.elapsed_s() - record.get("seconds", 0.0) > _LATE_S:
            return False
        if "figure" in record:
            return self._run.joules is not None and self._epoch_joules(record) is None
        return "learning_rate" in record and record["learning_rate"] is None

    def _step(self, record: dict[str, Any]) -> Row:
        steps = self._seen[0]
        began = steps[-1]["seconds"] if steps else 0.0
        return self._row("steps", record, began, record["learning_rate"])

    def _epoch(self, record: dict[str, Any]) -> Row:
        epochs = self._seen[2]
        in_it = (one["learning_rate"] for one in reversed(self._seen[0]) if one["step"] <= record["step"])
        row = self._row("epochs", record, epochs[-1]["seconds"] if epochs else 0.0, next(in_it, None))
        row.values["joules"] = self._epoch_joules(record)
        return row

    def _row(self, kind: str, record: dict[str, Any], began: float, learning_rate: float | None) -> Row:
        step, took_s = int(record["step"]) + self._steps_before, record["seconds"] - began
        values = {
            "step": step,
            "epoch": record["epoch"] + self._epochs_before,
            "loss": record["loss"],
            "learning_rate": learning_rate,
            "samples": record["samples"],
            "samples_per_s": record["samples"] / took_s if took_s > 0 else None,
            "seconds": record["seconds"],
            "joules": None,
        }
        return Row(kind, step, values)

    def _validation(self, record: dict[str, Any]) -> Row:
        step = int(record["step"]) + self._steps_before
        values = {name: one for name, one in record.items() if one is None or isinstance(one, int | float)}
        return Row("validations", step, {**values, "step": step})

    def _epoch_joules(self, record: dict[str, Any]) -> float | None:
        """Of an epoch, over all workers that measured it."""
        return epoch_joules(self._run.energy, record["figure"])

    def _add_joules(self, rows: list[Row]) -> None:
        """The run's joules so far belong to its last step; those before it were not asked for."""
        steps = [row for row in rows if row.kind == "steps"]
        if steps:
            steps[-1].values["joules"] = self._run.joules
