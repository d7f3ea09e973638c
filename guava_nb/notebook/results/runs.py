"""`%guava_runs`: the runs of a notebook beside each other, as a table and as curves, on the page and in files."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

from IPython.core.error import UsageError

from guava_nb.errors import ClusterError
from guava_nb.notebook.display import say
from guava_nb.notebook.line_words import in_a_folder, near
from guava_nb.render import runs_csv
from guava_nb.render.values import show_float
from guava_nb.status import RunStatus

__all__ = ["Runs"]

#: How many are shown where the line says nothing.
SHOWN = 10


class Runs:
    """What was trained here.

    Args:
        session: gives the open orchestrator, or raises what to do.
    """

    def __init__(self, session: Callable[[], Any]) -> None:
        """Ask nothing yet."""
        self._session = session
        self._alone: Any = None
        self._is_closed = False  # the session of that run

    def leave_alone(self, run: Any) -> None:
        """Note a run that goes on without a cell, so that its end is told by a later one; None: its end was shown."""
        self._alone, self._is_closed = run, False

    def session_closed(self) -> None:
        """Note that nothing can be asked of the session of that run any more."""
        self._is_closed = True

    def tell_end(self) -> None:
        """Say how such a run ended, once; called after each cell."""
        run = self._alone
        try:
            if run is None or not run.done:
                return
            status = run.status()
        except ClusterError as error:  # the process of its background session has ended
            self._alone = None
            say(f"{run.run_id} is not followed any more: {error}.")
            return
        self._alone = None
        at = "" if status.ended_at is None else f" at {time.strftime('%H:%M:%S', time.localtime(status.ended_at))}"
        loss = "" if status.loss is None else f", loss {show_float(status.loss)}"
        why = f" ({status.message})" if status.message else ""
        more = "" if self._is_closed else " %guava_status --follow shows all of it."
        say(f"{status.run_id} ended{at}: {status.state}{why}, step {status.step}{loss}.{more}")

    def all(self) -> list[RunStatus]:
        """Return the runs, the oldest first; the one that goes on is the last."""
        orchestrator = self._session()
        run = orchestrator.run
        return [*orchestrator.past_runs.all(), *([] if run is None or run.done else [run.status()])]

    def names(self) -> list[str]:
        """Names for completion."""
        try:
            return [run.run_id for run in self.all()]
        except UsageError:
            return []

    def chosen(self, args: argparse.Namespace) -> tuple[list[RunStatus], str]:
        """Return the runs of a line, the newest first, and a sentence on what else there is.

        Raises:
            UsageError: there is none yet, or none of a name; or options contradict each other.
        """
        if args.runs and (args.all or args.n is not None) or (args.all and args.n is not None):
            raise UsageError("%guava_runs: names, -n and --all choose runs each in their way; keep one of them")
        runs = self.all()[::-1]
        if not runs:
            raise UsageError("no run was started in this notebook yet: %guava_train starts one")
        known = [run.run_id for run in runs]
        for name in args.runs:
            if name not in known:
                shown = ", ".join(known[:SHOWN]) + (", ..." if len(known) > SHOWN else "")
                raise UsageError(f"no run is called {name}{near(name, known) or '.'} Runs: {shown}")
        if args.runs:
            return [run for run in runs if run.run_id in args.runs], ""
        found = runs if args.all else runs[: args.n or SHOWN]
        older = len(runs) - len(found)
        more = f"{older} older: %guava_runs --all. " if older else ""
        return found, f"{more}Losses in one picture: %guava_runs {' '.join(run.run_id for run in reversed(found[:2]))}"

    @staticmethod
    def export(args: argparse.Namespace, runs: list[RunStatus], png: Callable[[], bytes]) -> list[str]:
        """Write the files that a line asks for; returns a sentence on each.

        Args:
            png: draws the picture.

        Raises:
            UsageError: a folder does not exist, or the disk takes nothing.
        """
        said = []
        makers: list[tuple[str | None, Callable[[], bytes]]] = [
            (args.csv, lambda: runs_csv(runs).encode()),
            (args.png, png),
        ]
        for given, make in makers:
            if given is None:
                continue
            path = in_a_folder(given, "%guava_runs")
            try:
                path.write_bytes(make())
            except OSError as problem:
                raise UsageError(
                    f"{given} cannot be written: {problem.strerror or problem}; name another file"
                ) from None
            said.append(f"Written to {path}.")
        return said
