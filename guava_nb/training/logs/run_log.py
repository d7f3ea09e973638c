"""The log of a run: a thread for each writer, which reads what is committed and writes it, while the run goes on.

A writer that fails is told of once, and tried again from where it failed. At the end each gets its time, and no more.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from guava_nb.protocol.messages import RunSpec
from guava_nb.spec.run_spec import mode_of
from guava_nb.training.logs.rows import Row, RunReader
from guava_nb.training.logs.writers import WRITERS, LogPlace, Writer
from guava_nb.training.plan import Logged
from guava_nb.training.run import Run

__all__ = ["RunLogs", "told_settings"]

#: Seconds between two looks, after a writer failed, and for which a run's end waits for all of them.
_LOOK_S, _RETRY_S, _END_S = 1.0, 15.0, 20.0


class _WriterThread:
    """One writer of one run."""

    def __init__(self, kind: str, place: LogPlace, reader: RunReader, notice: Callable[[str], None]) -> None:
        self.kind, self.reader = kind, reader
        self._place, self._notice = place, notice
        self._writer: Writer | None = None
        self._stop = threading.Event()
        self._state, self._told = "", False
        self._back: int | None = None  # step after which the writer may hold rows that were not kept
        self.thread = threading.Thread(target=self._work, name=f"guava-log-{kind}", daemon=True)

    def end(self, state: str) -> None:
        self._state = state
        self._stop.set()

    def _work(self) -> None:
        wait_s = 0.0
        while not self._stop.wait(wait_s):
            wait_s = _LOOK_S if self._try(is_over=False) else _RETRY_S
        if self._try(is_over=True) and self._writer is not None:
            self._attempt(lambda: self._close())
        elif self._told:
            self._notice(f"the log {self.kind} does not have the last rows of the run, because it could not be written")

    def _close(self) -> None:
        assert self._writer is not None
        self._writer.close(self._state)

    def _try(self, is_over: bool) -> bool:
        rows: list[Row] = []
        done = self._attempt(lambda: self._pass(is_over, rows))
        if not done and rows:
            kept = self.reader.forget(rows)
            self._back = kept if self._back is None else min(kept, self._back)
        return done

    def _pass(self, is_over: bool, rows: list[Row]) -> None:
        if self._writer is None:
            self._writer = WRITERS[self.kind](self._place)
            self._notice(f"logs to {self._writer.where}")
        back, new = self.reader.read(is_over)
        rows += new
        holds = [step for step in (back, self._back) if step is not None]
        if holds:
            self._back = min(holds)
            self._writer.rewind(self._back)
            self._back = None
        if rows:
            self._writer.write(rows)
            self._writer.flush()

    def _attempt(self, call: Callable[[], None]) -> bool:
        try:
            call()
        except Exception as error:  # of a library, a disk, a network
            if not self._told:
                self._told = True
                self._notice(
                    f"the log {self.kind} cannot be written now ({type(error).__name__}: {error}). The run goes on; it is tried "
                    f"again every {_RETRY_S:.0f} s, and not told again"
                )
            return False
        return True


class RunLogs:
    """All logs of one run.

    Args:
        run: whose history is logged.
        notice: takes sentences for the user; from any thread.
        before: the log that the run goes on from.
    """

    def __init__(self, run: Run, notice: Callable[[str], None], before: Logged | None = None) -> None:
        """Log nothing yet."""
        self._run, self._notice, self._before, self._name = run, notice, before, ""
        self._threads: list[_WriterThread] = []

    def begin(self, kinds: Sequence[str], folder: Path, name: str, spec: RunSpec) -> None:
        """Begin to log.

        Args:
            kinds: words of the option `log`.
            folder, name: where files go, and how their names begin.
            spec: of the run, whose settings some libraries show.
        """
        before, self._name = self._before or Logged(""), name
        place = LogPlace(folder, name, _settings_of(self._run.run_id, self._run.mode, spec), before.name, before.up_to)
        for kind in kinds:
            reader = RunReader(self._run, before.steps, before.epochs)
            self._threads.append(_WriterThread(kind, place, reader, self._say))
            self._threads[-1].thread.start()

    def _say(self, sentence: str) -> None:
        self._notice(f"{self._run.run_id}: {sentence}")

    def logged(self) -> Logged | None:
        """Return what a run that goes on from this one's weights has before it; None where nothing is logged."""
        if not self._threads:
            return None
        before, history, epochs = self._before or Logged(""), self._run.history, self._run.epochs
        steps = before.steps + (int(history[-1]["step"]) if history else 0)
        return Logged(self._name, steps, before.epochs + (int(epochs[-1]["epoch"]) if epochs else 0), steps)

    def end(self, state: str) -> None:
        """The run ended so: write all that is left, which is waited for a while."""
        for one in self._threads:
            one.end(state)
        until = time.monotonic() + _END_S
        for one in self._threads:
            one.thread.join(max(0.0, until - time.monotonic()))
            if one.thread.is_alive():
                self._say(
                    f"the log {one.kind} is not written to its end after {_END_S:.0f} s; it goes on without the run"
                )


def _settings_of(run_id: str, mode: str, spec: RunSpec) -> dict[str, Any]:
    """What of a run's settings a table of runs shows."""
    named = {"model": spec.model, "criterion": spec.criterion or spec.step, "optimizer": spec.optimizer}
    settings: dict[str, Any] = {"run_id": run_id, "mode": mode, "precision": spec.precision}
    for name, factory in (*named.items(), ("scheduler", spec.scheduler)):
        if factory is not None:
            settings |= {name: factory.name, **{f"{name}.{key}": value for key, value in factory.args.items()}}
    return settings


def told_settings(run_id: str, spec: RunSpec) -> tuple[tuple[str, str], ...]:
    """Return the same as text, for a person."""
    return tuple((name, str(value)) for name, value in _settings_of(run_id, mode_of(spec), spec).items())
