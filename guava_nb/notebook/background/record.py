"""Where a notebook finds its background session again: one file beside its session's own, readable by this user alone."""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

from guava_nb.config.state_folder import make_private_folder, read_private, write_private
from guava_nb.notebook.up import session_file
from guava_nb.tunnels.records import runs

__all__ = ["Record", "record_path"]


class Record(msgspec.Struct, frozen=True):
    """What is on file about one background session.

    Attributes:
        pid, began: number and start of its process, as `began_at` gives it.
        since: when it was started, in seconds since 1970.
        connection: Jupyter's connection file of it: addresses and the key that proves who asks.
        ended: how it ended by itself, in sentences; "" while it goes on, and where it was killed.
    """

    pid: int
    began: float
    since: float
    connection: str
    ended: str = ""

    @property
    def lives(self) -> bool:
        """Whether its process is there and serves."""
        return not self.ended and runs(self.pid, self.began)

    @classmethod
    def read(cls, path: Path) -> Record | None:
        """Return what a file says; None where there is none, or none that can be read."""
        with contextlib.suppress(OSError, msgspec.DecodeError):
            return msgspec.json.decode(read_private(path), type=cls)
        return None

    def write(self, path: Path) -> None:
        """Put it on file, whole."""
        make_private_folder(path.parent)
        write_private(path, msgspec.json.encode(self))


def record_path() -> Path:
    """Return where the background session of this notebook is on file."""
    return session_file().with_suffix(".background")
