"""What the background process does for the notebooks attached to it: their magics, and questions on its runs.

Each question is a file in a folder of the notebook's own, the answer another one there. A question whose folder is gone was given
up, and is not begun.
"""

from __future__ import annotations

import argparse
import inspect
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from IPython.core.error import UsageError

from guava_nb.errors import ConfigError, of_the_user
from guava_nb.notebook.background.values import RunName, read_value, write_value
from guava_nb.notebook.panel.blocking import Interrupted
from guava_nb.notebook.panel.following import Following, News
from guava_nb.notebook.panel.panel import Panel
from guava_nb.notebook.settings import settings_of
from guava_nb.processes.interrupts import interrupts_wait
from guava_nb.tunnels.records import runs

__all__ = ["ANSWER", "QUESTION", "Answers"]

QUESTION, ANSWER = "question", "answer"


class Answers:
    """The service of one background process; every method but `is_needed` is called in its main thread.

    Args:
        shell: its IPython shell.
        magics: loaded there, over the session that all notebooks share.
        end: has the process end, soon.
    """

    def __init__(self, shell: Any, magics: Any, end: Callable[[], None]) -> None:
        self._shell, self._magics, self._session, self._end = shell, magics, magics.session, end
        self._runs: dict[str, Any] = {}
        self._models: dict[str, dict[str, Any]] = {}
        self._followed: list[Following] = []
        self._attached: dict[int, float] = {}
        self._is_busy = False
        self._needed_at = time.monotonic()

    def answer(self, folder: str) -> None:
        """Answer the question in a folder."""
        path = Path(folder)
        if not (path / QUESTION).exists():
            return
        self._is_busy = True
        try:
            question = read_value(path / QUESTION)
            self.attach(question.pop("pid"), question.pop("began"))
            try:
                told = {"value": getattr(self, f"_{question.pop('ask')}")(**question)}
                self._write(path, told)
            except BaseException as error:
                with interrupts_wait():
                    self._write(path, {"error": self._told(error)})
        finally:
            self._is_busy = False
            self._needed_at = time.monotonic()

    def attach(self, pid: int, began: float) -> None:
        """Note the process of a notebook, see `began_at`: as long as it lives the session is needed."""
        self._attached[pid] = began

    def unneeded_s(self) -> float:
        """Return for how many seconds no notebook was attached, no question was asked and no run went on."""
        run = self._session.newest_run_or_none()
        attached = any(runs(pid, began) for pid, began in list(self._attached.items()))
        if self._is_busy or attached or (run is not None and not run.done):
            self._needed_at = time.monotonic()
        return time.monotonic() - self._needed_at

    # --------------------------------------------------------------------------------------------------- questions

    def _hello(self) -> dict[str, Any]:
        run = self._session.newest_run_or_none()
        return {"run": None if run is None else run.status(), "cells": self._session.cells.texts()}

    def _magic(self, name: str, args: dict[str, Any], cell: str | None, look: dict[str, Any]) -> dict[str, Any]:
        """Run a magic as if its line stood in a cell here; gives its value, and the variables that it set."""
        settings = settings_of(self._shell)
        for key, value in look.items():
            setattr(settings, key, value)
        words = argparse.Namespace(**args)
        method = inspect.unwrap(getattr(type(self._magics), name))
        value = method(self._magics, words, *([] if cell is None else [cell]))
        return {"value": value, "set": self._set_by(name, words)}

    def _set_by(self, name: str, args: argparse.Namespace) -> dict[str, Any]:
        """Variables that a line has set here."""
        named = list(args.names) if name == "guava_pull" else [getattr(args, one, None) for one in ("out", "into")]
        return {one: self._shell.user_ns[one] for one in named if one is not None and one in self._shell.user_ns}

    def _share(self, name: str, text: str, with_workers: bool) -> None:
        """Run a cell here and share it; while a run goes on, one that ran here as it is does not run again."""
        run = self._session.newest_run_or_none()
        if run is not None and not run.done and self._session.cells.texts().get(name) == (text, with_workers):
            return  # it could draw random numbers that the run draws
        self._session.share(name, text, with_workers)

    def _train(self, args: dict[str, Any], look: dict[str, Any]) -> dict[str, Any]:
        """Start a run; gives it, and the number of what follows it."""
        settings_of(self._shell).ui = look["ui"]
        words = argparse.Namespace(**{**args, "detach": True})
        following = self._session.start_run(words, Panel(None))
        cells = [(one, text) for one, (text, with_workers) in self._session.cells.texts().items() if with_workers]
        self._models[following.run.run_id] = {"name": words.model, "args": words.model_args or {}, "cells": cells}
        self._followed.append(following)
        return {"run": following.run, "number": len(self._followed) - 1}

    def _follow(self) -> dict[str, Any] | None:
        """The newest run and the number of what follows it from now on; None where there is none."""
        if (following := self._session.newest_followed()) is None:
            return None
        self._followed.append(following)
        return {"run": following.run, "number": len(self._followed) - 1}

    def _news(self, number: int) -> tuple[News, bool]:
        is_over = self._followed[number].run.done  # before the news, which then are the last ones
        return self._followed[number].news(), is_over

    def _interrupt(self, number: int, count: int) -> str:
        return self._followed[number].interrupt(count)

    def _forget(self, name: str) -> str:
        return self._session.forget(name, alone=True)

    def _down(self) -> None:
        try:
            self._session.close()
        finally:
            self._end()

    def _read(self, run_id: str, name: str) -> Any:
        return getattr(self._runs[run_id], name)

    def _call(self, run_id: str, name: str, args: tuple[Any, ...], words: dict[str, Any]) -> Any:
        return getattr(self._runs[run_id], name)(*args, **words)

    def _model(self, run_id: str) -> dict[str, Any]:
        """What makes the model of a run: its factory, the cells, and the state of the last commit."""
        made = self._models[run_id]
        if made["name"] is None:
            raise ConfigError(
                f"the model of {run_id} came from a checkpoint, so its class is not known here: "
                "%guava_save PATH writes its weights"
            )
        model = self._runs[run_id].model()
        frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
        return {**made, "state": dict(model.state_dict()), "frozen": frozen, "training": model.training}

    # ----------------------------------------------------------------------------------------------------- private

    def _write(self, folder: Path, told: dict[str, Any]) -> None:
        if folder.exists():
            write_value(folder / ANSWER, told, self._name_of)

    def _name_of(self, value: Any) -> RunName | None:
        if (type(value).__module__, type(value).__name__) != ("guava_nb.training.run", "Run"):
            return None
        self._runs[value.run_id] = value
        return RunName(value.run_id, tuple(one for one in dir(value) if callable(getattr(type(value), one, None))))

    def _told(self, error: BaseException) -> dict[str, Any]:
        """An error by class and text, with the lines that a notebook shows of it: the user's frames only."""
        if isinstance(error, KeyboardInterrupt) and not isinstance(error, Interrupted):
            error = Interrupted(
                "the cell was interrupted before it was done; %guava_status shows what runs and how far it is"
            )
        kind, lines = type(error), []
        if render := getattr(error, "_render_traceback_", None):
            lines = render()
        elif not isinstance(error, UsageError):
            trace = of_the_user(error.__traceback__)
            lines = self._shell.InteractiveTB.structured_traceback(kind, error.with_traceback(trace), trace)
        return {"module": kind.__module__, "name": kind.__name__, "text": str(error), "lines": list(lines)}
