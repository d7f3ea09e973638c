"""What a session shows, in a file that other processes of this user read while it lives, and once after its end.

A thread writes it beside the session's file about once a second. It names the process, so a reader can tell one that lives and
stands still (a call that holds Python's lock) from one that has ended. Never the join code; readable by this user alone.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import psutil

from guava_nb.config.state_folder import read_private, state_folder, write_private
from guava_nb.status import Status
from guava_nb.systems import remove
from guava_nb.tunnels.records import began_at, runs

__all__ = ["ShownStatus", "StatusWriter", "session_statuses"]

_EVERY_S = 1.0
_SUFFIX = ".status"


class ShownStatus(msgspec.Struct, frozen=True):
    """A status as it was written.

    Attributes:
        pid, began: number and start of the process that wrote it, as `began_at` gives it.
        at: when, in seconds since 1970.
    """

    pid: int
    began: float
    at: float
    status: Status

    @classmethod
    def read(cls, path: Path) -> ShownStatus | None:
        """Return what a file holds; None where there is none, or none that can be read."""
        with contextlib.suppress(OSError, msgspec.DecodeError):
            return msgspec.msgpack.decode(read_private(path), type=cls)
        return None

    @property
    def lives(self) -> bool:
        """Whether the process that wrote it is still there; another one may have its number."""
        return runs(self.pid, self.began)

    @property
    def has_a_run(self) -> bool:
        """Whether a run went on."""
        return self.status.run is not None and self.status.run.state not in ("done", "stopped", "failed")


class StatusWriter:
    """Writes what `status` gives, from a thread, until `close` or until it gives None."""

    def __init__(self, session: Path, status: Callable[[], Status | None]) -> None:
        """Begin to write beside a session's file."""
        self._path, self._status = session.with_suffix(_SUFFIX), status
        self._began = began_at(psutil.Process())
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="guava-status", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            with contextlib.suppress(Exception):  # a full disk, or a status that changed while it was made
                status = self._status()
                if status is None:
                    return
                self._write(status)
            if self._ended.wait(_EVERY_S):
                return

    def _write(self, status: Status) -> None:
        write_private(self._path, msgspec.msgpack.encode(ShownStatus(os.getpid(), self._began, time.time(), status)))

    def close(self) -> None:
        """Write no more; the session is over, and nothing is left to show. May be called again."""
        self._ended.set()
        self._thread.join()
        remove(self._path)


def session_statuses(session: Path | None = None) -> list[tuple[Path, ShownStatus]]:
    """Return what the sessions of this user on this machine show, with their files.

    Those that live come first, of these the ones with a run that goes on, and of these the newest.

    Args:
        session: the file of one, where it is not among those of notebooks.
    """
    named = None if session is None else session.expanduser().with_suffix(_SUFFIX)
    paths = state_folder().glob(f"*{_SUFFIX}") if named is None else [named]
    found = [(path, shown) for path in paths if (shown := ShownStatus.read(path)) is not None]
    return sorted(found, key=lambda one: (one[1].lives, one[1].has_a_run, one[1].at), reverse=True)
