"""How the runs of a session ended, with their curves, in a file that outlives its kernel and the session: to compare runs by."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec

from guava_nb.status import RunStatus

__all__ = ["PastRuns"]

_MOST = 50
_SUFFIX = ".runs"


class PastRuns:
    """The newest 50 runs that have ended. A disk that takes none costs only what a later kernel would have seen.

    Args:
        session: gives the session's file; None where nothing of it outlives this process.
    """

    def __init__(self, session: Callable[[], Path | None]) -> None:
        """Read nothing yet."""
        self._session = session
        self._runs: list[RunStatus] = []
        self._is_read = False

    def add(self, run: RunStatus) -> None:
        """Note a run that has ended."""
        self._runs = [*self.all(), run][-_MOST:]
        session = self._session()
        if session is not None:
            with contextlib.suppress(OSError):
                _write(session.with_suffix(_SUFFIX), msgspec.msgpack.encode(self._runs))

    def all(self) -> list[RunStatus]:
        """Return them, the oldest first; those of earlier processes too."""
        session = self._session()
        if session is not None and not self._is_read:
            self._is_read = True
            with contextlib.suppress(OSError, msgspec.DecodeError):
                before = msgspec.msgpack.decode(session.with_suffix(_SUFFIX).read_bytes(), type=list[RunStatus])
                self._runs = [*map(_with_time, before), *self._runs][-_MOST:]
        return list(self._runs)


def _with_time(run: RunStatus) -> RunStatus:
    """A run of an earlier process under a name that this one gives none of its own."""
    if "@" in run.run_id or run.began_at is None:
        return run
    return replace(run, run_id=f"{run.run_id}@{time.strftime('%d%b-%H:%M:%S', time.localtime(run.began_at))}")


def _write(path: Path, content: bytes) -> None:
    """Replace a file as a whole; readable by its user alone."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(name, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
