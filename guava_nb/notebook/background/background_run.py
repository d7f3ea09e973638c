"""A run of the background session as the notebook sees it: what is asked of it is asked there."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from guava_nb.notebook.background.connection import Busy, Connection
from guava_nb.notebook.background.values import RunName
from guava_nb.notebook.panel.following import News

__all__ = ["BackgroundFollowed", "BackgroundRun"]

#: Seconds between two looks, and of waiting for one.
_LOOK_S = 0.25
_PATIENCE_S = 1.0


class BackgroundRun:
    """Attributes and methods are those of `guava_nb.training.run.Run`; `model()` is built here, with the weights from there.

    Args:
        connection: gives the connection of now, or raises what to do.
    """

    def __init__(self, connection: Callable[[], Connection], name: RunName) -> None:
        self._connection, self._name = connection, name
        self.run_id = name.run_id

    @property
    def done(self) -> bool:
        """Whether the run has ended: done, stopped or failed."""
        try:
            return bool(self._connection().look("read", _PATIENCE_S, run_id=self.run_id, name="done"))
        except Busy:
            return False

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the end; returns whether the run has ended. Does not raise the run's error: `result` does."""
        deadline = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        while not (done := self.done) and time.monotonic() < deadline:
            time.sleep(min(_LOOK_S, max(0.0, deadline - time.monotonic())))
        return done

    def result(self) -> BackgroundRun:
        """Wait for the end, raise the run's error if it failed, else return the run."""
        self.wait()
        self._call("result")
        return self

    def stop(self, timeout_s: float = 60.0) -> bool:
        """Stop after the current step and wait until the run has ended."""
        if not self.done:
            self._call("interrupt")
        return self.wait(timeout_s)

    def model(self) -> Any:
        """Return the model with the weights of the last committed step, on the CPU.

        Raises:
            WorkerLost: the workers that hold these weights are gone.
        """
        from guava_nb.protocol.messages import Cell
        from guava_nb.replica.model.wrappers import unwrapped
        from guava_nb.spec.cells import build_module, resolve
        from guava_nb.spec.factories import build

        made = self._connection().ask("model", run_id=self.run_id)
        shared = build_module([Cell(name, text) for name, text in made["cells"]]) if made["cells"] else None
        factory = resolve(made["name"], shared)
        model = unwrapped(build("model", made["name"], factory, from_torch=False, args=made["args"]))
        if any(value.is_floating_point() and value.element_size() == 8 for value in made["state"].values()):
            model.double()
        model.load_state_dict(made["state"], assign=True)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name not in made["frozen"])
        return model.train(made["training"])

    def __getattr__(self, name: str) -> Any:
        """What the run there has under this name."""
        if name.startswith("_"):
            raise AttributeError(name)
        if name in self._name.methods:
            return lambda *args, **words: self._call(name, *args, **words)
        return self._connection().ask("read", run_id=self.run_id, name=name)

    def _call(self, name: str, *args: Any, **words: Any) -> Any:
        return self._connection().ask("call", run_id=self.run_id, name=name, args=args, words=words)

    def __dir__(self) -> list[str]:
        """Return what a run offers."""
        return sorted({*self._name.methods, "done", "history", "run_id", "state", "validations", "error", "energy"})

    def __repr__(self) -> str:
        """One line: what and how far."""
        return str(self._call("__repr__"))


class BackgroundFollowed:
    """A run of the background session that a cell shows, see `Followed`."""

    def __init__(self, connection: Callable[[], Connection], number: int) -> None:
        self._connection, self._number = connection, number
        self._latest: News | None = None
        self._lines: tuple[str, ...] = ()
        self._is_over = False

    def wait(self, wait_s: float) -> bool:
        """Wait for so many seconds at most; returns whether it has ended."""
        time.sleep(wait_s)
        self._look()
        return self._is_over

    def news(self) -> News:
        """Return how it stands, and what is new."""
        if self._latest is None:
            self._look(float("inf"))
        assert self._latest is not None
        lines, self._lines = self._lines, ()
        news, self._latest = self._latest, None
        return News(news.run, news.workers, news.notes, lines, news.new_code)

    def interrupt(self, count: int) -> str:
        """Do what the n-th interrupt means; returns the sentence to say."""
        return str(self._connection().ask("interrupt", number=self._number, count=count))

    def _look(self, patience_s: float = _PATIENCE_S) -> None:
        try:
            news, self._is_over = self._connection().look("news", patience_s, number=self._number)
        except Busy:
            return
        self._latest, self._lines = news, self._lines + news.lines
