"""Charts as SVG in HTML: letters have the page's own colour, and a narrow page sets charts below each other."""

from __future__ import annotations

from html import escape

from guava_nb.render.charts import Chart, Line, smoothed
from guava_nb.status import Points

__all__ = ["charts_html"]

#: Readable on light and on dark pages.
_COLOURS = ("#3b8ed0", "#e8833a", "#4caf7a", "#a77bd1", "#c0626e", "#8a8a3c")
_WIDTH, _HEIGHT, _SMALL_HEIGHT = 600, 300, 200
_LEFT, _RIGHT, _TOP, _BOTTOM = 84, 12, 40, 34
#: Points of a line: more would not be seen, and each is sent with every frame.
_MOST_POINTS = 120
#: That stand above a chart.
_MOST_CHARACTERS = 48


def charts_html(charts: tuple[Chart, ...], smoothing: float = 0.0) -> str:
    """Return one `div` with a picture for each chart; "" without any."""
    if not charts:
        return ""
    drawn = "".join(_svg(chart, smoothing) for chart in charts)
    # Columns of one width: in rows that are filled each for itself a last one with fewer charts would have larger ones.
    columns = "grid-template-columns:repeat(auto-fill,minmax(min(250px,100%),1fr))"
    return f'<div style="display:grid;{columns};align-items:end;gap:2px 10px;margin:6px 0">{drawn}</div>'


def _svg(chart: Chart, smoothing: float) -> str:
    height = _SMALL_HEIGHT if chart.is_small else _HEIGHT
    parts = [_title(chart), _axes(chart, height)]
    for number, line in enumerate(chart.lines):
        colour = _COLOURS[number % len(_COLOURS)]
        if line.is_noisy and smoothing and smoothed(line.points, smoothing) != line.points:
            parts.append(_polyline(chart, line.points, height, f'{colour}" stroke-opacity=".3'))
            parts.append(_polyline(chart, smoothed(line.points, smoothing), height, colour))
        else:
            parts.append(_polyline(chart, line.points, height, colour))
        if line.has_dots:
            parts += [_dot(chart, point, height, colour) for point in _thinned(line.points)[-40:]]
    return (
        f'<svg role="img" aria-label="{escape(chart.title)}" viewBox="0 0 {_WIDTH} {height}" fill="currentColor" '
        f'style="width:100%;max-width:420px;height:auto" font-size="22">{"".join(parts)}</svg>'
    )


def _title(chart: Chart) -> str:
    named = [(number, line) for number, line in enumerate(chart.lines) if line.name and line.name != chart.title]
    texts = [f"{line.name} {_last(chart, line)}" for _, line in named]
    if len(chart.title) + sum(len(text) + 2 for text in texts) > _MOST_CHARACTERS:
        texts = [line.name for _, line in named]
    legend = "".join(
        f'<tspan dx="14" fill="{_COLOURS[number % len(_COLOURS)]}">{escape(text)}</tspan>'
        for (number, _), text in zip(named, texts, strict=True)
    )
    figure = "" if named else f'<tspan dx="14">{_last(chart, chart.lines[0])}</tspan>'
    return f'<text x="0" y="22"><tspan font-weight="600">{escape(chart.title)}</tspan>{legend}{figure}</text>'


def _last(chart: Chart, line: Line) -> str:
    return chart.value_text(line.points[-1][1])


def _axes(chart: Chart, height: int) -> str:
    """Horizontal lines with their values, and where the lower axis begins and ends."""
    rules, base = [], height - _BOTTOM
    for value in chart.scale.ticks():
        y = round(_y(chart, value, height))
        rules.append(f'<path d="M{_LEFT} {y}H{_WIDTH - _RIGHT}" stroke="currentColor" stroke-opacity=".2"/>')
        rules.append(
            f'<text x="{_LEFT - 8}" y="{y + 7}" text-anchor="end" opacity=".7">{chart.value_text(value)}</text>'
        )
    foot = height - 6
    rules.append(f'<text x="{_LEFT}" y="{foot}" opacity=".7">0</text>')
    over = "time" if chart.is_over_time else "step"
    rules.append(f'<text x="{(_LEFT + _WIDTH) // 2}" y="{foot}" text-anchor="middle" opacity=".7">{over}</text>')
    rules.append(f'<text x="{_WIDTH - _RIGHT}" y="{foot}" text-anchor="end" opacity=".7">{chart.last_text}</text>')
    rules.append(f'<path d="M{_LEFT} {_TOP}V{base}" stroke="currentColor" stroke-opacity=".5"/>')
    return "".join(rules)


def _polyline(chart: Chart, points: Points, height: int, stroke: str) -> str:
    places = " ".join(f"{_x(chart, step)},{_y(chart, value, height):.0f}" for step, value in _thinned(points))
    return f'<polyline fill="none" stroke="{stroke}" stroke-width="3" points="{places}"/>'


def _dot(chart: Chart, point: tuple[int, float], height: int, colour: str) -> str:
    return f'<circle r="5" cx="{_x(chart, point[0])}" cy="{_y(chart, point[1], height):.0f}" fill="{colour}"/>'


def _x(chart: Chart, step: int) -> int:
    return round(_LEFT + (_WIDTH - _LEFT - _RIGHT) * step / chart.last)


def _y(chart: Chart, value: float, height: int) -> float:
    base = height - _BOTTOM
    return base - (base - _TOP) * chart.scale.place(value)


def _thinned(points: Points) -> Points:
    stride = -(-len(points) // _MOST_POINTS)
    kept = points[::stride]
    return kept if kept[-1] == points[-1] else (*kept, points[-1])
