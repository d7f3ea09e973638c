"""How the runs of a notebook went, with their curves, in files that outlive its kernel and the session: to compare runs by."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import msgspec

from guava_nb.config.state_folder import read_private, write_private
from guava_nb.status import RunStatus
from guava_nb.training.run import Run

__all__ = ["KILLED", "MOST", "PastRuns"]

_T = TypeVar("_T")

#: How many are kept.
MOST = 50
#: Seconds between two writings of the run that goes on, at first and at most: so much of its curves is lost with a killed kernel.
FIRST_KEPT_S, KEEP_EVERY_S = 1.0, 10.0
_SUFFIX, _NOW_SUFFIX = ".runs", ".run-now"
KILLED = "its kernel ended while it went on; its figures were written down up to 10 s before that"


class PastRuns:
    """The newest runs that have ended, and the name of the next one. Thread-safe.

    The run that goes on is written, too, every now and then: where its kernel is killed, the next one finds it as "killed".
    A disk that takes nothing costs only what a later kernel would have seen.

    Args:
        session: gives the session's file; None where nothing of it outlives this process.
    """

    def __init__(self, session: Callable[[], Path | None]) -> None:
        """Read nothing yet."""
        self._session = session
        self._runs: list[RunStatus] = []
        self._is_read = False
        self._number = 0  # of the newest run of this process
        self._now: Run | None = None  # that `follow` keeps
        self._lock = threading.RLock()

    @property
    def next_id(self) -> str:
        """Name of the next run: numbers go on from one kernel of a notebook to the next, so that each name is of one run."""
        return f"run-{max(self._number, *map(_number, (run.run_id for run in self.all())), 0) + 1}"

    def launched(self, run_id: str) -> None:
        """Note that a run of this name was launched, here or by the process before."""
        self._number = max(self._number, _number(run_id))

    def follow(self, run: Run) -> None:
        """Keep a run that begins, for the case that its process is killed, until `add` is called at its end."""

        def work() -> None:
            pause_s = FIRST_KEPT_S
            while not run.done:
                with self._lock:
                    if self._now is run:
                        self._write(_NOW_SUFFIX, run.status())
                run.wait(pause_s)
                pause_s = min(2 * pause_s, KEEP_EVERY_S)

        if self._session() is not None:
            self.all()  # what a killed process left there would be lost
            self._now = run
            threading.Thread(target=work, name="guava-past-runs", daemon=True).start()

    def add(self, run: RunStatus) -> None:
        """Note a run that has ended."""
        with self._lock:
            self._runs = [*self.all(), run][-MOST:]
            self._write(_SUFFIX, self._runs)
            if self._now is not None and self._now.run_id == run.run_id:
                self._now = None
                self._forget_now()

    def all(self) -> list[RunStatus]:
        """Return them, the oldest first; those of earlier processes too."""
        with self._lock:
            if not self._is_read and self._session() is not None:
                self._is_read = True
                self._read()
            return list(self._runs)

    def _read(self) -> None:
        before = self._decoded(_SUFFIX, list[RunStatus]) or []
        killed = self._decoded(_NOW_SUFFIX, RunStatus)
        if killed is not None and killed.run_id not in {run.run_id for run in before}:
            before.append(replace(killed, state="killed", message=KILLED))
        self._runs = [*before, *self._runs][-MOST:]
        if killed is not None:
            self._write(_SUFFIX, self._runs)
            self._forget_now()

    def _decoded(self, suffix: str, form: type[_T]) -> _T | None:
        with contextlib.suppress(OSError, msgspec.DecodeError):
            return msgspec.msgpack.decode(read_private(self._file(suffix)), type=form)
        return None

    def _file(self, suffix: str) -> Path:
        session = self._session()
        if session is None:
            raise FileNotFoundError("nothing of this session outlives its process")
        return session.with_suffix(suffix)

    def _write(self, suffix: str, content: object) -> None:
        with contextlib.suppress(OSError):
            write_private(self._file(suffix), msgspec.msgpack.encode(content))

    def _forget_now(self) -> None:
        with contextlib.suppress(OSError):
            self._file(_NOW_SUFFIX).unlink(missing_ok=True)


def _number(run_id: str) -> int:
    found = re.match(r"run-(\d+)", run_id)
    return int(found[1]) if found else 0
