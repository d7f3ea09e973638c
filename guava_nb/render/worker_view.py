"""Makes the view of one worker as it sees itself: in its own notebook, and in the terminal that started it."""

from __future__ import annotations

from typing import Protocol

from guava_nb.render.values import (
    short_rate,
    show_bytes,
    show_bytes_pair,
    show_joules,
    show_percent,
    show_seconds,
    show_watts,
)
from guava_nb.render.view import Table, View
from guava_nb.render.workers import device_words
from guava_nb.status import OwnFigures

__all__ = ["WorkerSelf", "worker_view"]

_ENDED = ("left", "failed", "crashed")
_AWAY = "reconnecting"


class WorkerSelf(Protocol):
    """What a worker knows of itself; `step` is None or 0 before its first one."""

    @property
    def state(self) -> str: ...  # noqa: D102
    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def step(self) -> int | None: ...  # noqa: D102
    @property
    def device(self) -> str: ...  # noqa: D102
    @property
    def address(self) -> str: ...  # noqa: D102
    @property
    def detail(self) -> str: ...  # noqa: D102
    @property
    def figures(self) -> OwnFigures: ...  # noqa: D102


def worker_view(worker: WorkerSelf) -> View:
    """A worker as it sees itself: what it does, what it costs, how good its link is."""
    step = f"step {worker.step}" if worker.step else "no step yet"
    headline = f"{worker.state}, {step}"
    if worker.state not in _ENDED:
        headline = f"{worker.state} on {worker.device} for {worker.address}, {step}"
    notes = (worker.detail,) if worker.detail else ()
    title = f"worker {worker.name}".rstrip()
    return View(title, headline, None, (Table((), tuple(_facts(worker))),), notes)


def _facts(worker: WorkerSelf) -> list[tuple[str, str]]:
    """What is known; a worker that ended has no device and no link any more."""
    figures = worker.figures
    rows = [("work", _work(figures))]
    if worker.state not in _ENDED:
        rows.append(("device", _device(worker.device, figures)))
    if worker.state not in (*_ENDED, _AWAY):
        rows.append(("link", _link(figures)))
    rows.append(("energy", "" if figures.joules is None else f"{show_joules(figures.joules)} in this run"))
    if figures.out_bytes or figures.in_bytes:
        rows.append(("wire", f"{show_bytes(figures.out_bytes)} sent, {show_bytes(figures.in_bytes)} received"))
    return [(name, text) for name, text in rows if text]


def _work(figures: OwnFigures) -> str:
    parts = [f"{figures.samples} samples"] if figures.samples else []
    parts += [f"{show_percent(figures.share)} of each batch"] if figures.share is not None else []
    parts += [f"{show_seconds(figures.step_s)} a step"] if figures.step_s is not None else []
    parts += [f"waits for data {show_percent(figures.waits)} of the time"] if figures.waits is not None else []
    return ", ".join(parts)


def _device(device: str, figures: OwnFigures) -> str:
    parts = [device_words(device, figures.device_name)] if figures.device_name else []
    parts += [f"{figures.threads} thread{'' if figures.threads == 1 else 's'}"] if figures.threads is not None else []
    parts += [f"{show_percent(figures.busy)} busy"] if figures.busy is not None else []
    if figures.memory_used_bytes is not None and figures.memory_bytes is not None:
        kind = "RAM" if device == "cpu" else "memory"
        parts.append(f"{show_bytes_pair(figures.memory_used_bytes, figures.memory_bytes)} of {kind} in use")
    parts += [show_watts(figures.power_w)] if figures.power_w is not None else []
    return ", ".join(parts)


def _link(figures: OwnFigures) -> str:
    """What the line up does as far as this side saw, and what comes down, be it all that the line can bring or not."""
    up, arriving = figures.rate_out_bytes_s, figures.rate_in_bytes_s
    parts = [f"at least {short_rate(up)} up"] if up is not None else []
    parts += [f"{short_rate(arriving)} arriving"] if arriving is not None else []
    parts += [f"round trip {show_seconds(figures.round_trip_s)}"] if figures.round_trip_s is not None else []
    return ", ".join(parts)
