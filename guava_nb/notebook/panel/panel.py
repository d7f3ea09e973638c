"""The live panel of a blocking cell: drawn from the cell's own thread, at most a few times a second, never in the way.

A display can fail in many ways that have nothing to do with training (no widgets, a kernel that lost its page, a
closed standard output). So the first fault switches the panel off, is told once, and the loop goes on.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from guava_nb.notebook.display import say
from guava_nb.notebook.panel.surfaces import DisplaySurface, LineSurface, TextSurface
from guava_nb.render import SMOOTHING, View

__all__ = ["Frame", "Panel", "Surface", "make_panel"]

#: What a panel draws: a view and the lines that came since the last one.
Frame = tuple[View, Sequence[str]]


class Surface(Protocol):
    """A way of drawing; `interval_s` is the shortest time between two drawings."""

    interval_s: float

    def draw(self, view: View, lines: Sequence[str]) -> None:
        """Show the present state; `lines` are new."""

    def finish(self, view: View, lines: Sequence[str]) -> None:
        """Show the final state so that it stays when the kernel is gone."""

    def close(self) -> None:
        """Give back what the surface holds; called once, also after a fault."""


class Panel:
    """Limits the rate of a surface and survives its faults.

    Attributes:
        fault: what switched the panel off, None while it works.
        num_faults: how often drawing, letting go, or telling of a fault failed.
    """

    def __init__(self, surface: Surface | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.fault: Exception | None = None
        self.num_faults = 0
        self._surface = surface
        self._clock = clock
        self._due_s = float("-inf")

    def update(self, make_frame: Callable[[], Frame]) -> None:
        """Draw if it is time; the frame is made only then, so calling this often costs nothing."""
        if self._surface is None or self._clock() < self._due_s:
            return
        surface = self._surface
        self._guarded(lambda: surface.draw(*make_frame()))
        self._due_s = self._clock() + surface.interval_s

    def finish(self, make_frame: Callable[[], Frame]) -> None:
        """Draw the final state and let go of the surface."""
        surface = self._surface
        if surface is not None:
            self._guarded(lambda: surface.finish(*make_frame()))
        self.close()

    def close(self) -> None:
        """Let go of the surface as it is; safe to call twice."""
        surface, self._surface = self._surface, None
        if surface is not None:
            self._try(surface.close)

    def _guarded(self, draw: Callable[[], None]) -> None:
        fault = self._try(draw)
        if fault is not None:
            self.close()
            text = f"The panel is switched off ({type(fault).__name__}: {fault}); everything else goes on."
            self._try(lambda: say(text))

    def _try(self, action: Callable[[], None]) -> Exception | None:
        try:
            action()
        except Exception as fault:  # whatever a display can raise: none of it is worth a training run
            # Without its frames: they would keep a half-made bar alive, and tqdm redraws every bar it can find.
            self.fault, self.num_faults = self.fault or fault.with_traceback(None), self.num_faults + 1
            return fault
        return None


def make_panel(ui: str, picture: bool = True, smoothing: float = SMOOTHING, hint: str = "") -> Panel:
    """The panel for one of `settings.UI_NAMES`; see `DisplaySurface` for what pages that show pictures do."""
    if ui == "none":
        return Panel(None)
    if ui == "text":
        return Panel(TextSurface() if _is_terminal() else LineSurface())
    return Panel(DisplaySurface(ui == "widget", picture, smoothing, hint))


def _is_terminal() -> bool:
    """Whether a line on standard output can be written over."""
    try:
        return sys.stdout.isatty()
    except (AttributeError, ValueError):  # replaced by something smaller, or closed
        return False
