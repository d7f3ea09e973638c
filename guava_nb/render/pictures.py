"""Charts as PNG: one matplotlib figure made without pyplot, whose global state belongs to the user's own plots.

Import this file where a picture is made: matplotlib takes a second.
"""

from __future__ import annotations

import io
import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

from guava_nb.render.charts import SMOOTHING, Chart, Line, Scale, charts_of, finite, smoothed
from guava_nb.render.view import Curve
from guava_nb.status import Points, RunStatus

__all__ = ["classes_png", "curve_png", "runs_png", "size_px", "watts_png"]

_DPI = 100
_WIDTH_IN, _HEIGHT_IN = 6.4, 4.4
_GREY = "#808080"  # readable on light and on dark pages
_LETTERS = 10
_IMAGES_IN_A_ROW = 6
#: More would not be readable.
_NAMED_CLASSES = 20


def watts_png(curves: Mapping[str, Sequence[tuple[float, float]]]) -> bytes:
    """Draw watts over seconds, a line per worker, and return the picture as PNG with a clear background."""
    figure = _empty(_HEIGHT_IN * 0.6)
    axes = figure.add_subplot()
    for name, points in curves.items():
        axes.plot([at for at, _ in points], [watts for _, watts in points], label=name, linewidth=1.4)
    axes.set_xlabel("s")
    axes.set_ylabel("W")
    axes.set_ylim(bottom=0)
    _plain(axes)
    return _png(figure)


def curve_png(curve: Curve, smoothing: float = SMOOTHING) -> bytes:
    """Draw the charts of a run, and return the picture as PNG with a clear background."""
    charts = charts_of(curve)
    columns = 2 if len(charts) > 1 else 1
    rows = -(-len(charts) // columns)
    figure = _empty(_HEIGHT_IN / 2 * max(2, rows))
    for number, chart in enumerate(charts, 1):
        _draw(figure.add_subplot(rows, columns, number), chart, smoothing)
    return _png(figure)


def runs_png(runs: Sequence[RunStatus], smoothing: float = SMOOTHING) -> bytes:
    """Draw the losses of runs over each other, in training beside validation, as PNG with a clear background."""
    figure = _empty(_HEIGHT_IN * 0.75)
    losses = {run.run_id: finite(run.losses) for run in runs}
    val = {run.run_id: finite(tuple((step, loss) for step, loss, *_ in run.val)) for run in runs}
    given = (("training loss", losses, True), ("validation loss", val, False))
    sides = [(title, _lines(found, noisy)) for title, found, noisy in given if any(found.values())]
    for number, (title, lines) in enumerate(sides, 1):
        values = [value for line in lines for _, value in line.points]
        last = max(1, *(line.points[-1][0] for line in lines))
        chart = Chart(title, lines, Scale.of(values, is_log=True), last)
        _draw(figure.add_subplot(1, len(sides), number), chart, smoothing)
    return _png(figure)


def _lines(found: Mapping[str, Points], noisy: bool) -> tuple[Line, ...]:
    return tuple(Line(name, points, noisy, not noisy) for name, points in found.items() if points)


def _draw(axes: Axes, chart: Chart, smoothing: float) -> None:
    for number, line in enumerate(chart.lines):
        colour, soft = f"C{number}", smoothed(line.points, smoothing)
        label = line.name if line.name != chart.title else ""
        if line.is_noisy and soft != line.points:
            axes.plot(*zip(*line.points, strict=True), linewidth=0.8, alpha=0.3, color=colour)
        dots = "o" if line.has_dots else ""
        shown = soft if line.is_noisy else line.points
        axes.plot(
            *zip(*shown, strict=True), label=label or None, linewidth=1.2, marker=dots, markersize=3, color=colour
        )
    if chart.scale.is_log:
        axes.set_yscale("log")
    axes.set_ylim(chart.scale.low, chart.scale.high)
    axes.set_xlim(0, chart.last)
    if chart.is_over_time:
        axes.set_xticks([0, chart.last], ["0", chart.last_text])
    ticks = chart.scale.ticks()
    axes.yaxis.set_major_locator(FixedLocator(list(ticks)))
    axes.yaxis.set_major_formatter(FixedFormatter([chart.value_text(tick) for tick in ticks]))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_title(chart.title, loc="left", fontsize=_LETTERS, color=_GREY)
    axes.set_xlabel("time" if chart.is_over_time else "step", fontsize=_LETTERS)
    _plain(axes)


def _empty(height_in: float) -> Figure:
    figure = Figure(figsize=(_WIDTH_IN, height_in), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _plain(axes: Axes) -> None:
    """Grey lines and letters, no box: the page's own colours are not known here."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("bottom", "left"):
        axes.spines[side].set_color(_GREY)
    axes.tick_params(colors=_GREY, labelsize=_LETTERS)
    axes.xaxis.label.set_color(_GREY)
    axes.yaxis.label.set_color(_GREY)
    axes.patch.set_alpha(0)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False, labelcolor=_GREY, fontsize=8, loc="upper right")  # "best" would hop about


def _png(figure: Figure) -> bytes:
    out = io.BytesIO()
    figure.savefig(out, format="png", transparent=True)
    return out.getvalue()


def size_px(png: bytes) -> tuple[int, int]:
    """Return width and height of a picture."""
    width, height = struct.unpack_from(">II", png, 16)  # of its header, which comes first
    return width, height


def classes_png(
    counts: Sequence[Sequence[int]], names: Sequence[str], images: Sequence[Any], titles: Sequence[tuple[str, bool]]
) -> bytes:
    """Draw how often each class was taken for each, and some samples, as PNG with a clear background.

    Args:
        counts: a row per true class, a column per predicted one.
        names: of the classes.
        images: arrays that matplotlib draws, at most 12; [] for none.
        titles: what stands above each, and whether the prediction is right.
    """
    rows = -(-len(images) // _IMAGES_IN_A_ROW)
    figure = _empty(3.6 + 1.0 * rows)
    grid = figure.add_gridspec(1 + rows, _IMAGES_IN_A_ROW, height_ratios=[3.4, *[1.0] * rows])
    _draw_counts(figure.add_subplot(grid[0, :]), counts, names)
    for number, (image, (title, right)) in enumerate(zip(images, titles, strict=True)):
        axes = figure.add_subplot(grid[1 + number // _IMAGES_IN_A_ROW, number % _IMAGES_IN_A_ROW])
        axes.imshow(image, cmap="gray")
        axes.set_title(title, fontsize=8, color="#3a9a5f" if right else "#d1495b")
        axes.set_axis_off()
    return _png(figure)


def _draw_counts(axes: Axes, counts: Sequence[Sequence[int]], names: Sequence[str]) -> None:
    # Of none there is no number, and so no colour: white squares would be glaring on a dark page.
    shares = [[count / sum(row) if count else math.nan for count in row] for row in counts]
    axes.imshow(shares, cmap="Blues", vmin=-0.3, vmax=1)
    axes.set_xlabel("predicted", fontsize=_LETTERS)
    axes.set_ylabel("true", fontsize=_LETTERS)
    _plain(axes)
    if len(names) > _NAMED_CLASSES:
        return
    places = range(len(names))
    axes.set_xticks(places, names, rotation=0 if max(map(len, names)) < 4 else 90)
    axes.set_yticks(places, names)
    for is_ in places:
        for taken in places:
            if counts[is_][taken]:
                colour = "white" if shares[is_][taken] > 0.5 else "black"
                axes.text(taken, is_, str(counts[is_][taken]), ha="center", va="center", fontsize=7, color=colour)
