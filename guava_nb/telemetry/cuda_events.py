"""When a CUDA device was at a point of its work, on this process's clock, without a thread that waits for it.

The host runs ahead of the device, so the host's clock says nothing about what the device does. Events know the time between
two of them; the first, recorded while the device was idle, ties them to the clock.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

__all__ = ["CudaEvents"]

#: Seconds after which a newer event ties the others to the clock: the two clocks drift apart, and distances are 32-bit floats.
_ANCHOR_S = 60.0


class CudaEvents:
    """Records events and tells their times.

    Args:
        device: torch device; None: the one that is current where an event is recorded.
        clock: monotonic seconds.
    """

    def __init__(self, device: Any, clock: Callable[[], float]) -> None:
        self._device, self._clock = device, clock
        self._anchors: dict[Any, tuple[Any, float]] = {}

    def anchor(self) -> None:
        """Tie the device to the clock, at a moment when it has nothing to do."""
        event = self.mark()
        if event is not None:
            event.synchronize()
            self._anchors[event.device] = (event, self._clock())

    def mark(self) -> Any:
        """Record an event; None without CUDA, before its first use here, and while a graph is captured."""
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized() or torch.cuda.is_current_stream_capturing():
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def time_of(self, event: Any, at_s: float) -> float | None:
        """Return when the device was there; None: it was not yet.

        Args:
            event: of `mark`.
            at_s: when it was recorded: the device cannot have been there before.
        """
        now_s = self._clock()
        if not event.query():
            return None
        anchor, anchored_s = self._anchors.setdefault(event.device, (event, at_s))
        found_s: float = min(max(anchored_s + anchor.elapsed_time(event) / 1e3, at_s), now_s)
        if found_s > anchored_s + _ANCHOR_S:
            self._anchors[event.device] = (event, found_s)
        return found_s
