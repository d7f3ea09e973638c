"""The loss curve below a live panel: one picture, changed in place about once a second, still there when the kernel is gone.

A core `Image` widget of fixed height while it lives (an output that is drawn again loses its height, and the page jumps);
a plain picture at the end. No pyplot: its state is the user's, and it is not made for threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, cast

from IPython.display import DisplayHandle

from guava_nb.render import Curve

__all__ = ["PICTURE_S", "LossCurve", "close_widget"]

#: Shortest time between two pictures: drawing one takes some tens of milliseconds of the cell's thread.
PICTURE_S = 1.0
#: Told with each picture, in CSS pixels: a page keeps the room for it, so that nothing jumps when the next one comes.
_SIZE = {"image/png": {"width": 640, "height": 240}}


class LossCurve:
    """One display output for a curve. Nothing is shown before there is one.

    Args:
        widget: change a widget's value instead of the output itself.
        clock: monotonic seconds.
    """

    def __init__(self, widget: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._want_widget, self._clock = widget, clock
        self._widget: Any = None
        self._handle: DisplayHandle | None = None
        self._due_s = float("-inf")
        self._shown: Curve | None = None

    def draw(self, curve: Curve | None) -> None:
        """Show a curve, unless the last one was drawn a moment ago or it is the same."""
        if curve is None or curve == self._shown or self._clock() < self._due_s:
            return
        self._show(curve)
        self._due_s = self._clock() + PICTURE_S

    def finish(self, curve: Curve | None) -> None:
        """Leave the last curve as a plain picture."""
        if curve is None:
            return
        bundle = _bundle(_png(curve))
        if self._handle is None:
            self._open(bundle)
        else:
            self._handle.update(cast(Any, bundle), raw=True, metadata=_SIZE)
        self._shown = curve

    def close(self) -> None:
        """Close the widget's model. Safe to call twice."""
        widget, self._widget = self._widget, None
        if widget is not None:
            close_widget(widget)

    def _show(self, curve: Curve) -> None:
        png = _png(curve)
        if self._handle is None:
            bundle = _bundle(png)
            self._widget = _image_widget(png) if self._want_widget else None
            if self._widget is not None:
                view = {"version_major": 2, "version_minor": 0, "model_id": self._widget.model_id}
                bundle["application/vnd.jupyter.widget-view+json"] = view
            self._open(bundle)
        elif self._widget is not None:
            self._widget.value = png
        else:
            self._handle.update(cast(Any, _bundle(png)), raw=True, metadata=_SIZE)
        self._shown = curve

    def _open(self, bundle: dict[str, Any]) -> None:
        self._handle = DisplayHandle()
        self._handle.display(cast(Any, bundle), raw=True, metadata=_SIZE)


def close_widget(widget: Any) -> None:
    """Close a widget and its parts, which closing it would leave."""
    for model in (widget, widget.layout, getattr(widget, "style", None)):
        if model is not None:
            model.close()


def _png(curve: Curve) -> bytes:
    from guava_nb.notebook.panel.plots import curve_png  # matplotlib takes a second to load, once

    return curve_png(curve)


def _bundle(png: bytes) -> dict[str, Any]:
    return {"image/png": png, "text/plain": "loss curve"}


def _image_widget(png: bytes) -> Any:
    """A core image widget, or None where ipywidgets is missing or cannot work."""
    try:
        from ipywidgets import Image, Layout

        from guava_nb.notebook.panel.plots import HEIGHT_PX

        return Image(
            value=png, format="png", layout=Layout(height=f"{HEIGHT_PX}px", width="auto", object_fit="contain")
        )
    except Exception:
        return None
