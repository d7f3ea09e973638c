"""Status, tables and errors as plain text and HTML. Knows no IPython, no sockets and no torch."""

from guava_nb.render.charts import SMOOTHING
from guava_nb.render.checks import checks_view
from guava_nb.render.energy import energy_view
from guava_nb.render.epochs import runs_csv, runs_view
from guava_nb.render.errors import error_text
from guava_nb.render.forecast import forecast_view
from guava_nb.render.html import Charts, to_html
from guava_nb.render.predictions import predictions_view
from guava_nb.render.redact import redact
from guava_nb.render.status import (
    awaited_workers,
    program_view,
    ready_workers,
    run_view,
    session_view,
    summary_view,
    waiting_view,
)
from guava_nb.render.text import to_text
from guava_nb.render.view import Curve, Progress, Table, View
from guava_nb.render.worker_view import WorkerSelf, worker_view

__all__ = [
    "SMOOTHING",
    "Charts",
    "runs_csv",
    "runs_view",
    "Curve",
    "awaited_workers",
    "checks_view",
    "Progress",
    "Table",
    "View",
    "WorkerSelf",
    "energy_view",
    "error_text",
    "forecast_view",
    "predictions_view",
    "program_view",
    "ready_workers",
    "redact",
    "run_view",
    "session_view",
    "summary_view",
    "to_html",
    "to_text",
    "waiting_view",
    "worker_view",
]
