"""Bytes and lengths of time as people write and read them."""

from __future__ import annotations

import math
import re

from guava_nb.errors import ConfigError

__all__ = ["parse_bytes", "parse_seconds", "show_bytes", "show_float", "show_time"]

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
_FACTORS: dict[str, int] = {
    "b": 1,
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgtp", start=1)},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgtp", start=1)},
}
_TEXT = re.compile(r"(\d+(?:\.\d+)?|\.\d+)\s*([a-z]*)", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """Return how many bytes a text such as "900MB", "1.5 GB" or "64 KiB" names: decimal units, or binary ones with an i.

    Raises:
        ConfigError: it is no size above 0, or has no unit.
    """
    found = _TEXT.fullmatch(text.strip())
    if found is None:
        raise ConfigError(f"{text!r} is no number of bytes; write it like 900MB, 1.5GB or 512MiB")
    number, unit = found.groups()
    if not unit:
        raise ConfigError(f"{text!r} has no unit: write {number}MB, {number}GB or {number}MiB, for instance")
    factor = _FACTORS.get(unit.lower())
    if factor is None:
        raise ConfigError(f"{text!r}: {unit!r} is no unit of bytes; there are B, kB, MB, GB, TB and KiB, MiB, GiB, TiB")
    size = round(float(number) * factor)
    if size < 1:
        raise ConfigError(f"{text!r} is less than one byte; write it like 900MB")
    return size


def parse_seconds(text: str) -> float:
    """Return how many seconds a text such as "90s", "10 min" or "1.5h" names.

    Raises:
        ConfigError: it is no time above 0.
    """
    found = _TEXT.fullmatch(text.strip())
    factor = None if found is None else {"s": 1, "min": 60, "h": 3600}.get(found[2].lower())
    if found is None or factor is None or not float(found[1]):
        raise ConfigError(f"{text!r} is no time; write it like 90s, 10min or 1.5h")
    return float(found[1]) * factor


def show_bytes(count_bytes: int) -> str:
    """Bytes in decimal units, as networks count them: 1500 is "1.5 kB"."""
    value, unit = float(count_bytes), 0
    # 999.95 would print as "1000.0": it belongs to the next unit already.
    while abs(value) >= (1000 if unit == 0 else 999.95) and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{value:.0f} B" if unit == 0 else f"{value:.1f} {_UNITS[unit]}"


def show_float(value: float, digits: int = 4) -> str:
    """A number with `digits` significant digits, all before the point, and no exponent."""
    if not math.isfinite(value):
        return f"{value:g}"
    decimals = max(0, digits - 1 - int(f"{value:.{digits - 1}e}".partition("e")[2]))
    text = f"{value:,.{decimals}f}"
    return text.rstrip("0").rstrip(".") if decimals else text


def show_time(seconds: float) -> str:
    """A length of time in one unit: 0.012 is "12 ms", 9000 is "2.5 h"."""
    if seconds < 0.9995:
        return f"{show_float(seconds * 1000, 3)} ms"
    if seconds < 119.5:
        return f"{show_float(seconds, 3)} s"
    return f"{show_float(seconds / 60, 3)} min" if seconds < 7200 else f"{show_float(seconds / 3600, 3)} h"
