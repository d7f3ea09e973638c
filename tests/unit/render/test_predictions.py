"""Results of a prediction as a person sees them: the same story in text and HTML."""

from __future__ import annotations

import numpy as np
import pytest

from guava_nb.evaluation.predictions import Predictions
from guava_nb.render import predictions_view, to_html, to_text

N = 20
IDS = {"sample_ids": np.arange(N)}


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        (
            {"predictions": np.full(N, 7), "confidences": np.full(N, 0.25, np.float32), **IDS},
            ("20 samples", "predictions 20 int64", "0.2500", "... 12 more samples", "400 B (estimated before: 320 B)"),
        ),
        (
            {"predictions": np.arange(N * 9).reshape(N, 9), "confidences": np.full((N, 9), np.nan, np.float32), **IDS},
            ("predictions 20x9 int64", "0, 1, 2, 3, 4, ...", "-, -, -, -, -, ..."),
        ),
        ({"outputs": np.full((N, 2, 2), 1.5), **IDS}, ("outputs 20x2x2 float64", "1.5, 1.5, 1.5, 1.5")),
        (
            {"outputs.a": np.full(N, 2.5), "outputs.b": np.full((N, 1), 3), "sample_ids": np.full(N, -1)},
            ("outputs.a 20 float64", "outputs.b 20x1 int64", "2.5", "?"),
        ),
    ],
    ids=["classes", "many", "raw", "raw by name"],
)
def test_counts_sizes_and_first_rows_are_told(arrays: dict[str, np.ndarray], words: tuple[str, ...]) -> None:
    view = predictions_view(Predictions(arrays, 320))
    text, html = to_text(view), to_html(view).replace("\N{NO-BREAK SPACE}", " ")  # figures stay with their units
    for word in words:
        assert word in text and word in html, (word, text)
    assert len(view.tables[1].rows) == 8 and "confidence" in text or "outputs" in text


def test_nothing_at_all_can_be_shown_too() -> None:
    assert "0 samples" in to_text(predictions_view(Predictions({}, None)))
