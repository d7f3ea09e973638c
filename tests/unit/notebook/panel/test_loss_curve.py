"""The curve below the panel: how often it is drawn, what stays, and that it never gets in the way."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from guava_nb.notebook.panel import loss_curve as picture
from guava_nb.notebook.panel.loss_curve import LossCurve
from guava_nb.notebook.panel.plots import HEIGHT_PX, WIDTH_PX, curve_png
from guava_nb.render import Curve
from tests.support.sensors import Clock


class Handle:
    """Stands in for a display output."""

    def __init__(self) -> None:
        self.shown: list[dict[str, Any]] = []
        self.updated: list[dict[str, Any]] = []

    def __call__(self) -> Handle:
        return self

    def display(self, bundle: dict[str, Any], raw: bool, metadata: dict[str, Any]) -> None:
        assert metadata["image/png"] == {"width": WIDTH_PX, "height": HEIGHT_PX}
        self.shown.append(bundle)

    def update(self, bundle: dict[str, Any], raw: bool, metadata: dict[str, Any]) -> None:
        assert metadata["image/png"] == {"width": WIDTH_PX, "height": HEIGHT_PX}
        self.updated.append(bundle)


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Handle:
    handle = Handle()
    monkeypatch.setattr(picture, "DisplayHandle", handle)
    return handle


def curve(steps: int) -> Curve:
    return Curve(tuple((step, 1.0 / (step + 1)) for step in range(steps)), ((steps - 1, 0.5),))


def test_at_most_one_picture_a_second(page: Handle) -> None:
    clock = Clock()
    drawn = LossCurve(widget=False, clock=clock)
    drawn.draw(None)
    for step in range(2, 100):
        drawn.draw(curve(step))
        clock.wait(0.1)
    assert len(page.shown) == 1 and 8 <= len(page.updated) <= 10
    drawn.finish(curve(100))
    assert page.updated[-1]["image/png"].startswith(b"\x89PNG")
    drawn.draw(curve(100))
    assert len(page.shown) == 1


def test_a_widget_lives_and_is_closed(page: Handle) -> None:
    from ipywidgets.widgets import widget

    living = widget._instances if hasattr(widget, "_instances") else widget.Widget.widgets  # ipywidgets 8, 7
    before = set(living)
    clock = Clock()
    drawn = LossCurve(widget=True, clock=clock)
    drawn.draw(curve(3))
    clock.wait(2)
    drawn.draw(curve(4))
    assert "application/vnd.jupyter.widget-view+json" in page.shown[0] and not page.updated
    drawn.finish(curve(5))
    drawn.close()
    drawn.close()
    assert set(page.updated[0]) == {"image/png", "text/plain"}
    assert set(living) == before


def test_without_widgets_the_output_itself_changes(page: Handle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    drawn = LossCurve(widget=True, clock=Clock())
    drawn.draw(curve(3))
    assert set(page.shown[0]) == {"image/png", "text/plain"}


@pytest.mark.parametrize(
    "losses", [(0.0, 0.0), (1.0, float("nan")), (float("inf"), 1.0), (1e-9, 1e9), (-5.0, 3.0), (1e308, -1e308)]
)
def test_any_losses_make_a_picture_of_a_few_kilobytes(losses: tuple[float, ...]) -> None:
    png = curve_png(Curve(tuple(enumerate(losses))))
    assert png.startswith(b"\x89PNG") and len(png) < 40_000
