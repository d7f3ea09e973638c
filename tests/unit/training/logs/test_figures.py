"""From records of a run to its curves and its table of epochs."""

from __future__ import annotations

import math
from typing import Any

from guava_nb.status import EpochFigures
from guava_nb.training.logs.figures import CURVE_POINTS, epoch_figures, points, scores, thin

HISTORY: list[dict[str, Any]] = [
    {"step": n, "loss": 1.0 / n, "learning_rate": 0.1 / n if n != 4 else None, "gradient_norm": None}
    for n in range(1, 9)
]
EPOCHS = [
    {"epoch": 1, "step": 4, "loss": 0.5, "samples": 64, "seconds": 2.0, "figure": 0},
    {"epoch": 2, "step": 8, "loss": math.nan, "samples": 64, "seconds": 5.0, "figure": 1},
]
VALIDATIONS = [
    {"step": 2, "loss": 0.9, "accuracy": 0.1, "samples": 8, "f1": 0.3},
    {"step": 4, "loss": 0.8, "accuracy": None, "samples": 8, "f1": 0.4},
]


def test_an_epoch_has_its_last_validation_its_rate_its_time_and_its_joules() -> None:
    energy = [{"joules": 5.0, "epochs": [2.0, None]}, {"joules": None}, {"joules": 1.0, "epochs": [1.0, 3.0]}]
    first, second = epoch_figures(EPOCHS, HISTORY, VALIDATIONS, lambda: energy)
    assert first == EpochFigures(1, 0.5, (("loss", 0.8), ("f1", 0.4)), 0.1 / 3, 2.0, 3.0)
    assert second == EpochFigures(2, None, (), 0.1 / 8, 3.0, None)
    assert epoch_figures([], HISTORY, (), lambda: 1 / 0) == (), "nobody is asked for joules before there is an epoch"


def test_curves_leave_out_what_is_not_known() -> None:
    assert points(HISTORY, "learning_rate")[2:4] == ((3, 0.1 / 3), (5, 0.1 / 5))
    assert points(HISTORY, "gradient_norm") == ()
    assert scores(VALIDATIONS) == (("accuracy", ((2, 0.1),)), ("f1", ((2, 0.3), (4, 0.4))))


def test_a_long_run_is_thinned_and_its_end_is_kept() -> None:
    many = [{"step": n} for n in range(10_000)]
    kept = thin(many)
    assert len(kept) <= CURVE_POINTS + 1 and kept[-1] is many[-1] and kept[0] is many[0]
