"""The ways a panel can be drawn: a text bar, lines of text, an HTML output replaced in place, a widget.

The widget is one core `ipywidgets.HTML`: no third-party front-end code is needed, and a page that is loaded anew in mid-run
shows the frame that it saved last, with its time. At the end it gives way to static HTML and is closed: a stored notebook
holds no widget.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast
from weakref import WeakSet

from IPython.display import DisplayHandle, display
from tqdm import tqdm

from guava_nb.notebook.display import say
from guava_nb.notebook.lines import ShownLines
from guava_nb.render import SMOOTHING, Charts, Curve, Table, View, redact, to_html, to_text

__all__ = ["DisplaySurface", "LineSurface", "Steady", "TextSurface", "show_charts"]

# Keeps the height of a live panel: what it had room for once, it has room for until its end. Pure.

_NOTHING = "-"
_BLANK = "\u00a0"


class Steady:
    """Adds to each view the facts and the number of notes that an earlier one had; begins anew where a bar comes or goes."""

    def __init__(self) -> None:
        """Nothing was shown yet."""
        self._facts: list[str] = []
        self._num_notes, self._had_bar = 0, False

    def of(self, view: View) -> View:
        """Return the view with room for all that was there before."""
        has_bar = view.progress is not None
        if has_bar != self._had_bar:
            self._facts, self._num_notes, self._had_bar = [], 0, has_bar
        if not has_bar:
            return view
        tables = tuple(table if table.columns else self._facts_of(table) for table in view.tables)
        self._num_notes = max(self._num_notes, len(view.notes))
        notes = (*view.notes, *[_BLANK] * (self._num_notes - len(view.notes)))
        return replace(view, tables=tables, notes=notes)

    def _facts_of(self, table: Table) -> Table:
        now = {row[0]: row for row in table.rows}
        self._facts += [name for name in now if name not in self._facts]
        return replace(table, rows=tuple(now.get(name, (name, _NOTHING)) for name in self._facts))


Clock = Callable[[], float]

#: Seconds after which a state that did not change is sent again with its new time: one that stands still is then an old one.
ALIVE_S = 5.0

#: Lines of workers' output that one drawing adds at most; the rest is counted and stays in %guava_log.
MAX_NEW_LINES = 20
#: Seconds between two lines of progress where no line can be taken back: growing, so that a day of training is no flood.
FIRST_PAUSE_S, PAUSE_GROWTH, LONGEST_PAUSE_S = 2.0, 1.5, 60.0


class _Bar(tqdm):  # type: ignore[type-arg]
    """A tqdm apart from the user's own bars: a dead bar of theirs would move ours to a line of its own per update."""

    monitor_interval = 0  # no monitor thread: only the cell's thread may write
    _instances: WeakSet[Any] = WeakSet()
    _lock = threading.RLock()


class TextSurface:
    """One tidy line on standard output, workers' lines above it, the whole view below it at the end."""

    interval_s = 0.5

    def __init__(self) -> None:
        self._bar: _Bar | None = None
        self._news = _News()

    def draw(self, view: View, lines: Sequence[str]) -> None:
        """Move the bar."""
        bar = self._open(view) if self._bar is None else self._bar  # a bar without a total has no truth value
        if new := [*_capped(lines), *self._news.of(view)]:
            bar.write(redact("\n".join(new)), file=sys.stdout)
        bar.set_description_str(view.title if view.progress else f"{view.title}: {view.headline}", refresh=False)
        if view.progress is not None:
            bar.total, bar.n = view.progress.total, view.progress.done
            bar.set_postfix_str(redact(view.headline), refresh=False)
        bar.refresh()

    def finish(self, view: View, lines: Sequence[str]) -> None:
        """Leave the bar as it stands and write the summary."""
        if lines or self._bar is not None:
            self.draw(view, lines)
        self.close()
        say(to_text(self._news.alone(view)))

    def close(self) -> None:
        """End the bar's line: a bar left open would spoil every later one."""
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.close()

    def _open(self, view: View) -> _Bar:
        done, total = (view.progress.done, view.progress.total) if view.progress else (0, None)
        layout = None if view.progress else "{desc}"
        unit = view.progress.unit if view.progress else "it"
        self._bar = _Bar(
            desc=view.title,
            initial=done,
            total=total,
            unit=unit,
            bar_format=layout,
            file=sys.stdout,
            position=0,
            leave=True,
        )
        return self._bar


class LineSurface:
    """Whole lines on standard output, for what cannot take a line back: stored notebooks, log files, pipes."""

    interval_s = 0.5

    def __init__(self, clock: Clock = time.monotonic, wall: Clock = time.time) -> None:
        self._clock, self._wall = clock, wall
        self._due_s = float("-inf")
        self._pause_s = FIRST_PAUSE_S
        self._last = ""
        self._news, self._shown = _News(), ShownLines()

    def draw(self, view: View, lines: Sequence[str]) -> None:
        """Write what workers printed and what happened at once, progress now and then, and nothing twice."""
        new = [*self._shown.of(_capped(lines)), *self._news.of(view)]
        text = ": ".join(part for part in (view.title, view.headline) if part)
        if text != self._last and self._clock() >= self._due_s:
            new.append(f"{_time_of_day(self._wall())} {text}")
            self._last, self._due_s = text, self._clock() + self._pause_s
            self._pause_s = min(LONGEST_PAUSE_S, self._pause_s * PAUSE_GROWTH)
        if new:  # in one piece: each call is a message to the page
            say("\n".join(new))

    def finish(self, view: View, lines: Sequence[str]) -> None:
        """Write the summary."""
        lines = [*self._shown.of(_capped(lines)), *self._shown.rest()]
        say("\n".join([*lines, to_text(self._news.alone(view))]))

    def close(self) -> None:
        """Nothing is held."""


