"""Pictures: one matplotlib figure made without pyplot, whose global state belongs to the user's own plots."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

__all__ = ["watts_png"]

_DPI = 100
_GREY = "#808080"  # readable on light and on dark pages


def watts_png(curves: Mapping[str, Sequence[tuple[float, float]]]) -> bytes:
    """Draw watts over seconds, a line per worker, and return the picture as PNG with a clear background."""
    figure = Figure(figsize=(6.4, 2.4), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name, points in curves.items():
        axes.plot([at for at, _ in points], [watts for _, watts in points], label=name, linewidth=1.4)
    axes.set_xlabel("s")
    axes.set_ylabel("W")
    axes.set_ylim(bottom=0)
    _plain(axes)
    return _png(figure)


def _plain(axes: object) -> None:
    """Grey lines and letters, no box: the page's own colours are not known here."""
    from matplotlib.axes import Axes

    assert isinstance(axes, Axes)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("bottom", "left"):
        axes.spines[side].set_color(_GREY)
    axes.tick_params(colors=_GREY)
    axes.xaxis.label.set_color(_GREY)
    axes.yaxis.label.set_color(_GREY)
    axes.patch.set_alpha(0)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False, labelcolor=_GREY, fontsize=8)


def _png(figure: Figure) -> bytes:
    out = io.BytesIO()
    figure.savefig(out, format="png", transparent=True)
    return out.getvalue()
