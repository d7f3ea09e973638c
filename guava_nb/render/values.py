"""Numbers with their units, for people. What was not measured is said, never shown as 0."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

from guava_nb.config.units import show_bytes as decimal_bytes
from guava_nb.config.units import show_float as decimal_float

__all__ = [
    "DASH",
    "NOT_MEASURED",
    "or_dash",
    "show_bytes",
    "show_bytes_pair",
    "short_rate",
    "show_float",
    "show_joules",
    "show_operations",
    "show_percent",
    "show_rate",
    "show_seconds",
    "show_used",
    "show_watts",
]

NOT_MEASURED = "not measured"
#: In a cell of a table, for what is not there.
DASH = "-"
_Value = TypeVar("_Value")
_PREFIXES = ("", "k", "M", "G", "T", "P", "E")
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def show_bytes(count_bytes: int | None) -> str:
    """Bytes in decimal units, as networks count them: 1500 is "1.5 kB"."""
    return NOT_MEASURED if count_bytes is None else decimal_bytes(count_bytes)


def or_dash(value: _Value | None, show: Callable[[_Value], str]) -> str:
    """A value for a table cell: a dash where "not measured" would take three words."""
    return DASH if value is None else show(value)


def show_bytes_pair(part_bytes: float, total_bytes: float) -> str:
    """A part of a size in the unit of the larger of the two, for a table cell: "5.1/25.3 GB"."""
    power = _power(max(part_bytes, total_bytes))
    return f"{_short(part_bytes / 1000**power)}/{_short(total_bytes / 1000**power)} {_UNITS[power]}"


def short_rate(bytes_s: float) -> str:
    """A rate for a table cell: "480 kB/s"."""
    power = _power(bytes_s)
    return f"{_short(bytes_s / 1000**power)} {_UNITS[power]}/s"


def _power(largest: float) -> int:
    """Of a thousand, so that what is left has at most three digits."""
    return next((power for power in range(len(_UNITS)) if largest / 1000**power < 999.5), len(_UNITS) - 1)


def _short(value: float) -> str:
    """Three digits of a number below a thousand; what would need more zeros than digits is only said to be small."""
    if value >= 99.95:
        return f"{value:.0f}"
    return show_float(value, 3) if value >= 0.01 or value == 0 else "<0.01"


def show_seconds(duration_s: float | None) -> str:
    """A duration with the unit that keeps two or three digits: "340 µs", "12.3 ms", "4.56 s", "3 min 05 s"; "0 s" for none."""
    if duration_s is None or math.isnan(duration_s):
        return NOT_MEASURED
    if duration_s == 0:
        return "0 s"
    if duration_s < 0.000_999_5:
        return f"{duration_s * 1e6:.0f} µs"
    if duration_s < 0.999_5:
        return f"{show_float(duration_s * 1e3, 3)} ms"
    if duration_s < 59.95:
        return f"{show_float(duration_s, 3)} s"
    minutes, seconds = divmod(round(duration_s), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {seconds:02d} s"


def show_joules(energy_j: float | None) -> str:
    """An energy with three digits, the most that sensors are good for: "0.340 J", "1.20 kJ", "3.05 MJ"."""
    if energy_j is None:
        return NOT_MEASURED
    for limit, factor, unit in ((999.5, 1.0, "J"), (999_500.0, 1e-3, "kJ")):
        if abs(energy_j) < limit:
            return f"{show_float(energy_j * factor, 3)} {unit}"
    return f"{show_float(energy_j * 1e-6, 3)} MJ"


def show_watts(power_w: float | None) -> str:
    """A power: "71.3 W"."""
    return NOT_MEASURED if power_w is None else f"{show_float(power_w, 3)} W"


def show_rate(per_s: float | None, what: str) -> str:
    """A speed: "512 samples/s"."""
    return NOT_MEASURED if per_s is None else f"{show_float(per_s, 3)} {what}/s"


def show_float(value: float | None, digits: int = 4) -> str:
    """A loss, an accuracy or a learning rate with `digits` significant digits, all before the point, and no exponent."""
    return NOT_MEASURED if value is None else decimal_float(value, digits)


def show_operations(count: float | None, per: str) -> str:
    """Operations in a second or by a joule, with a prefix instead of many zeros: "12.3 TFLOP/s"."""
    if count is None:
        return NOT_MEASURED
    power = next((power for power in range(len(_PREFIXES)) if count / 1000**power < 999.5), len(_PREFIXES) - 1)
    return f"{show_float(count / 1000**power, 3)} {_PREFIXES[power]}FLOP/{per}"


def show_percent(fraction: float | None) -> str:
    """A share of one as a percentage: 0.333 is "33 %"."""
    return NOT_MEASURED if fraction is None else f"{fraction * 100:.0f} %"


def show_used(used_bytes: int, limit_bytes: int) -> str:
    """How much of a limit is used; what is left is said where two rounded sizes would look alike."""
    text = f"{show_bytes(used_bytes)} of {show_bytes(limit_bytes)} used, {show_percent(used_bytes / limit_bytes)}"
    alike = show_bytes(used_bytes) == show_bytes(limit_bytes) and used_bytes < limit_bytes
    return f"{text} ({show_bytes(limit_bytes - used_bytes)} left)" if alike else text
