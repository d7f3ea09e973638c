"""%guava_predict --show: predictions beside what the data set says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from IPython.core.error import UsageError

from guava_nb.notebook.results import shown_classes
from guava_nb.notebook.results.shown_classes import check_can_show, show_classes


class Loader:
    """A loader over images of classes 0 and 1."""

    def __init__(self, samples: list[Any]) -> None:
        self.dataset = samples


IMAGES = [(np.full((8, 8), float(k)), k % 2) for k in range(6)]
FOUND = {"predictions": np.array([0, 1, 0, 0, -1, 1]), "sample_ids": np.arange(6), "total_samples": 6}


def test_mistakes_are_counted_and_named(capsys: pytest.CaptureFixture[str]) -> None:
    show_classes(Loader(IMAGES), FOUND, "text")
    text = capsys.readouterr().out
    assert "classes: 4 of 6 right, 67 %" in text and "not sure" in text
    assert "1      0          1      33 %" in text


def test_pages_get_a_picture_with_mistakes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    pictures: list[bytes] = []
    monkeypatch.setattr(shown_classes, "show", lambda view, ui: None)
    monkeypatch.setattr(shown_classes, "show_png", lambda png, text: pictures.append(png))
    for samples in (
        IMAGES,
        [(np.zeros((3, 8, 9)), k) for _, k in IMAGES],
        [("no image", k) for _, k in IMAGES],
        [(np.full((8, 8, 3), np.nan), k) for _, k in IMAGES],
    ):
        show_classes(Loader(samples), {**FOUND, "predictions": FOUND["predictions"].reshape(6, 1)}, "html")
    assert [png[:4] for png in pictures] == [b"\x89PNG"] * 4


@pytest.mark.parametrize(
    "samples", [[(0.0, 0.5)] * 6, [3.0] * 6, [(0.0, "cat")] * 6, [(0.0, np.zeros(3))] * 6, [{"x": 1}] * 6]
)
def test_what_is_no_class_is_told(samples: list[Any]) -> None:
    with pytest.raises(UsageError, match="--show needs samples of the form"):
        show_classes(Loader(samples), FOUND, "text")


def test_data_without_an_index_is_refused_before_anything_is_predicted(notebook: Any) -> None:
    check_can_show(Loader(IMAGES))
    notebook.run("%guava_up\nloader = [1, 2]")
    shown = notebook.run("%guava_predict --data loader --show")
    assert not shown.ok and "this data has no indices" in shown.lines[0]
    assert not [name for name, _ in notebook.orchestrator.calls if name == "predict"]
    shown = notebook.run("%guava_predict --data loader --show --raw")
    assert not shown.ok and "keep one" in shown.lines[0]
