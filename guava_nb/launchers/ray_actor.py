"""What runs on a Ray cluster: an actor that starts one `guava worker`. Imports nothing of Ray."""

from __future__ import annotations

import contextlib
import os
import sys

from guava_nb.launchers.attached_process import AttachedProcess
from guava_nb.launchers.launcher import worker_words

__all__ = ["WorkerActor"]


class WorkerActor:
    """Starts a worker on the machine that Ray chose, with the GPUs that Ray gave it.

    Args:
        mark: of the start, in the worker's arguments.
    """

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._worker: AttachedProcess | None = None

    def begin(self, code: str) -> tuple[int | None, list[str], bool]:
        """Start the worker if there is none; returns its exit status (None: it runs), its last lines, and whether it is new."""
        is_new = self._worker is None
        if self._worker is None:
            words = [
                *worker_words(sys.executable, "-", self._mark, gpus="auto"),
                "--end-with-input",
            ]  # goes with the actor
            self._worker = AttachedProcess(words, _environment())
            self._worker.say(code)
        return self._worker.status(), self._worker.said(), is_new

    def say(self, code: str) -> None:
        """The session has another code."""
        if self._worker is not None:
            self._worker.say(code)

    def pid(self) -> int:
        """Number of the actor's own process."""
        return os.getpid()

    def finish(self, limit_s: float) -> None:
        """Let the worker leave, and end it when it does not within `limit_s`."""
        worker = self._worker
        if worker is not None:
            worker.say("leave")
            worker.wait(limit_s)
            with contextlib.suppress(OSError):
                worker.close()


def _environment() -> dict[str, str]:
    """Without what Ray tells its own processes: a program that uses Ray there would take itself for the actor."""
    return {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
