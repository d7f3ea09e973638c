"""The process of a background session: a kernel of Jupyter's with the magics loaded, that no page is connected to."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from ipykernel.kernelapp import IPKernelApp

from guava_nb.config.units import show_time
from guava_nb.errors import GuavaError
from guava_nb.notebook.background.answers import Answers
from guava_nb.notebook.background.record import Record
from guava_nb.notebook.line_words import note_background
from guava_nb.notebook.magics import load
from guava_nb.tunnels.records import began_at

__all__ = ["Start", "main"]

_LOOK_S = 5.0


@dataclass(frozen=True)
class Start:
    """What the notebook says to the process that it starts.

    Attributes:
        record: where the process is to be found.
        idle_limit_s: without a notebook and a run it ends after so long.
        path: where the notebook imports from.
        starter: number and start of the notebook's process, which counts as attached from the beginning.
    """

    record: str
    idle_limit_s: float
    path: tuple[str, ...]
    starter: tuple[int, float]


def main() -> None:
    """Serve until told to end, or until it is unused for its limit."""
    start = Start(**json.loads(sys.argv[1]))
    sys.path[:] = list(dict.fromkeys([*sys.path, *start.path]))
    folder = Path(tempfile.mkdtemp(prefix="guava-background-"))  # 0700: no other user reaches what lies in it
    connection = folder / "connection.json"
    words = [f"--IPKernelApp.connection_file={connection}", "--HistoryManager.enabled=False"]
    if os.name != "nt":
        words += ["--transport=ipc", f"--ip={folder / 'line'}"]
    app: Any = IPKernelApp.instance()
    app.initialize(words)
    note_background()
    load(app.shell)
    magics = app.shell.magics_manager.registry["GuavaMagics"]
    # A moment later: the answer has to leave first.
    magics.answers = Answers(app.shell, magics, lambda: app.io_loop.call_later(0.2, app.io_loop.stop))
    magics.answers.attach(*start.starter)
    record = Record(os.getpid(), began_at(psutil.Process()), time.time(), str(connection))
    path = Path(start.record)
    path.unlink(missing_ok=True)
    record.write(path)
    watch = _IdleWatch(app, magics, start.idle_limit_s)
    watch.start()
    try:
        app.start()
    finally:
        ended = watch.ended
        magics.close()
        if ended:
            Record(record.pid, record.began, record.since, "", ended).write(path)
        else:
            path.unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)


class _IdleWatch(threading.Thread):
    """Ends the process when it was unused for so long.

    Attributes:
        ended: what is told then; "" before.
    """

    def __init__(self, app: Any, magics: Any, limit_s: float) -> None:
        super().__init__(name="guava-idle", daemon=True)
        self._app, self._magics, self._limit_s = app, magics, limit_s
        self.ended = ""

    def run(self) -> None:
        while self._magics.answers.unneeded_s() < self._limit_s:
            time.sleep(min(_LOOK_S, self._limit_s / 4))
        self.ended = (
            f"The background session of this notebook ended by itself at {time.strftime('%H:%M on %d %B')}: for "
            f"{show_time(self._limit_s)} no notebook was attached and no run went on. {self._saved()}"
        )
        self._app.io_loop.add_callback(self._app.io_loop.stop)

    def _saved(self) -> str:
        """Write what the last run trained; the sentence on it."""
        run = self._magics.session.newest_run_or_none()
        if run is None:
            return "Nothing was trained in it."
        path = Path.cwd() / f"{run.run_id}-{time.strftime('%Y%m%d-%H%M%S')}.pt"
        try:
            self._magics.session.save(str(path))
        except (GuavaError, OSError) as problem:
            return f"The state of {run.run_id} could not be saved: {problem}."
        return f"What {run.run_id} trained lies in {path}: %guava_resume loads it."


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
