"""Whether the figures that a worker tells can be counted with.

A figure that is not finite, or negative, says nothing, and whoever adds, divides or draws it fails far from its cause. So all of
them are looked at where they arrive. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from guava_nb.protocol.messages import Energy, LineMeasured, Ready

__all__ = ["is_valid", "first_invalid_energy", "first_invalid_rate", "without_invalid"]

#: More than anything that is measured here; sums and ratios of such figures stay finite.
_MOST = 1e30
#: What a difference of two sums may fall short of 0.
_ROUNDING = 1e-6


def is_valid(figure: float | None) -> bool:
    """Return whether a figure is finite and at least 0; None, which stands for "not measured", is."""
    return figure is None or -_ROUNDING <= figure <= _MOST


def first_invalid_energy(report: Energy) -> str:
    """Return the first figure that cannot be, with its name; "" when all are sound."""
    return next((f"{name} = {figure:g}" for name, figure in _figures(report) if not is_valid(figure)), "")


def first_invalid_rate(found: LineMeasured) -> str:
    """Return what of a measured line cannot be: its rates are more than 0; "" when all is sound."""
    rates = {"up_bytes_s": found.up_bytes_s, "down_bytes_s": found.down_bytes_s}
    return next((f"{name} = {rate:g}" for name, rate in rates.items() if not 0 < rate <= _MOST), "")


def without_invalid(ready: Ready) -> tuple[Ready, str]:
    """Return a report of a shard without times and tokens that cannot be, and the first of those; "" when all are sound.

    Times become 0 and tokens None: what the step needs of the report is as good as before.
    """
    times = {"forward_s": ready.forward_s, "backward_s": ready.backward_s, "wait_s": ready.wait_s}
    odd = {name: figure for name, figure in times.items() if not is_valid(figure)}
    changes: dict[str, float | None] = dict.fromkeys(odd, 0.0)
    if ready.tokens is not None and not is_valid(ready.tokens):
        odd["tokens"], changes["tokens"] = ready.tokens, None
    if not odd:
        return ready, ""
    name, figure = next(iter(odd.items()))
    return replace(ready, **changes), f"{name} = {figure:g}"


def _figures(report: Energy) -> Iterator[tuple[str, float | None]]:
    for name in (
        "seconds", "busy", "memory_used_bytes", "memory_bytes", "power_w", "cpu_busy", "host_memory_used_bytes",
        "host_memory_bytes", "flops", "up_bytes_s",
    ):  # fmt: skip
        yield name, getattr(report, name)
    for rate in report.rates:
        yield "rates", rate
    for board in report.boards:
        yield "joules of a board", board.joules
        yield "uncovered_s", board.uncovered_s
        yield "readings", board.readings
    for part in report.phases:
        yield "seconds of a phase", part.seconds
        yield "joules of a phase", part.joules
    for task in report.tasks:
        yield "seconds of a task", task.seconds
        yield "joules of a task", task.joules
        yield "times of a task", task.times
