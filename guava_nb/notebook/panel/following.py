"""Following a run in a cell: what is new of it, the panel until its end, and what an interrupt means.

The run may be in this process, or in that of a background session, which gives an object of the same three methods.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from guava_nb.notebook.join_code import NEW_ADDRESS, hand_over
from guava_nb.notebook.lines import Notices, WorkerLines
from guava_nb.notebook.panel.blocking import interrupt_run, watch
from guava_nb.notebook.panel.panel import Frame, Panel
from guava_nb.render import awaited_workers, run_view, summary_view
from guava_nb.status import RunStatus, WorkerStatus

__all__ = ["Followed", "Following", "News", "follow", "show_code"]


@dataclass(frozen=True)
class News:
    """How a run stands, and what is new of it.

    Attributes:
        notes: the last sentences on what happened since the run was followed.
        lines: that workers printed since the last news.
        new_code: the cell to paste, where the join code is another one than at the last news, and what its tunnel needs.
    """

    run: RunStatus
    workers: tuple[WorkerStatus, ...]
    notes: tuple[str, ...]
    lines: tuple[str, ...] = ()
    new_code: tuple[str, str] | None = None


class Followed(Protocol):
    """A run that a cell may show."""

    def wait(self, wait_s: float) -> bool:
        """Wait for so many seconds at most; returns whether it has ended."""

    def news(self) -> News:
        """Return how it stands, and what is new."""

    def interrupt(self, count: int) -> str:
        """Do what the n-th interrupt means; returns the sentence to say."""


class Following:
    """A run of this process; what happened and was printed before this was made counts as known.

    Args:
        orchestrator: whose run it is.
        new_code: gives the cell to paste and the note on its tunnel where the code has changed since it was last asked.
    """

    def __init__(self, orchestrator: Any, new_code: Callable[[], tuple[str, str] | None]) -> None:
        self._orchestrator, self._new_code = orchestrator, new_code
        self._tail, self._notices = WorkerLines(orchestrator), Notices(orchestrator)
        self.run: Any = orchestrator.run

    def wait(self, wait_s: float) -> bool:
        """Wait for so many seconds at most; returns whether it has ended."""
        return bool(self.run.wait(wait_s))

    def notes(self) -> tuple[str, ...]:
        """Return the last sentences on what happened."""
        return self._notices.latest()

    def news(self) -> News:
        """Return how it stands, and what is new."""
        code, run = self._new_code(), self.run.status()
        return News(run, self._orchestrator.status().workers, self.notes(), tuple(self._tail.new()), code)

    def interrupt(self, count: int) -> str:
        """Do what the n-th interrupt means; returns the sentence to say."""
        away = awaited_workers(self._orchestrator.status().workers)
        # The step has its time, and then the state has as much to come back.
        return interrupt_run(self.run, count, away, self._orchestrator.config.interrupt_grace_s)


def show_code(new_code: tuple[str, str] | None, ui: str) -> None:
    """Show a join code that is another one than before: a busy cell leaves no other way to ask for it."""
    if new_code is not None:
        cell, note = new_code
        hand_over(cell, ui, " ".join(filter(None, (NEW_ADDRESS, note))))


def follow(followed: Followed, panel: Panel, ui: str, may_leave: bool = False) -> None:
    """Show a run until it has ended.

    Args:
        may_leave: an interrupt ends the showing only; else it stops the run.
    """
    left = threading.Event()

    def frame(is_last: bool) -> Frame:
        news = followed.news()
        show_code(news.new_code, ui)
        view = summary_view if is_last and news.run.state in ("done", "stopped", "failed") else run_view
        return view(news.run, news.workers, news.notes), news.lines

    def on_interrupt(count: int) -> str:
        if not may_leave:
            return followed.interrupt(count)
        left.set()
        return f"{followed.news().run.run_id} goes on; %guava_stop ends it."

    watch(
        lambda wait_s: left.is_set() or followed.wait(wait_s),
        lambda: frame(False),
        lambda: frame(True),
        panel,
        on_interrupt,
    )
