"""Checks the numbers in a worker's reports where they arrive. Pure.

A number that is NaN, infinite or negative would make sums, ratios and plots fail far from its cause.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct
from msgspec.structs import replace

from guava_nb.protocol.messages import Energy, LineMeasured, ShardReport

__all__ = ["is_valid", "first_invalid_energy", "first_invalid_rate", "without_invalid"]

#: More than anything that is measured here; sums and ratios of such numbers stay finite.
_MOST = 1e30
#: A difference of two sums may be this much below 0.
_ROUNDING = 1e-6


def is_valid(figure: float | None) -> bool:
    """Return whether a number is finite and at least 0; None ("not measured") is valid."""
    return figure is None or -_ROUNDING <= figure <= _MOST


def first_invalid_energy(report: Energy) -> str:
    """Return "name = value" of the first invalid number (NaN, infinite or negative) in the report, or ""."""
    return next((f"{name} = {figure:g}" for name, figure in _numbers(report) if not is_valid(figure)), "")


def first_invalid_rate(found: LineMeasured) -> str:
    """Return "name = value" of the first rate of a measured line that is not finite and above 0, or ""."""
    rates = {"up_bytes_s": found.up_bytes_s, "down_bytes_s": found.down_bytes_s}
    return next((f"{name} = {rate:g}" for name, rate in rates.items() if not 0 < rate <= _MOST), "")


def without_invalid(ready: ShardReport) -> tuple[ShardReport, str]:
    """Return a report of a shard with invalid times set to 0 and invalid tokens to None, and "name = value" of the first, or "".

    Loss, rows and all else that the step needs stay as they are.
    """
    times = {"forward_s": ready.forward_s, "backward_s": ready.backward_s, "wait_s": ready.wait_s}
    invalid = {name: figure for name, figure in times.items() if not is_valid(figure)}
    changes: dict[str, float | None] = dict.fromkeys(invalid, 0.0)
    if ready.tokens is not None and not is_valid(ready.tokens):
        invalid["tokens"], changes["tokens"] = ready.tokens, None
    if not invalid:
        return ready, ""
    name, figure = next(iter(invalid.items()))
    return replace(ready, **changes), f"{name} = {figure:g}"


def _numbers(record: Struct) -> Iterator[tuple[str, float]]:
    """All numbers in a record and in the records within it, each with the name of its field."""
    for name in record.__struct_fields__:
        value = getattr(record, name)
        for part in value if isinstance(value, tuple) else (value,):
            if isinstance(part, Struct):
                yield from _numbers(part)
            elif isinstance(part, int | float):
                yield name, part
