"""A place where processes that were started together leave short texts for each other, before they have any other way.

Rank 0 writes, the others read: mostly where its hub or session listens. Under torchrun that is torchrun's own store; under an MPI
or Slurm it is a folder of this user that all their machines see, as a home folder mostly is.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from pathlib import Path
from typing import Any, Protocol

from guava_nb.config.state_folder import make_private_folder, read_private, write_private
from guava_nb.errors import ConfigError

__all__ = ["Board", "FolderBoard", "StoreBoard"]


class Board(Protocol):
    """What both kinds can do."""

    def put(self, key: str, text: str) -> None:
        """Leave a text, in place of the one that was left before."""

    def get(self, key: str) -> str | None:
        """The text, None where there is none yet; never waits."""

    def close(self) -> None:
        """Take everything away. Rank 0 calls it at its end, and the others then find nothing."""


class FolderBoard:
    """A folder that only this user can open; one file of mode 0600 for each text.

    Args:
        folder: of this job alone.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def begin(self) -> None:
        """Make the folder, empty: a job of the same number may have been killed. Rank 0 calls it.

        Raises:
            ConfigError: it cannot be made.
        """
        try:
            shutil.rmtree(self.folder, ignore_errors=True)
            if self.folder.exists():
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
            make_private_folder(self.folder)
        except OSError as problem:
            raise ConfigError(
                f"{self.folder} cannot be made ({problem.strerror or problem}): set XDG_STATE_HOME to a folder of yours that all "
                "machines of this job see"
            ) from problem

    def put(self, key: str, text: str) -> None:
        """Leave a text, whole at once."""
        write_private(self.folder / key, text.encode())

    def get(self, key: str) -> str | None:
        """The text, None where there is none."""
        with contextlib.suppress(OSError):
            return read_private(self.folder / key).decode()
        return None

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)


class StoreBoard:
    """The store that a launcher such as torchrun has for its processes.

    Args:
        store: of torch.distributed.
    """

    def __init__(self, store: Any) -> None:
        self._store = store

    def put(self, key: str, text: str) -> None:
        """Leave a text."""
        self._store.set(_PREFIX + key, text)

    def get(self, key: str) -> str | None:
        """The text, None where there is none; a store that is gone has none."""
        with contextlib.suppress(RuntimeError):
            if self._store.check([_PREFIX + key]):
                return bytes(self._store.get(_PREFIX + key)).decode() or None
        return None

    def close(self) -> None:
        """Take the texts away."""
        with contextlib.suppress(RuntimeError):
            for key in _KEYS:
                self._store.set(_PREFIX + key, "")


_PREFIX = "guava/board/"
_KEYS = ("code", "beat")
