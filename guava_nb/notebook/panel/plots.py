"""Pictures: one matplotlib figure made without pyplot, whose global state belongs to the user's own plots."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from guava_nb.render import Curve

__all__ = ["HEIGHT_PX", "WIDTH_PX", "curve_png", "watts_png"]

_DPI = 100
_WIDTH_IN, _HEIGHT_IN = 6.4, 2.4
WIDTH_PX, HEIGHT_PX = round(_WIDTH_IN * _DPI), round(_HEIGHT_IN * _DPI)
#: Losses that differ by more than this factor are drawn on a logarithmic scale.
_WIDE = 30.0
_MOST = 1e30
_GREY = "#808080"  # readable on light and on dark pages


def watts_png(curves: Mapping[str, Sequence[tuple[float, float]]]) -> bytes:
    """Draw watts over seconds, a line per worker, and return the picture as PNG with a clear background."""
    figure, axes = _empty()
    for name, points in curves.items():
        axes.plot([at for at, _ in points], [watts for _, watts in points], label=name, linewidth=1.4)
    axes.set_xlabel("s")
    axes.set_ylabel("W")
    axes.set_ylim(bottom=0)
    _plain(axes)
    return _png(figure)


def curve_png(curve: Curve) -> bytes:
    """Draw loss over steps, in training and in validation, and return the picture as PNG with a clear background."""
    figure, axes = _empty()
    curve = Curve(_drawable(curve.losses), _drawable(curve.val))
    axes.plot(*zip(*curve.losses, strict=True), label="training", linewidth=1.2)
    if curve.val:
        axes.plot(*zip(*curve.val, strict=True), label="validation", linewidth=1.2, marker="o", markersize=4)
    values = [loss for _, loss in (*curve.losses, *curve.val) if math.isfinite(loss)]
    if values and min(values) > 0 and max(values) > _WIDE * min(values):
        axes.set_yscale("log")
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    _plain(axes)
    return _png(figure)


def _drawable(points: Sequence[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """Within what the axes can reckon with; a loss out there has long said all it has to say."""
    return tuple((step, min(max(loss, -_MOST), _MOST) if math.isfinite(loss) else loss) for step, loss in points)


def _empty() -> tuple[Figure, Axes]:
    figure = Figure(figsize=(_WIDTH_IN, _HEIGHT_IN), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()


def _plain(axes: Axes) -> None:
    """Grey lines and letters, no box: the page's own colours are not known here."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("bottom", "left"):
        axes.spines[side].set_color(_GREY)
    axes.tick_params(colors=_GREY)
    axes.xaxis.label.set_color(_GREY)
    axes.yaxis.label.set_color(_GREY)
    axes.patch.set_alpha(0)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False, labelcolor=_GREY, fontsize=8, loc="upper right")  # "best" would hop about


def _png(figure: Figure) -> bytes:
    out = io.BytesIO()
    figure.savefig(out, format="png", transparent=True)
    return out.getvalue()
