"""How the objects that magics and calls return look on a page: HTML from the same views as everywhere, by the names of classes.

They lie below `render` in the house, so they cannot draw themselves; naming their classes here loads no torch.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

from IPython.lib.pretty import RepresentationPrinter

from guava_nb.notebook.display import cell_number
from guava_nb.render import (
    View,
    energy_view,
    forecast_view,
    predictions_view,
    run_view,
    session_view,
    summary_view,
    to_html,
    to_text,
    worker_view,
)

__all__ = ["ObjectViews"]

_PREDICTIONS = ("guava_nb.evaluation.predictions", "Predictions")
_FORECAST = ("guava_nb.forecast.forecast", "Forecast")


def _of_run(run: Any) -> View:
    return (summary_view if run.done else run_view)(run.status())


#: Characters that the value of a magic shows of itself: a notebook is stored with them.
_MOST_CHARS = 20_000
#: What is as long as what is in it; all else cuts its own text.
_LONG = (str, bytes, bytearray, dict, list, tuple, set, frozenset)


class _Full(Exception):
    """There is more text than is shown."""


class _Shown(io.StringIO):
    """The first characters of a text."""

    def write(self, text: str) -> int:
        super().write(text[: max(0, _MOST_CHARS - self.tell())])
        if self.tell() >= _MOST_CHARS:
            raise _Full
        return len(text)


_VIEWS: dict[tuple[str, str], Callable[[Any], View]] = {
    _PREDICTIONS: predictions_view,
    _FORECAST: forecast_view,
    ("guava_nb.telemetry.energy_record", "EnergyRecord"): energy_view,
    ("guava_nb.training.run", "Run"): _of_run,
    ("guava_nb.notebook.background.background_run", "BackgroundRun"): _of_run,
    ("guava_nb.status", "Status"): session_view,
    ("guava_nb.processes.local_workers", "WorkerHandle"): lambda handle: worker_view(handle.status()),
}


class ObjectViews:
    """Formatters of one shell.

    A magic that has shown what it returns says so: the same table once more, as the cell's value, would be noise, and its
    one line of plain text stands there instead.
    """

    def __init__(self, shell: Any) -> None:
        """Register them."""
        self._shell = shell
        self._shown: tuple[Any, int] = (None, -1)
        self._cut = 0  # of which value the text is cut, by its id; 0 is of none
        formatters = shell.display_formatter.formatters
        for name, view in _VIEWS.items():
            formatters["text/html"].for_type_by_name(*name, self._drawn(view))
        for name in (_PREDICTIONS, _FORECAST):  # whose own text is more than a line
            formatters["text/plain"].for_type_by_name(*name, self._written(_VIEWS[name]))

    def shown(self, thing: Any) -> None:
        """Note that this cell has shown it."""
        self._shown = (thing, self._shell.execution_count)

    def cut_short(self, value: Any) -> Any:
        """Return what a magic returns; where it becomes its cell's value and its text is long, that is cut.

        What is shown says so, and where the whole is. In later cells the user asks for it, and it is shown as any other.
        """
        self.end_cell()
        if type(value) in _LONG and (text := _cut_text(value)) is not None:
            whole = f"Out[{cell_number(self._shell)}] has the whole value"
            shown = f"{text}\n[cut here after {_MOST_CHARS} characters; {whole}]"
            self._printers[id(value)] = lambda thing, printer, cycle: printer.text(shown)
            self._cut = id(value)
        return value

    def end_cell(self) -> None:
        """The cell is over, and its value was shown if it has one."""
        self._printers.pop(self._cut, None)

    @property
    def _printers(self) -> dict[int, Any]:
        found: dict[int, Any] = self._shell.display_formatter.formatters["text/plain"].singleton_printers
        return found

    def forget(self) -> None:
        """Take the formatters away again."""
        formatters = self._shell.display_formatter.formatters
        for kind in ("text/html", "text/plain"):
            for name in _VIEWS:
                formatters[kind].pop(".".join(name), None)

    def _is_shown(self, thing: Any) -> bool:
        known, cell = self._shown
        return known is thing and cell == self._shell.execution_count

    def _written(self, view: Callable[[Any], View]) -> Callable[[Any, Any, bool], None]:
        def write(thing: Any, printer: Any, cycle: bool) -> None:
            seen = view(thing)
            printer.text(f"{seen.title}: {seen.headline}" if self._is_shown(thing) else to_text(seen))

        return write

    def _drawn(self, view: Callable[[Any], View]) -> Callable[[Any], str | None]:
        def draw(thing: Any) -> str | None:
            return None if self._is_shown(thing) else to_html(view(thing))

        return draw


def _cut_text(value: Any) -> str | None:
    """The beginning of what a notebook would show of a value; None where that is short."""
    if isinstance(value, str | bytes | bytearray):
        value = value[: _MOST_CHARS + 1]  # its whole text would take its memory once more
    shown = _Shown()
    printer = RepresentationPrinter(shown, max_seq_length=1000)
    try:
        printer.pretty(value)
        printer.flush()
    except _Full:
        return shown.getvalue()
    except Exception:  # the user's class cannot show itself: IPython says so
        return None
    return None
