"""The forecast of a run as a view: bytes of its parts by kind, and what would make it smaller; what one asks for stands first."""

from __future__ import annotations

from guava_nb.cluster.traffic import KINDS
from guava_nb.forecast.forecast import Forecast
from guava_nb.render.view import Table, View

__all__ = ["forecast_view"]


def forecast_view(forecast: Forecast) -> View:
    """Return the view of a forecast, see `guava_nb.forecast.forecast.Forecast`."""
    title, _, headline = forecast.headline().partition(": ")
    table = Table(("bytes of", "out", "in", *KINDS), tuple(forecast.cells()))
    answers = Table((), tuple((answer,) for answer in forecast.answers()))
    head, *rows = forecast.ways() or [()]
    ways = (Table(head, tuple(rows)),) if rows else ()
    return View(title, headline, None, (answers, *ways, table), tuple(forecast.sentences()))
