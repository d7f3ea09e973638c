"""What happened in a session while no one watched, line by line in a file that stays: who came and went, what it cost."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from guava_nb.config.state_folder import make_private_folder
from guava_nb.systems import put_in_place

__all__ = ["Diary"]

#: A longer file is set aside, and the one that was set aside before is gone.
_MOST_BYTES = 1 << 20


class Diary:
    """Appends sentences with their time to a file; from any thread. A disk that takes none ends no run.

    Args:
        path: gives the file, None where nothing is to be written now.
        session: its name, which begins what is written of it.

    Attributes:
        session: as above.
    """

    def __init__(self, path: Callable[[], Path | None], session: str) -> None:
        """Write nothing yet."""
        self._path, self.session = path, session
        self._access = threading.Lock()
        self._began: Path | None = None

    def add(self, sentence: str) -> None:
        """Append a sentence."""
        path = self._path()
        if path is None:
            return
        line = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {' '.join(sentence.split())}\n"
        with self._access, contextlib.suppress(OSError):
            make_private_folder(path.parent)
            if path.exists() and path.stat().st_size > _MOST_BYTES:
                put_in_place(path, path.with_name(f"{path.name}.1"))
            head = "" if self._began == path else f"-- session {self.session}\n"
            self._began = path
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "a", encoding="utf-8") as file:
                file.write(head + line)

    @property
    def path(self) -> Path | None:
        """Where this session has written; None while there is nothing."""
        return self._began
