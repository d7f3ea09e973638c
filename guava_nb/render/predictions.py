"""The results of a prediction as a view: what there is, what it takes, and the first rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from guava_nb.render.values import NOT_MEASURED, show_bytes, show_float
from guava_nb.render.view import Table, View

__all__ = ["predictions_view"]

#: Rows that are shown.
FIRST_ROWS = 8
#: Classes of a row that are shown.
FIRST_CLASSES = 5
MB = 1_000_000


def predictions_view(found: Mapping[str, Any]) -> View:
    """Return the view of results, see `guava_nb.evaluation.predictions.Predictions`."""
    count = found["total_samples"]
    arrays = [f"{name} {'x'.join(map(str, array.shape))} {array.dtype}" for name, array in _arrays(found)]
    facts = [("results", ", ".join(arrays))]
    if "kept" in found:
        facts += [("kept", f"{int(found['kept'].sum())} of {count} reach the threshold")]
    facts += [("size", _size(found))]
    path = getattr(found, "path", None)
    facts += [("files", str(path))] if path is not None else []
    more = (f"... {count - FIRST_ROWS} more samples",) if count > FIRST_ROWS else ()
    return View("predictions", f"{count} samples", None, (Table((), tuple(facts)), _first_rows(found)), more)


def _arrays(found: Mapping[str, Any]) -> list[tuple[str, Any]]:
    named: list[tuple[str, Any]] = []
    for key, value in found.items():
        parts = {f"{key}.{name}": array for name, array in value.items()} if isinstance(value, dict) else {key: value}
        named += [(name, array) for name, array in parts.items() if hasattr(array, "dtype")]
    return named


def _size(found: Mapping[str, Any]) -> str:
    estimated = found["estimated_memory_mb"]
    told = NOT_MEASURED if estimated is None else show_bytes(round(estimated * MB))
    return f"{show_bytes(round(found['measured_memory_mb'] * MB))} (estimated before: {told})"


def _first_rows(found: Mapping[str, Any]) -> Table:
    """The first samples: their ids, classes and probabilities; of raw outputs, the first numbers."""
    ids = found["sample_ids"][:FIRST_ROWS].tolist() if "sample_ids" in found else []
    if "predictions" in found:
        columns: tuple[str, ...] = ("sample", "prediction", "confidence")
        cells = [_classes(found["predictions"]), _classes(found["confidences"], "{:.4f}".format)]
    else:
        raw = [(name, array) for name, array in _arrays(found) if name.split(".")[0] == "outputs"]
        columns = ("sample", *(name for name, _ in raw))
        cells = [_classes(array.reshape(len(array), -1), show_float) if len(array) else [] for _, array in raw]
    return Table(columns, tuple(zip(("?" if i < 0 else str(i) for i in ids), *cells, strict=True)))


def _classes(array: Any, form: Callable[[Any], str] = str) -> list[str]:
    rows = array[:FIRST_ROWS].reshape(min(len(array), FIRST_ROWS), -1)
    shown = []
    for row in rows[:, :FIRST_CLASSES].tolist():
        # Below the threshold stand -1 and NaN: there is nothing to show.
        text = ", ".join("-" if value != value or value == -1 and form is str else form(value) for value in row)
        shown.append(text + (", ..." if rows.shape[1] > FIRST_CLASSES else ""))
    return shown
