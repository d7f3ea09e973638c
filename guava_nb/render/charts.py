"""The charts of a run: which there are, their scales, and the lines in them. Pure; `svg.py` and `pictures.py` draw them.

A scale is kept through a run: it is logarithmic or not from the first points on, its ends are 1, 2 or 5 times a power of ten,
and it only becomes wider. Steps go from 0 to such a number, too, or to the run's last one.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from guava_nb.render.values import short_rate, show_percent, show_seconds
from guava_nb.render.view import Curve
from guava_nb.status import DeviceUse, Points

__all__ = ["SMOOTHING", "Chart", "Line", "Scale", "Scales", "charts_of", "finite", "smoothed", "tick_text"]

#: Names of charts and the widest scales that they had.
Scales = dict[str, "Scale"]

#: How much noisy lines are smoothed unless the user sets it.
SMOOTHING = 0.6
#: Fewer points are drawn as they are.
_FEW_POINTS = 20
#: A value out there has long said all it has to say.
_MOST = 1e30
#: Charts of single metrics, beside that of those which lie between 0 and 1.
_MOST_CHARTS = 4
#: Where devices are more, or their names take more room than is above a chart, it has lines of the least, mean and most of
#: them, at so many times.
_MOST_DEVICES, _MOST_CHARACTERS, _TIMES = 6, 36, 60
#: Characters of the names of several workers on one device that have room beside a title.
_MOST_NAMES = 32


@dataclass(frozen=True, slots=True)
class Scale:
    """The values that a chart has room for."""

    is_log: bool
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float], is_log: bool) -> Scale:
        """Return a scale with room for finite values; logarithmic where that is wanted and none is 0 or less, else with 0."""
        low, high = min(values), max(values)
        if is_log and low > 0:
            return cls(True, low := _grid_below(low), max(_grid_above(high), low * 2))
        low = -_grid_above(-low) if low < 0 else 0.0
        high = _grid_above(high) if high > 0 else 0.0
        return cls(False, low, high if high > low else low + 1.0)

    def wider(self, other: Scale) -> Scale:
        """Return the scale with room for what both have."""
        is_log = self.is_log and other.is_log
        return Scale(is_log, min(self.low, other.low), max(self.high, other.high))

    def place(self, value: float) -> float:
        """Where a value stands, from 0 at the low end to 1."""
        low, high = (math.log(self.low), math.log(self.high)) if self.is_log else (self.low, self.high)
        at = math.log(max(value, self.low)) if self.is_log else value
        return min(1.0, max(0.0, (at - low) / (high - low)))

    def ticks(self) -> tuple[float, ...]:
        """Return at most five values to write beside the axis, both ends among them."""
        if not self.is_log:
            return (self.low, (self.low + self.high) / 2, self.high)
        steps = [self.low]
        while steps[-1] < self.high * (1 - 1e-9):
            steps.append(_grid_above(steps[-1] * 1.1))
        return (*steps[: -1 : -(-(len(steps) - 1) // 4)], steps[-1])


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a chart.

    Attributes:
        is_noisy: is drawn smoothed, over itself.
        has_dots: its points are few and far between.
    """

    name: str
    points: Points
    is_noisy: bool = False
    has_dots: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines over steps or seconds.

    Attributes:
        last: step, or second, at which it ends; it begins at 0.
        is_small: of what is seldom looked at.
        is_over_time: over seconds.
        value_text: writes a value beside the axis.
    """

    title: str
    lines: tuple[Line, ...]
    scale: Scale
    last: int
    is_small: bool = False
    is_over_time: bool = False
    value_text: Callable[[float], str] = lambda value: tick_text(value)

    @property
    def last_text(self) -> str:
        """What stands at the end of the lower axis."""
        return show_seconds(self.last) if self.is_over_time else tick_text(self.last)


def charts_of(curve: Curve, scales: Scales | None = None) -> tuple[Chart, ...]:
    """Return the charts of a run.

    Args:
        scales: of those that were drawn of this run before; takes the new ones.
    """
    known = {} if scales is None else scales
    found = [
        ("loss", [Line("training", curve.losses, True), Line("validation", curve.val, has_dots=True)], True, False),
        *_of_scores(curve.scores),
        ("learning rate", [Line("", curve.learning_rates)], False, True),
        ("gradient norm", [Line("", curve.gradient_norms, True)], True, True),
    ]
    charts = []
    for title, lines, is_log, is_small in found:
        drawable = tuple(Line(one.name, finite(one.points), one.is_noisy, one.has_dots) for one in lines)
        drawn = tuple(one for one in drawable if one.points)
        if not drawn or (title != "loss" and all(len(one.points) < 2 and not one.has_dots for one in drawn)):
            continue
        scale = Scale.of([value for one in drawn for _, value in one.points], is_log)
        scale = scale.wider(known[title]) if title in known else scale
        known[title] = scale
        charts.append(Chart(title, drawn, scale, _last_step(curve), is_small))
    return (*charts, *_of_devices(curve.devices, known))


def _of_devices(devices: Sequence[DeviceUse], known: Scales) -> list[Chart]:
    """How busy GPUs were and how much of their memory was in use; likewise machines where that is what is known."""
    ends = [points[-1][0] for one in devices for points in (one.busy, one.memory_used_bytes) if points]
    last = round(_grid_above(max(1, *ends, 1)))
    charts = []
    for is_gpu, names in ((True, ("GPU busy", "GPU memory")), (False, ("CPU busy", "RAM in use"))):
        there = [one for one in devices if one.is_gpu is is_gpu]
        busy = [Line(_users(one), one.busy) for one in there if len(one.busy) > 1]
        memory = [Line(_users(one), one.memory_used_bytes) for one in there if len(one.memory_used_bytes) > 1]
        if busy:
            charts.append(Chart(names[0], _few(busy, last), Scale(False, 0, 1), last, True, True, show_percent))
        if memory:
            scale = Scale.of([value for line in memory for _, value in line.points], is_log=False)
            known[names[1]] = scale = scale.wider(known.get(names[1], scale))
            charts.append(Chart(names[1], _few(memory, last), scale, last, True, True, _bytes_text))
    return charts


def _users(device: DeviceUse) -> str:
    """Who is on a device, where the names have room beside a title; else how many they are."""
    others = device.workers.count(", ")
    return f"{others + 1} workers" if others and len(device.workers) > _MOST_NAMES else device.workers


def _bytes_text(value: float) -> str:
    return short_rate(value).removesuffix("/s")


def _few(lines: Sequence[Line], last_s: int) -> tuple[Line, ...]:
    """Lines that can be told apart: of many devices the least, the mean and the most at each time."""
    if len(lines) <= _MOST_DEVICES and (
        len(lines) == 1 or sum(len(line.name) + 2 for line in lines) <= _MOST_CHARACTERS
    ):
        return tuple(lines)
    at: dict[int, list[float]] = {}
    for line in lines:
        for seconds, value in line.points:
            at.setdefault(seconds * _TIMES // last_s, []).append(value)
    times = [(number * last_s // _TIMES, values) for number, values in sorted(at.items())]
    folds: dict[str, Callable[[list[float]], float]] = {"least": min, "mean": statistics.fmean, "most": max}
    return tuple(
        Line(f"{name} of {len(lines)}", tuple((time, fold(values)) for time, values in times))
        for name, fold in folds.items()
    )


def _last_step(curve: Curve) -> int:
    """The step at which charts end: with some room for those to come, at most the run's last."""
    here = max(1, *(points[-1][0] for points in (curve.losses, curve.val) if points))
    room = round(_grid_above(here))
    return room if curve.last_step is None else max(here, min(room, curve.last_step))