class _News:
    """Tells the notes of a view that were not there before."""

    def __init__(self) -> None:
        self._told: tuple[str, ...] = ()

    def of(self, view: View) -> list[str]:
        """Notes that the last view did not have."""
        new = [note for note in view.notes if note not in self._told]
        self._told = view.notes
        return new

    def alone(self, view: View) -> View:
        """The view with those notes only: the others stand above it."""
        return replace(view, notes=tuple(self.of(view)))


class DisplaySurface:
    """One display output, changed in place; carries widget view, HTML and text together. At the end the charts become a picture.

    Args:
        widget: try ipywidgets; else, and where they are missing, the output itself is replaced.
        picture: with charts.
        smoothing: of noisy lines, 0 to below 1.
        hint: what to do where what is shown stands still.
    """

    interval_s = 0.34

    def __init__(
        self, widget: bool, picture: bool = True, smoothing: float = SMOOTHING, hint: str = "", clock: Clock = time.time
    ) -> None:
        """Show nothing yet."""
        self._draws_charts, self._want_widget, self._hint, self._clock = picture, widget, hint, clock
        self._charts, self._steady = Charts(smoothing), Steady()
        self._widget: Any = None
        self._handle: DisplayHandle | None = None
        self._lines: deque[str] = deque(maxlen=12)
        self._html, self._sent_at = "", 0.0

    def draw(self, view: View, lines: Sequence[str]) -> None:
        """Change the shown state, if it differs; now and then its time alone."""
        self._lines.extend(_capped(lines))
        html = self._html_of(self._steady.of(view))
        if html == self._html and self._clock() - self._sent_at < ALIVE_S:
            return
        as_of = f"as of {_time_of_day(self._clock())}" + (f"; {self._hint}" if self._hint else "")
        frame = self._html_of(self._steady.of(view), as_of), f"{to_text(view)}\n{as_of}"
        if self._handle is None:
            self._open(*frame)
        else:
            self._change(*frame)
        self._html, self._sent_at = html, self._clock()

    def finish(self, view: View, lines: Sequence[str]) -> None:
        """Replace whatever lives by static HTML and text, and a picture of the charts."""
        self._lines.extend(_capped(lines))
        as_of = f"as of {_time_of_day(self._clock())}"
        html = to_html(view, tuple(self._lines), as_of, with_charts=False)
        text = "\n".join([*self._lines, to_text(view), as_of])
        if self._handle is None:
            self._handle = DisplayHandle()
            self._handle.display(cast(Any, _bundle(html, text)), raw=True)
        else:
            self._handle.update(cast(Any, _bundle(html, text)), raw=True)
        if self._draws_charts and view.curve is not None:
            show_charts(view.curve, self._charts.smoothing)

    def close(self) -> None:
        """Close the widget's models, so that the notebook file keeps none."""
        widget, self._widget = self._widget, None
        for model in () if widget is None else (widget, widget.layout, getattr(widget, "style", None)):
            if model is not None:  # closing the widget would leave its parts
                model.close()

    def _html_of(self, view: View, as_of: str = "") -> str:
        return to_html(view, tuple(self._lines), as_of, self._charts, self._draws_charts)

    def _open(self, html: str, text: str) -> None:
        self._widget = _html_widget(html) if self._want_widget else None
        bundle = _bundle(html, text)
        if self._widget is not None:
            view = {"version_major": 2, "version_minor": 0, "model_id": self._widget.model_id}
            bundle["application/vnd.jupyter.widget-view+json"] = view
        self._handle = DisplayHandle()
        self._handle.display(cast(Any, bundle), raw=True)

    def _change(self, html: str, text: str) -> None:
        if self._widget is not None:
            self._widget.value = html
        elif self._handle is not None:
            self._handle.update(cast(Any, _bundle(html, text)), raw=True)


def show_charts(curve: Curve, smoothing: float) -> None:
    """Display the charts of a run as a picture that stays; its size travels with it, so that a page keeps the room."""
    from guava_nb.render.pictures import curve_png, size_px  # matplotlib takes a second to load, once

    png = curve_png(curve, smoothing)
    width, height = size_px(png)
    bundle = {"image/png": png, "text/plain": "charts of the run"}
    display(cast(Any, bundle), raw=True, metadata={"image/png": {"width": width, "height": height}})


def _time_of_day(at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at))


def _html_widget(html: str) -> Any:
    """A core HTML widget, or None where ipywidgets is missing or cannot work: the plain output serves as well."""
    try:
        from ipywidgets import HTML

        return HTML(html)
    except Exception:
        return None


def _bundle(html: str, text: str) -> dict[str, Any]:
    return {"text/plain": redact(text), "text/html": html}


def _capped(lines: Sequence[str]) -> list[str]:
    """The first and the last of too many lines, with a count of those left out between them."""
    if len(lines) <= MAX_NEW_LINES:
        return list(lines)
    head, tail = MAX_NEW_LINES // 4, MAX_NEW_LINES - MAX_NEW_LINES // 4
    return [*lines[:head], f"... {len(lines) - head - tail} more lines, see %guava_log", *lines[-tail:]]
