"""Seconds of forward and backward on any device.

Knows devices' clocks. On CUDA the host runs ahead of the device, so the device's own events are read, after the work
that waits for them anyway.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["StepTimer"]


class StepTimer:
    """Adds up the time of the blocks it measures."""

    def __init__(self, device: torch.device) -> None:
        """Measure on this device."""
        self._device = device if device.type == "cuda" else None
        self._seconds = [0.0, 0.0]
        self._events: list[tuple[int, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Measure a block of forward."""
        started = self._now()
        yield
        self._add(0, started)

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Measure a block of backward."""
        started = self._now()
        yield
        self._add(1, started)

    def read(self) -> tuple[float, float]:
        """Return the seconds of forward and of backward so far; on CUDA waits for the device."""
        for which, start, end in self._events:
            end.synchronize()
            self._seconds[which] += start.elapsed_time(end) / 1e3
        self._events.clear()
        return self._seconds[0], self._seconds[1]

    def _now(self) -> float | torch.cuda.Event:
        return time.perf_counter() if self._device is None else self._record()

    def _record(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _add(self, which: int, started: float | torch.cuda.Event) -> None:
        if isinstance(started, float):
            self._seconds[which] += time.perf_counter() - started
        else:
            self._events.append((which, started, self._record()))
