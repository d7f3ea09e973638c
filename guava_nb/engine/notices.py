"""Sentences for the person at the orchestrator: joins, losses, refused strangers, and every warning of ours.

Warnings come through `logging`, from any thread; a library must not print them into whatever cell happens to run.
"""

from __future__ import annotations

import logging
import threading
from collections import deque

__all__ = ["Notices"]

#: Sentences kept; older ones are forgotten.
KEPT = 100


class Notices(logging.Handler):
    """Keeps the last sentences. As a log handler it also takes the package's warnings, once `listen` was called."""

    def __init__(self) -> None:
        """Start empty and not listening."""
        super().__init__(logging.WARNING)
        self._sentences: deque[str] = deque(maxlen=KEPT)
        self._access = threading.Lock()

    def add(self, sentence: str) -> None:
        """Keep a sentence; from any thread."""
        logging.getLogger("guava_nb.session").info("%s", sentence)
        self._keep(sentence)

    def _keep(self, sentence: str) -> None:
        with self._access:
            self._sentences.append(sentence)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a warning of ours."""
        self._keep(record.getMessage())

    def listen(self) -> None:
        """Take the package's warnings from now on."""
        logging.getLogger("guava_nb").addHandler(self)

    def stop(self) -> None:
        """Take no warnings any more."""
        logging.getLogger("guava_nb").removeHandler(self)

    def last(self, count: int) -> tuple[str, ...]:
        """Return the newest sentences, oldest first."""
        with self._access:
            return tuple(self._sentences)[-count:]
