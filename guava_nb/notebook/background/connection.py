"""The line from a notebook to its background session: questions over Jupyter's protocol; what is shown there is shown here.

A request runs the question that lies in a file. Jupyter's library signs every message with the key of the connection file.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import zmq
from jupyter_client.blocking.client import BlockingKernelClient

from guava_nb.errors import ClusterError
from guava_nb.notebook.background.answers import ANSWER, QUESTION
from guava_nb.notebook.background.record import Record
from guava_nb.notebook.background.told_error import told_error
from guava_nb.notebook.background.values import RunName, read_value, write_value
from guava_nb.notebook.display import can_ask, say
from guava_nb.notebook.panel.blocking import Interrupted
from guava_nb.processes.interrupts import interrupts_counted
from guava_nb.tunnels.records import began_at

__all__ = ["Busy", "Connection"]


class Busy(ClusterError):
    """Another cell keeps the background session busy."""


#: Milliseconds of one wait, after which the process is looked at.
_LOOK_MS = 250
#: Seconds after which a notebook is told that another one keeps the session busy.
_BUSY_S = 2.0
#: Seconds for the first answer: a machine may be busy with other things.
_CONNECT_S = 60.0
#: Seconds for the last output after an answer, which comes on a line of its own.
_REST_S = 5.0
_CODE = "get_ipython().magics_manager.registry['GuavaMagics'].answers.answer({!r})"


class Connection:
    """Asks one background session. Thread-safe: one question at a time.

    Args:
        record: of the session.
        shell: of this notebook: shows what comes back.
        run_of: makes what stands here for a run that stays there.

    Raises:
        ClusterError: it does not answer.
    """

    def __init__(self, record: Record, shell: Any, run_of: Callable[[RunName], Any]) -> None:
        self.record, self._shell, self._run_of = record, shell, run_of
        self._me = {"pid": os.getpid(), "began": began_at(psutil.Process())}
        self._lock = threading.RLock()
        self._client = BlockingKernelClient()
        self._client.load_connection_file(record.connection)
        self._session = self._client.session
        name = self._session.bsession
        self._shell_line = self._client.connect_shell(identity=name)
        self._input = self._client.connect_stdin(identity=name)
        self._output = self._client.connect_iopub()
        self._control = self._client.connect_control(identity=name)
        self._lines = (self._shell_line, self._input, self._output, self._control)
        self._poller = zmq.Poller()
        for line in (self._shell_line, self._input, self._output):
            self._poller.register(line, zmq.POLLIN)
        try:
            self._hear()
        except BaseException:
            self.close()
            raise

    def _hear(self) -> None:
        """Wait until its output reaches us: what is shown before a subscription stands is lost."""
        deadline, asked = time.monotonic() + _CONNECT_S, set()
        while time.monotonic() < deadline:
            self._check()
            asked.add(self._session.send(self._control, "kernel_info_request")["header"]["msg_id"])
            while self._output.poll(_LOOK_MS):
                if self._receive(self._output)["parent_header"].get("msg_id") in asked:
                    return
        raise ClusterError(
            f"the background session (pid {self.record.pid}) is there and has not answered for {_CONNECT_S:.0f} s; "
            "guava status in a terminal shows what it does"
        )

    def look(self, ask: str, patience_s: float, **words: Any) -> Any:
        """Ask what is answered at once, where another cell does not keep the process busy; interrupts are the caller's.

        Raises:
            Busy: the answering has not begun after `patience_s`.
            ClusterError: the process has ended.
        """
        return self._ask(ask, words, True, patience_s, lambda: 0)

    def ask(self, ask: str, *, shown: bool = True, **words: Any) -> Any:
        """Ask and wait for the answer; interrupts go there once it is being answered, and end the waiting before.

        Args:
            ask: what, see `Answers`.
            shown: show here what is shown there meanwhile.

        Raises:
            ClusterError: the process has ended.
            Interrupted: an interrupt came before the answering began.
            BaseException: what was raised there.
        """
        with interrupts_counted() as interrupts:
            return self._ask(ask, words, shown, None, lambda: interrupts.count)

    def _ask(
        self, ask: str, words: dict[str, Any], shown: bool, patience_s: float | None, interrupts: Callable[[], int]
    ) -> Any:
        with self._lock, tempfile.TemporaryDirectory(prefix="guava-ask-") as name:
            folder = Path(name)
            write_value(folder / QUESTION, {"ask": ask, **words, **self._me})
            content = {
                "code": _CODE.format(name), "silent": False, "store_history": False, "user_expressions": {},
                "allow_stdin": can_ask(self._shell), "stop_on_error": False,
            }  # fmt: skip
            request = self._session.send(self._shell_line, "execute_request", content)["header"]["msg_id"]
            _Request(self, request, shown, patience_s, interrupts).wait()
            if not (folder / ANSWER).exists():
                raise ClusterError(
                    "the background session did not answer this cell; its log, beside the session's file, says why. "
                    "%guava_down ends the session"
                )
            told = read_value(folder / ANSWER, self._run_of)
        if "error" in told:
            raise told_error(told["error"])
        return told["value"]

    def _check(self) -> None:
        if not self.record.lives:
            raise ClusterError(
                f"the process of the background session (pid {self.record.pid}) has ended without closing it. %guava_up "
                "--background goes on with the same join code: workers on other machines come back by themselves, and "
                "%guava_train --resume session goes on with the run"
            )

    def _receive(self, line: Any) -> dict[str, Any]:
        message = self._session.recv(line, mode=0)[1]
        return dict(message or {"parent_header": {}, "content": {}, "msg_type": ""})

    def close(self) -> None:
        """Let go of it; the session goes on."""
        for line in self._lines:
            line.close(linger=0)
        self._client.context.destroy(linger=0)


class _Request:
    """One request on its way."""

    def __init__(
        self,
        connection: Connection,
        request: str,
        shown: bool,
        patience_s: float | None,
        interrupts: Callable[[], int],
    ) -> None:
        self._line, self._request, self._shown, self._interrupts = connection, request, shown, interrupts
        self._patience_s = patience_s
        self._began = self._ended = self._said_busy = False

    def wait(self) -> None:
        """Show what comes, until the answer and the last output are here."""
        since, passed_on, rest_until = time.monotonic(), 0, 0.0
        answered = False
        while not (answered and (self._ended or time.monotonic() > rest_until)):
            ready = dict(self._line._poller.poll(_LOOK_MS))
            if self._line._output in ready:
                self._take(self._line._receive(self._line._output))
            if self._line._input in ready:
                self._answer_input(self._line._receive(self._line._input))
            if self._line._shell_line in ready:
                message = self._line._receive(self._line._shell_line)
                if message["parent_header"].get("msg_id") == self._request:
                    answered, rest_until = True, time.monotonic() + _REST_S
            if not ready:
                self._line._check()
            if self._interrupts() > passed_on and not answered:
                passed_on = self._interrupts()
                self._interrupt()
            if not self._began and not answered:
                self._wait_for_others(time.monotonic() - since)

    def _wait_for_others(self, waited_s: float) -> None:
        if self._patience_s is not None and waited_s > self._patience_s:
            raise Busy(
                f"the background session was busy with another cell for {self._patience_s:g} s, so nothing of this one was done "
                "there: run it again when that cell is done (%guava_status shows what runs)"
            )
        if waited_s > _BUSY_S and not self._said_busy and self._patience_s is None:
            self._said_busy = True
            say(
                "The background session is busy with another cell, and this one waits for it; an interrupt ends the waiting."
            )

    def _interrupt(self) -> None:
        if not self._began:
            raise Interrupted(
                "this cell was interrupted while it waited for the background session: nothing of it was done there"
            )
        if os.name == "nt":  # where the signal would end the process
            say("An interrupt does not reach another process on Windows: %guava_stop in the next cell stops a run.")
            return
        with contextlib.suppress(ProcessLookupError):  # then the next look says so
            os.kill(self._line.record.pid, signal.SIGINT)

    def _take(self, message: dict[str, Any]) -> None:
        if message["parent_header"].get("msg_id") != self._request:
            return
        kind, content = message["msg_type"], message["content"]
        if kind == "status":
            self._began, self._ended = True, content["execution_state"] == "idle"
        elif self._shown:
            _show_here(self._line._shell, kind, content)

    def _answer_input(self, message: dict[str, Any]) -> None:
        content = message["content"]
        ask = getpass.getpass if content.get("password") else input
        value = ask(content.get("prompt", ""))
        self._line._session.send(self._line._input, "input_reply", {"value": value}, parent=message)


def _show_here(shell: Any, kind: str, content: dict[str, Any]) -> None:
    """Show in this cell what was shown there."""
    if kind == "stream":
        stream = sys.stderr if content["name"] == "stderr" else sys.stdout
        stream.write(content["text"])
        stream.flush()
    elif kind in ("display_data", "update_display_data"):
        shell.display_pub.publish(
            content["data"],
            content["metadata"],
            transient=content.get("transient") or {},
            update=kind == "update_display_data",
        )
    elif kind == "clear_output":
        shell.display_pub.clear_output(content["wait"])
    elif kind == "error":  # of the request itself
        say("\n".join(content["traceback"]))
