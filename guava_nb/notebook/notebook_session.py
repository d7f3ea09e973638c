"""The one object behind all magics of a notebook: at most one orchestrator, at most one worker, the shared cells.

Holds no network and no training of its own; every method is a few calls into `Orchestrator`, `Run` and `WorkerHandle`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from IPython.core.error import UsageError

from guava_nb.config import DistributedConfig
from guava_nb.notebook.completion import complete_by_dir
from guava_nb.notebook.display import ask_hidden, can_ask, choose_ui, say
from guava_nb.notebook.host import detect_host
from guava_nb.notebook.join_code import cell_to_paste, reach_note
from guava_nb.notebook.line_words import in_a_folder, near
from guava_nb.notebook.lines import LineTail, Notices, WorkerLines
from guava_nb.notebook.mode import mode_arguments, mode_sentence
from guava_nb.notebook.own_worker import OwnWorker
from guava_nb.notebook.panel.following import Followed, Following, follow, show_code
from guava_nb.notebook.panel.panel import Panel
from guava_nb.notebook.px.remote_code import RemoteCode
from guava_nb.notebook.results.runs import Runs
from guava_nb.notebook.shared_cells import SharedCells
from guava_nb.notebook.train import check_variable, loaded_text, training_arguments
from guava_nb.notebook.up import (
    LocalWorkers,
    cautions,
    dial_workers,
    first_settings,
    goes_on_notes,
    held_run,
    look_at_tunnel,
    lost_run,
    new_orchestrator,
    orchestrator_settings,
    start_elsewhere,
    start_worker,
)
from guava_nb.notebook.validate_predict import predict, validate
from guava_nb.notebook.wait_for_workers import wait_for_workers
from guava_nb.protocol.joincode import JoinCode
from guava_nb.render import View, session_view

__all__ = ["NotebookSession"]

#: Settings of the orchestrator by the option that gives them.
_FLAGS = {
    "master_ip": "--host", "master_port": "--port", "num_workers": "--workers", "tls": "--no-tls",
    "compression": "--compression", "prefetch_bytes": "--prefetch-mb",
}  # fmt: skip
DETACHED = (
    "Training goes on since {}: %guava_status --follow shows it live here, and how it ended; guava status --web does so in a "
    "terminal, on a page of its own. %guava_stop ends it."
)
_NO_SESSION = "no session is open here: run %guava_up first"


class NotebookSession:
    """What this notebook takes part in. The factories are the two objects' own; tests give others."""

    def __init__(
        self,
        shell: Any,
        new_orchestrator: Callable[..., Any] = new_orchestrator,
        start_worker: Callable[..., Any] = start_worker,
    ) -> None:
        self._shell = shell
        self._new_orchestrator = new_orchestrator
        self.worker = OwnWorker(shell, start_worker)
        self.cells = SharedCells(shell)
        self.code = RemoteCode(shell, self._need_session)
        self.runs = Runs(self._need_session)
        self._orchestrator: Any = None
        self._settings: dict[str, Any] = {}
        self._local: LocalWorkers | None = None
        self._mode: dict[str, Any] = {}
        self._model: tuple[Any, ...] = (None,)  # of the last run
        self._waits_anew = False  # for all workers, though a run was here: their number was changed since

    # ------------------------------------------------------------------------------------------------ orchestrator

    @property
    def is_open(self) -> bool:
        """Whether an orchestrator listens; one that was closed from Python counts as gone."""
        return self._orchestrator is not None and self._orchestrator.status().state == "open"

    def open(self, args: argparse.Namespace) -> list[str]:
        """Open the session, or keep the open one, see to its tunnel, and start the local workers still missing.

        Returns:
            Sentences on what was not done as asked.
        """
        settings = orchestrator_settings(args)
        for caution in cautions(args, detect_host(self._shell), 0 if self._local is None else len(self._local)):
            say(caution)
        notes = self._new_settings(settings) if self.is_open else []
        if not self.is_open:
            ask, listens = self._token_prompt(), args.connect is None or args.local or args.tunnel
            ask = look_at_tunnel(args.tunnel, ask) if listens else None
            orchestrator = self._new_orchestrator(**{**first_settings(args), **settings})
            if listens:
                orchestrator.open(args.tunnel, ask)
            self._orchestrator, self._settings, self._local = orchestrator, settings, LocalWorkers(orchestrator)
            self._apply_mode()  # one that was chosen before, which the panel shows from now on
            notes += goes_on_notes(orchestrator, args.local or 0)
            notes += self.cells.share_all(orchestrator)
        elif self.has_code or args.tunnel:  # a tunnel that is down is started, or another one
            self._orchestrator.open(args.tunnel, self._token_prompt())
        notes += dial_workers(self._orchestrator, args.connect, self._shell)
        notes += start_elsewhere(self._orchestrator, args, say)
        if self._local is not None:
            self._local.start(args.local or 0, say)
        return notes

    def _token_prompt(self) -> Callable[[], str] | None:
        if not can_ask(self._shell):
            return None
        return lambda: ask_hidden("Authtoken of ngrok (it is shown and kept nowhere): ", self._shell)

    @property
    def has_code(self) -> bool:
        """Whether this session listens, so that there is a code to hand out."""
        return bool(self._orchestrator.status().address)

    @property
    def tunnel_note(self) -> str:
        """What has to be done so that workers get through the tunnel; "" for nothing."""
        note = str(self._orchestrator.status().tunnel_note)
        return f"First: {note}." if note else ""

    @property
    def reach_note(self) -> str:
        """Which machines can use the join code, where not all can; "" for nothing to say."""
        return reach_note(self._orchestrator)

    def worker_code(self, words: list[str]) -> JoinCode:
        """Return the join code for the worker of this notebook, from its line, the environment or a person.

        Raises:
            UsageError: there is none, or it is of this notebook's own session.
            JoinCodeError: it is damaged.
        """
        code = self.worker.code(words)
        if self.is_open and self.has_code and code.secret == JoinCode.decode(self.join_code()).secret:
            raise UsageError(
                "this code is of this notebook's own session, and a notebook cannot train and work at one time: %guava_up "
                "--local 1 starts a worker on this machine; paste the code in another notebook"
            )
        return code

    def _code_now(self) -> str:
        return self.join_code() if self.has_code else ""

    def join_code(self) -> str:
        """The secret itself."""
        return str(self._orchestrator.join_code.encode())

    def cell_to_paste(self) -> str:
        """What makes another notebook a worker of this session. Holds the secret."""
        return cell_to_paste(self._orchestrator)

    @property
    def is_local_only(self) -> bool:
        """Whether every worker that is here or expected was started here: then no one needs the code."""
        return self._local is not None and self._local.are_all and not self._orchestrator.status().tunnel

    def share(self, given_name: str | None, text: str | None, with_workers: bool = True) -> str:
        """Run a cell here and share it; before %guava_up it waits for the session. Returns its name.

        Args:
            given_name: None takes the cell's id.
            text: of the cell.
            with_workers: else it is for this process and a background session only.

        Raises:
            UsageError: there is no cell, or it failed here.
        """
        if text is None:
            raise UsageError(
                "%guava_share has no cell to share: write %%guava_share, with two percent signs, as the first line of a cell, "
                "and below it what the workers need"
            )
        return self.cells.share(given_name, text, self._orchestrator if self.is_open else None, with_workers)

    def forget(self, name: str, alone: bool) -> str:
        """Share a cell no longer, from the next run on; returns the sentence to say.

        Raises:
            UsageError: no cell has this name, or the option did not stand alone.
        """
        if not alone:
            raise UsageError("--forget stands alone on a line: %guava_share --forget NAME")
        self.cells.forget(name, self._orchestrator if self.is_open else None)
        return f"Cell {name} is shared no longer; what it defined stays in this notebook."

    def choose_mode(self, args: argparse.Namespace) -> str:
        """Choose the mode of the next runs, if the line names one; returns a sentence on the mode that holds now.

        Raises:
            UsageError: an option does not fit the mode.
        """
        chosen = mode_arguments(args)
        self._mode = chosen or self._mode
        if not self.is_open:
            mode = self._mode.get("mode") or DistributedConfig.load().mode()
            return (
                f"Mode {mode}; %guava_up opens a session, and %guava_train shares the work among the workers it finds."
            )
        self._apply_mode()
        here = sum(worker.state in ("ready", "working") for worker in self._orchestrator.status().workers)
        local = 0 if self._local is None else len(self._local)
        run = self._orchestrator.run if chosen else None
        going = "" if run is None or run.done else run.run_id
        return mode_sentence(self._orchestrator.config, here or None, self._mode.get("mode"), local, going)

    def _apply_mode(self) -> None:
        if self._mode:
            self._orchestrator.set_mode(**self._mode)

    def train(self, args: argparse.Namespace, panel: Panel) -> Any:
        """Start a run; unless detached, block until it ended and raise its error if it failed. Returns the run."""
        following = self.start_run(args, panel)
        self.watch_or_leave(following, following.run, args, panel)
        return following.run

    def start_run(self, args: argparse.Namespace, panel: Panel) -> Following:
        """Start a run as a line says; returns what follows it, from before its start."""
        orchestrator, names = self._need_session(), self._shell.user_ns
        if orchestrator.run is not None and not orchestrator.run.done:
            raise UsageError("a run is going on; %guava_status shows it, %guava_stop ends it")
        arguments = self._arguments(args)
        if args.resume == "session" and orchestrator.run is None and (lost := lost_run(orchestrator)):
            raise UsageError(f"--resume session: {lost}")
        if args.resume is None and not args.fresh and args.weights is None and (held := held_run(orchestrator)):
            raise UsageError(held)
        # Before workers are waited for.
        orchestrator.check_training(**arguments, model=args.model, model_args=args.model_args)
        self._gather(self._shown_codes(), panel, last=args.detach)
        self._apply_mode()
        orchestrator.register_model(args.model, args.model_args or {})
        following = Following(orchestrator, self.new_codes())
        # Building the model may take long. Lines of text stay, so that there a mistake would be two.
        is_drawn = not args.detach and choose_ui(self._shell) not in ("text", "none")
        if is_drawn:
            panel.update(lambda: (View("preparing", ""), ()))
        try:
            following.run = orchestrator.start_training(**{**arguments, "detach": True})
        except BaseException:
            orchestrator.register_model(*self._model)  # nothing was trained: what validates and predicts stays
            _show_not_started(panel, is_drawn)
            raise
        self._model = (args.model, args.model_args or {})
        complete_by_dir(type(following.run))
        if args.out is not None:
            names[args.out] = following.run
        return following

    def watch_or_leave(self, followed: Followed, run: Any, args: argparse.Namespace, panel: Panel) -> None:
        """Show a run to its end and raise what it raised; where the line detaches it, say how it goes on."""
        if args.detach:
            self.runs.leave_alone(run)
            say("\n".join([*followed.news().notes, DETACHED.format(time.strftime("%H:%M:%S"))]))
            return
        follow(followed, panel, choose_ui(self._shell))
        if run.status().state == "failed":
            run.result()

    def forecast(self, args: argparse.Namespace) -> Any:
        """The forecast of what the run of such a line would send and receive, also as -o; nothing is started."""
        orchestrator, arguments = self._need_session(), self._arguments(args)
        self._apply_mode()
        forecast = orchestrator.forecast(**arguments, model=args.model, model_args=args.model_args)
        if args.out is not None:
            self._shell.user_ns[args.out] = forecast
        return forecast

    def _arguments(self, args: argparse.Namespace) -> dict[str, Any]:
        """Keyword arguments for a run, checked as far as this notebook can."""
        arguments = training_arguments(args, self._shell.user_ns)
        check_variable(args.out, "--out")
        self.cells.check(args)
        return arguments

    def validate(self, args: argparse.Namespace, panel: Panel) -> Any:
        """Loss, accuracy, number of samples and metrics on a loader of the notebook."""
        return validate(self._asked(args), args, self._shell.user_ns, panel, self._shown_codes())

    def predict(self, args: argparse.Namespace, panel: Panel) -> Any:
        """Results of a prediction on a loader of the notebook."""
        names, ui = self._shell.user_ns, choose_ui(self._shell)
        return predict(self._asked(args), args, names, panel, self._shown_codes(), ui)

    def newest_run(self) -> Any:
        """The newest run, also while it goes on.

        Raises:
            UsageError: nothing was trained in this session.
        """
        self._need_session()
        if (run := self.newest_run_or_none()) is None:
            raise UsageError("no run was started in this session yet: %guava_train starts one")
        return run

    def save(self, path: str) -> Path:
        """Write a checkpoint; returns where it lies."""
        return Path(self._need_session().save_checkpoint(in_a_folder(path, "%guava_save")))

    def resume(self, args: argparse.Namespace) -> str:
        """Load a checkpoint; returns the sentence on it."""
        source = Path(args.path).expanduser()
        orchestrator = self._asked(args)
        notices = Notices(orchestrator)
        return "\n".join([loaded_text(source, orchestrator.load_checkpoint(source)), *notices.latest()])

    def log(self, worker: str | None, num_lines: int) -> list[str]:
        """Last lines of one worker or of all; in a worker's notebook, of that worker."""
        if not self.is_open and self.worker.exists:
            return self.worker.lines()[-num_lines:]
        orchestrator = self._need_session()
        known = self.worker_names()
        if worker is not None and worker not in known:
            listed = ", ".join(known) or "none has joined"
            raise UsageError(f"no worker is called {worker}{near(worker, known) or '.'} Workers: {listed}")
        return list(orchestrator.log(worker=worker, n=num_lines))

    def new_lines(self, worker: str | None) -> Callable[[], list[str]]:
        """A function that gives what was printed since its last call, by one worker or all."""
        if not self.is_open and self.worker.exists:
            return LineTail(self.worker.lines, self.worker.lines()).new
        orchestrator = self._need_session()
        if worker is None:
            return WorkerLines(orchestrator).new
        return LineTail(lambda: orchestrator.log(worker=worker), orchestrator.log(worker=worker)).new

    def is_at_work(self) -> bool:
        """Whether a run goes on here, or this notebook's worker lives."""
        run = self.newest_run_or_none()
        return (run is not None and not run.done) or self.worker.lives

    def worker_names(self) -> list[str]:
        """Names of all workers the orchestrator knows, for messages and completion."""
        return [worker.name for worker in self._orchestrator.status().workers] if self.is_open else []

    def views(self, with_tunnel: bool = True) -> list[View]:
        """What there is to show: the session, the worker of this notebook, both, or nothing.

        Args:
            with_tunnel: with what has to be done for its tunnel.
        """
        views = []
        if self.is_open:
            status = self._orchestrator.status()
            views = [session_view(status if with_tunnel else replace(status, tunnel_note=""))]
        return views + ([self.worker.view()] if self.worker.exists else [])

    def stop(self) -> str:
        """Stop the run that goes on, or let this notebook's worker leave; returns the sentence on it."""
        if self.is_open and self._orchestrator.run is not None and not self._orchestrator.run.done:
            return Following(self._orchestrator, lambda: None).interrupt(1)
        if self.worker.lives:
            self.worker.leave()
            return "The worker leaves after its step; %guava_down ends it at once."
        return "Nothing is running here."

    def close(self) -> bool:
        """End everything this notebook started; True if there was something. Both ends are tried even if one fails."""
        orchestrator, self._orchestrator, self._local, self._model = self._orchestrator, None, None, (None,)
        try:
            had_worker = self.worker.close()
        finally:
            if orchestrator is not None:
                orchestrator.close()
                self.runs.session_closed()
        return orchestrator is not None or had_worker

    # ----------------------------------------------------------------------------------------------------- private

    def _need_session(self) -> Any:
        if not self.is_open:
            raise UsageError(_NO_SESSION)
        return self._orchestrator

    def _asked(self, args: argparse.Namespace) -> Any:
        """The orchestrator, with the model of the line registered if the line names one."""
        orchestrator = self._need_session()
        if args.model is None and args.model_args is not None:
            raise UsageError("--model-args needs --model")
        self.cells.check(args)
        if args.model is not None:
            orchestrator.register_model(args.model, args.model_args or {})
        return orchestrator

    def _new_settings(self, settings: dict[str, Any]) -> list[str]:
        """Take those of an open session that can change; returns sentences on what changed, and on what did not."""
        count, before = settings.get("num_workers"), self._orchestrator.expected_workers
        notes = []
        if count is not None and count != before:
            self._orchestrator.expect_workers(count)
            self._settings["num_workers"] = count
            self._waits_anew = True
            notes.append(f"The next run waits for {count} worker{'' if count == 1 else 's'}, before for {before}.")
        return notes + self._refused_settings(settings)

    def _refused_settings(self, settings: dict[str, Any]) -> list[str]:
        now = {"num_workers": self._orchestrator.expected_workers, **self._settings}
        changed = sorted(_FLAGS[name] for name, value in settings.items() if now.get(name) != value)
        if not changed:
            return []
        return [
            f"The session is open already, so {', '.join(changed)} did not change; %guava_down first, then %guava_up."
        ]

    def _gather(self, new_code: Callable[[], None], panel: Panel, last: bool) -> None:
        """Before the first run wait for all expected workers; later runs take who is there, and wait only for a first one."""
        count = None if self._orchestrator.run is None or self._waits_anew else 1
        cell = self.cell_to_paste() if self.has_code and not self.is_local_only else ""
        wait_for_workers(self._orchestrator, count, cell, choose_ui(self._shell), panel, last, new_code)
        self._waits_anew = False

    def new_codes(self) -> Callable[[], tuple[str, str] | None]:
        """A function that gives the cell to paste, and what its tunnel needs, where the code has changed since its last call."""
        known = self._code_now()

        def changed() -> tuple[str, str] | None:
            nonlocal known
            if (now := self._code_now()) == known:
                return None
            known = now
            return self.cell_to_paste(), self.tunnel_note

        return changed

    def _shown_codes(self) -> Callable[[], None]:
        codes = self.new_codes()
        return lambda: show_code(codes(), choose_ui(self._shell))

    def newest_run_or_none(self) -> Any:
        """The newest run, also while it goes on; None where there is none."""
        return self._orchestrator.run if self.is_open else None

    def newest_followed(self) -> Following | None:
        """What follows the newest run from now on; None where there was none here."""
        return None if self.newest_run_or_none() is None else Following(self._orchestrator, self.new_codes())

    def follow_run(self, followed: Followed, run: Any, panel: Panel) -> Any:
        """Watch a run until it has ended or the cell is interrupted, which leaves the run alone; returns the run.

        Args:
            followed: gives its news.
            run: its handle.
            panel: shows it.
        """
        follow(followed, panel, choose_ui(self._shell), may_leave=True)
        if run.done:
            self.runs.leave_alone(None)
        return run


def _show_not_started(panel: Panel, is_drawn: bool) -> None:
    if is_drawn:  # "preparing" would stay above the error
        panel.finish(lambda: (View("not started", ""), ()))
    panel.close()
