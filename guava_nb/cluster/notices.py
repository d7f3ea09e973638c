"""Sentences for the person at the orchestrator: joins, losses, refused strangers, and every warning of ours.

Warnings come through `logging`, from any thread; a library must not print them into the cell that happens to run.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

__all__ = ["Notices"]

#: Sentences kept; older ones are forgotten.
KEPT = 100
#: Characters of a sentence that are kept: names and reasons in it may come from a worker.
MOST_CHARS = 10_000


class Notices(logging.Handler):
    """Keeps the last sentences. As a log handler it also takes the package's warnings, once `listen` was called.

    Args:
        record: takes each of them for good.
    """

    def __init__(self, record: Callable[[str], None] = lambda sentence: None) -> None:
        """Start empty and not listening."""
        super().__init__(logging.WARNING)
        self._record = record
        self._sentences: deque[tuple[int, str, str]] = deque(maxlen=KEPT)
        self._count = 0
        self._access = threading.Lock()

    def add(self, sentence: str, topic: str = "") -> None:
        """Keep a sentence; from any thread. `topic` names what it is about, so that it can be forgotten when it is over."""
        logging.getLogger("guava_nb.session").info("%s", sentence)
        self._keep(sentence, topic)

    def replace(self, sentence: str, topic: str) -> None:
        """Keep a sentence instead of those on the same topic, which are over."""
        self.forget(topic)
        self.add(sentence, topic)

    def forget(self, topic: str) -> None:
        """What was said about a topic is over."""
        with self._access:
            kept = [entry for entry in self._sentences if entry[1] != topic]
            self._sentences.clear()
            self._sentences.extend(kept)

    def _keep(self, sentence: str, topic: str = "") -> None:
        with self._access:
            self._count += 1
            self._sentences.append((self._count, topic, sentence[:MOST_CHARS]))
        self._record(sentence[:MOST_CHARS])

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a warning of ours."""
        self._keep(record.getMessage())

    def listen(self) -> None:
        """Take the package's warnings from now on."""
        logging.getLogger("guava_nb").addHandler(self)

    def stop(self) -> None:
        """Take no warnings any more."""
        logging.getLogger("guava_nb").removeHandler(self)

    def numbered(self, count: int) -> tuple[tuple[int, str], ...]:
        """Return the newest sentences, oldest first, each with its number, which grows by one with each."""
        with self._access:
            return tuple((number, sentence) for number, _, sentence in self._sentences)[-count:]