def _of_scores(scores: Iterable[tuple[str, Points]]) -> list[tuple[str, list[Line], bool, bool]]:
    """Metrics between 0 and 1 share a chart; each other one has its own."""
    shares, others = list[Line](), list[Line]()
    for name, points in scores:
        (shares if all(0 <= value <= 1 for _, value in points) else others).append(Line(name, points, has_dots=True))
    together = [("metrics" if len(shares) > 1 else shares[0].name, shares, False, False)] if shares else []
    return [*together, *((one.name, [one], False, False) for one in others[:_MOST_CHARTS])]


def finite(points: Points) -> Points:
    """Return what can be drawn of a line."""
    return tuple((step, min(max(value, -_MOST), _MOST)) for step, value in points if math.isfinite(value))


def smoothed(points: Points, smoothing: float) -> Points:
    """Return the exponential mean of a line: each value is `smoothing` of the mean before it and the rest of itself.

    Args:
        smoothing: 0, which changes nothing, to below 1.
    """
    if not smoothing or len(points) < _FEW_POINTS:
        return points
    mean, weight, out = 0.0, 0.0, []
    for step, value in points:
        mean, weight = smoothing * mean + (1 - smoothing) * value, smoothing * weight + (1 - smoothing)
        out.append((step, mean / weight))
    return tuple(out)


def tick_text(value: float) -> str:
    """A number beside an axis: short, and with an exponent only where it would be long."""
    if value == 0 or 1e-4 <= abs(value) < 1e5:
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    digits, _, power = f"{value:.1e}".partition("e")
    return f"{digits.removesuffix('.0')}e{int(power)}"


def _grid_below(value: float) -> float:
    """The largest of 1, 2 and 5 times a power of ten that is not above a positive value."""
    return max(step for step in _grid(value) if step <= value * (1 + 1e-9))


def _grid_above(value: float) -> float:
    """The smallest of them that is not below it."""
    return min(step for step in _grid(value) if step >= value * (1 - 1e-9))


def _grid(value: float) -> list[float]:
    power = math.floor(math.log10(value))
    # From the text of the number: products of floats would be next to what is written beside the axis.
    return [float(f"{digit}e{exponent}") for exponent in range(power - 1, power + 2) for digit in (1, 2, 5)]
