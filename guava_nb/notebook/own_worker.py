"""The worker of this notebook: which session it joins, how it follows that one to a new code, how its cell blocks."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from IPython.core.error import UsageError

from guava_nb.errors import ClusterError
from guava_nb.notebook.display import ask_hidden, say
from guava_nb.notebook.lines import LineTail
from guava_nb.notebook.panel.blocking import interrupt_worker, watch
from guava_nb.notebook.panel.panel import Frame, Panel
from guava_nb.protocol.joincode import JoinCode
from guava_nb.render import View, worker_view
from guava_nb.status import NEW_CODE_NEEDED

__all__ = ["OwnWorker"]

#: Seconds that a worker gets to finish its step and to hand over, when the notebook closes.
LEAVE_S = 15.0
#: States of a worker that ended otherwise than it should.
_BAD_ENDS = ("failed", "crashed")
_ENDS = ("left", *_BAD_ENDS)
_AWAY = "reconnecting"
#: Errors that say little of what is in the way.
_UNREACHED = ("LinkBroken", "LinkTimeout")
_BACK = "The connection to the session is back: the worker goes on where it was, and you need to do nothing."
_BY_ITSELF = "You need to do nothing here; an interrupt makes it leave."
_HOW_ON = (
    "With the session's new join code, run %guava_worker NEWCODE here and it goes on where it was; %guava_down ends it"
)


class OwnWorker:
    """At most one worker process.

    Args:
        shell: of the notebook.
        start: makes the worker's handle.
    """

    def __init__(self, shell: Any, start: Callable[..., Any]) -> None:
        self._shell, self._start = shell, start
        self._handle: Any = None
        self._code: JoinCode | None = None

    @property
    def exists(self) -> bool:
        """Whether one was started, also if it has ended."""
        return self._handle is not None

    @property
    def lives(self) -> bool:
        """Whether there is one that runs."""
        return self._handle is not None and bool(self._handle.alive)

    def lines(self) -> list[str]:
        """What it printed last."""
        return list(self._handle.status().lines)

    def view(self) -> View:
        """How it stands, and what to do when its session is away."""
        status = self._handle.status()
        view = worker_view(status)
        if status.state != _AWAY:
            return view
        todo = f"It waits: interrupt its cell. {_HOW_ON}." if _needs_code(status) else _BY_ITSELF
        return replace(view, notes=(*view.notes, todo))

    def code(self, words: list[str]) -> JoinCode:
        """The code on the line, else in GUAVA_JOIN_CODE, else that of the worker that lives, else asked for.

        Raises:
            UsageError: none, or a living worker belongs to another session.
            JoinCodeError: it is damaged.
        """
        code = JoinCode.decode(" ".join(words) or os.environ.get("GUAVA_JOIN_CODE", "") or self.ask_for_code())
        if self.lives and self._code is not None and code.secret != self._code.secret:
            raise UsageError(
                "this notebook works for another session already: %guava_down leaves it, then run this again; if that session "
                "got a new address, its new code is in the other notebook: %guava_up --show-code"
            )
        return code

    def ask_for_code(self) -> str:
        """That of the worker that lives, else what is typed into a hidden prompt.

        Raises:
            UsageError: nothing was typed, or there is no user to ask.
        """
        if self.lives and self._code is not None:
            return self._code.encode()
        text = ask_hidden("Join code (from %guava_up in the other notebook): ", self._shell)
        if not text.strip():
            raise UsageError(
                "this needs the join code that %guava_up shows in the other notebook, as in %guava_worker guava1:..."
            )
        return text

    def join(self, code: JoinCode, device: str | None, name: str | None) -> None:
        """Start it."""
        self._handle = self._start(code.encode(), device=device or "auto", name=name)
        self._code = code

    def follow(self, code: JoinCode) -> str:
        """Lead the living worker by this code of its session; returns the sentence on it."""
        if code == self._code and self._handle.status().state != _AWAY:
            return "This notebook's worker is in that session already."
        self._handle.redirect(code)
        self._code = code
        return f"This notebook's worker dials its session at {code.address} now, and goes on where it was."

    def work(self, panel: Panel) -> None:
        """Block until it ended. While its session is away, an interrupt gives the cell back and leaves the worker be.

        That is no error: a kernel would drop the cells that were queued meanwhile, one with the new code among them.

        Raises:
            ClusterError: it did not leave as it should.
        """
        worker = self._handle
        tail = LineTail(lambda: worker.status().lines)
        given_back: list[int] = []
        shown, was_away = self.view(), False

        def frame() -> Frame:
            nonlocal shown, was_away
            state, view = worker.status().state, self.view()
            if state not in _ENDS:  # the last frame tells the end, once
                was_away = was_away or state == _AWAY
                shown = replace(view, notes=(*view.notes, _BACK)) if was_away and state != _AWAY else view
            return shown, tail.new()

        def last_frame() -> Frame:
            view = self.view()
            return (replace(view, notes=()) if worker.status().state in _BAD_ENDS else view), tail.new()

        def on_interrupt(count: int) -> str:
            if count > 1 or not _needs_code(worker.status()):
                return interrupt_worker(worker, count)
            given_back.append(count)
            return "The worker goes on waiting for its session."

        watch(lambda seconds: bool(given_back) or worker.wait(seconds), frame, last_frame, panel, on_interrupt)
        last = worker.status()
        if given_back:
            say(f"{_HOW_ON}.")
        elif last.state in _BAD_ENDS:
            raise ClusterError(_what_failed(last))

    def leave(self) -> None:
        """Let it leave after its step."""
        self._handle.leave()

    def close(self) -> bool:
        """Let it leave, and end it if it does not; True if there was one."""
        handle, self._handle, self._code = self._handle, None, None
        if handle is not None and handle.alive:
            handle.leave()
            if not handle.wait(LEAVE_S):
                handle.kill()
        return handle is not None


def _needs_code(status: Any) -> bool:
    """Whether its session is away, and may come back at another address."""
    return status.state == _AWAY and NEW_CODE_NEEDED in status.detail


def _what_failed(last: Any) -> str:
    """Why a worker did not end as it should, and what to do."""
    who = f"worker {last.name}".rstrip()
    if last.joined or last.state == "crashed":
        return f"{who} {last.state}: {last.detail}. To join again, run this cell again"
    advice = "; %guava_doctor CODE says which step fails" if last.error in _UNREACHED else ""
    return f"{who} did not join: {last.detail.rstrip('.') if advice else last.detail}{advice}"
