"""This notebook's end of its background session: starting it, finding it again, and the magics that are done there."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from IPython.core.error import UsageError

from guava_nb.cluster.session_file import is_locked_here
from guava_nb.config import DistributedConfig
from guava_nb.config.state_folder import make_private_folder, write_private
from guava_nb.config.units import parse_seconds
from guava_nb.errors import ClusterError, ConfigError, GuavaError
from guava_nb.notebook.background.record import Record, record_path
from guava_nb.notebook.display import choose_ui, say
from guava_nb.notebook.notebook_session import NotebookSession
from guava_nb.notebook.panel.blocking import follow_lines
from guava_nb.notebook.settings import settings_of
from guava_nb.notebook.up import load_torch, session_file
from guava_nb.systems import own_group
from guava_nb.tunnels.records import began_at

if TYPE_CHECKING:
    from guava_nb.notebook.background.connection import Connection
    from guava_nb.notebook.background.values import RunName

__all__ = ["Background"]

#: Seconds that the process gets to begin, and to end.
_START_S, _END_S = 90.0, 60.0
_IDLE_LIMIT = "12h"
_ABOUT_BYTES = 8 << 10  # of what it keeps there at least
#: Magics that are of this kernel, with or without a background session.
_HERE = ("guava_worker", "guava_doctor")
#: What of its environment ties a kernel to the server that started it.
_TIES = ("JPY_PARENT_PID", "JPY_INTERRUPT_EVENT")
_SETTINGS = ("picture", "smoothing", "log_lines")


class Background:
    """Knows whether this notebook is attached to a background session.

    Args:
        session: of this kernel: cells that were shared here, the worker, how runs are shown.
    """

    def __init__(self, shell: Any, session: Callable[[], NotebookSession]) -> None:
        self._shell, self._session_here = shell, session
        self._connection: Connection | None = None

    @property
    def _session(self) -> NotebookSession:
        return self._session_here()

    def takes(self, name: str, args: argparse.Namespace) -> bool:
        """Whether a magic is done in the background session; attaches to one that goes on, or starts it where the line says so.

        Raises:
            UsageError: a session is open in this kernel.
            ClusterError: the process has ended, or does not answer.
        """
        if name in _HERE:
            return False
        if name == "guava_up" and self._connection is not None and not self._is_there(self._connection):
            self.leave()  # it was killed: this line is what any other magic would tell to run
        wants_one = name == "guava_up" and args.background
        if self._session.is_open:
            if wants_one:
                raise UsageError(
                    "a session is open in this kernel, and stays here: %guava_down first, then %guava_up --background"
                )
            return False
        if self._connection is None:
            self._find(name, wants_one, args)
        elif name == "guava_up" and args.idle_limit is not None:
            say(
                "The background session is open already, so --idle-limit did not change; %guava_down first, then %guava_up."
            )
        return self._connection is not None

    def _is_there(self, line: Connection) -> bool:
        """Whether the process answers, or its end is no answer: one that was killed a moment ago is still listed."""
        try:
            line.ask("hello", shown=False)
        except ClusterError:
            if line.record.lives:
                raise
        return line.record.lives

    def _find(self, name: str, wants_one: bool, args: argparse.Namespace) -> None:
        path = record_path()
        record = Record.read(path)
        if record is not None and record.ended and name == "guava_up":
            say(record.ended)
            path.unlink(missing_ok=True)
        if record is not None and record.lives:
            if name != "guava_share":  # its cells are shared there as soon as another magic finds the session
                self._attach(record)
        elif wants_one:
            limit_s = parse_seconds(args.idle_limit or _IDLE_LIMIT)
            say("Starting the background session; this takes some seconds.")
            self._attach(*_started(path, limit_s))
        elif name == "guava_up" and args.idle_limit is not None:
            raise UsageError("%guava_up: --idle-limit needs --background")

    def _attach(self, record: Record, is_new: bool = False) -> None:
        load_torch()
        from guava_nb.notebook.background.connection import Connection

        self._connection = Connection(record, self._shell, self._run_of)
        run = self._connection.ask("hello")["run"]
        if not is_new:
            what = (
                "no run was started in it"
                if run is None
                else (
                    f"{run.run_id} is {run.state}, step {run.step} (run = %guava_status --follow shows it and gives the run)"
                )
            )
            since = time.strftime("%H:%M", time.localtime(record.since))
            say(f"This notebook is attached to its background session (pid {record.pid}, since {since}): {what}.")
        for name, (text, with_workers) in self._session.cells.texts().items():
            try:
                self._connection.ask("share", shown=False, name=name, text=text, with_workers=with_workers)
            except (GuavaError, UsageError) as error:
                say(f"Cell {name} is not in the background session: {error}")

    def _run_of(self, name: RunName) -> Any:
        from guava_nb.notebook.background.background_run import BackgroundRun

        return BackgroundRun(self._line, name)

    def _line(self) -> Connection:
        """The connection of now.

        Raises:
            ClusterError: the session was closed.
        """
        if self._connection is None:
            raise ClusterError(
                "the background session of this run is closed, and its runs with it; what was saved of them is in their files "
                "(%guava_resume FILE)"
            )
        return self._connection

    def magic(self, magics: Any, name: str, args: argparse.Namespace, cell: str | None) -> Any:
        """Do a magic in the background session."""
        line = self._line()
        try:
            do = getattr(self, f"_{name.removeprefix('guava_')}", None)
            return self._there(magics, name, args, cell) if do is None else do(magics, args, cell)
        except BaseException:
            if not line.record.lives:
                self.leave()
            raise

    def leave(self) -> None:
        """Let go of the session, which goes on."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    # ------------------------------------------------------------------------------------------------------ magics

    def _there(self, magics: Any, name: str, args: argparse.Namespace, cell: str | None = None) -> Any:
        """Do it there as if its line stood in a cell there, and set here the variables that it set."""
        told = self._line().ask("magic", name=name, args=_plain(args), cell=cell, look=self._look())
        self._shell.user_ns.update(told["set"])
        if name in ("guava_energy", "guava_train"):
            magics.objects.shown(told["value"])
        return told["value"]

    def _look(self) -> dict[str, Any]:
        settings = settings_of(self._shell)
        return {"ui": choose_ui(self._shell), **{name: getattr(settings, name) for name in _SETTINGS}}

    def _share(self, magics: Any, args: argparse.Namespace, cell: str | None) -> None:
        if args.forget is not None:
            say(self._line().ask("forget", name=args.forget))
            self._session.cells.drop(args.forget)
            return
        name = self._session.share(args.name, cell, not args.background)
        self._line().ask("share", shown=False, name=name, text=cell, with_workers=not args.background)
        say(f"Cell {name} is in the background session{'' if args.background else ' and shared'}.")

    def _train(self, magics: Any, args: argparse.Namespace, cell: str | None) -> Any:
        from guava_nb.notebook.background.background_run import BackgroundFollowed

        if args.dry_run:
            return self._there(magics, "guava_train", args)
        told = self._line().ask("train", args=_plain(args), look=self._look())
        run, followed = told["run"], BackgroundFollowed(self._line, told["number"])
        if args.out is not None:
            self._shell.user_ns[args.out] = run
        self._session.watch_or_leave(followed, run, args, magics.panel())
        if not args.detach:
            magics.objects.shown(run)
        return run

    def _status(self, magics: Any, args: argparse.Namespace, cell: str | None) -> Any:
        found = self._newest() if args.follow else None
        if found is not None:
            return magics.followed(found[1], found[0])
        args.follow = False
        return self._there(magics, "guava_status", args)

    def _newest(self) -> tuple[Any, Any] | None:
        from guava_nb.notebook.background.background_run import BackgroundFollowed

        told = self._line().ask("follow")
        return None if told is None else (told["run"], BackgroundFollowed(self._line, told["number"]))

    def _log(self, magics: Any, args: argparse.Namespace, cell: str | None) -> None:
        is_followed, args.follow = args.follow, False
        self._there(magics, "guava_log", args)
        found = self._newest() if is_followed else None
        if found is not None:
            run, followed = found
            begin = "" if args.worker is None else f"{args.worker} | "
            follow_lines(
                lambda: [line for line in followed.news().lines if line.startswith(begin)], lambda: not run.done
            )

    def _down(self, magics: Any, args: argparse.Namespace, cell: str | None) -> None:
        record = self._line().record
        try:
            self._line().ask("down")
        finally:
            self.leave()
        deadline = time.monotonic() + _END_S
        while record.lives and time.monotonic() < deadline:
            time.sleep(0.05)
        if record.lives:
            raise ClusterError(
                f"the session is closed, and its process (pid {record.pid}) still runs after {_END_S:.0f} s: end it by "
                "that number, then %guava_up"
            )
        say("The background session is closed. %guava_up opens a new one in this kernel, with --background beside it.")


def _plain(args: argparse.Namespace) -> dict[str, Any]:
    """The options of a line, but for those of the background session itself."""
    return {name: value for name, value in vars(args).items() if name not in ("_given", "background", "idle_limit")}


def _started(path: Path, idle_limit_s: float) -> tuple[Record, bool]:
    """Start the process and wait until it serves, unless another notebook has just done so; returns which, and whether it is new.

    Raises:
        ClusterError: it has ended, or does not serve in time; with the end of what it wrote.
        ConfigError: the folder in which it is found cannot be written.
    """
    try:
        make_private_folder(path.parent)
        with path.with_suffix(".background.lock").open("ab") as lock:
            until = time.monotonic() + _START_S
            while not is_locked_here(lock) and time.monotonic() < until:  # it ends with its process, so this does
                time.sleep(0.1)
            record = Record.read(path)
            if record is not None and record.lives:
                return record, False
            write_private(probe := path.with_suffix(".background.probe"), bytes(_ABOUT_BYTES))  # a full disk, told here
            probe.unlink()
            return _start(path, idle_limit_s), True
    except OSError as problem:
        raise ConfigError(
            f"a background session is found by a file in {path.parent}, which cannot be written "
            f"({problem.strerror or problem}): make room there, or set XDG_STATE_HOME to a folder on another disk"
        ) from problem


def _start(path: Path, idle_limit_s: float) -> Record:
    environment = {name: value for name, value in os.environ.items() if name not in _TIES}
    if not DistributedConfig.load().session_file:
        environment["GUAVA_SESSION_FILE"] = str(session_file())
    log = path.with_suffix(".background.log")
    start: dict[str, Any] = {"record": str(path), "idle_limit_s": idle_limit_s}
    path.unlink(missing_ok=True)
    start |= {"path": sys.path, "starter": (os.getpid(), began_at(psutil.Process()))}
    words = [sys.executable, "-m", "guava_nb.notebook.background.process", json.dumps(start)]
    with os.fdopen(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as output:
        process = subprocess.Popen(
            words,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            **own_group(CREATE_NO_WINDOW=True),
        )
    deadline = time.monotonic() + _START_S
    while (record := Record.read(path)) is None:
        if process.poll() is not None or time.monotonic() > deadline:
            how = (
                f"ended with status {process.returncode}"
                if process.returncode is not None
                else f"did not answer within {_START_S:g} s"
            )
            process.kill()
            process.wait()
            last = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-5:])
            raise ClusterError(
                f"the background session {how} after it was started, so none is open; all that it wrote lies in {log}:\n{last}"
            )
        time.sleep(0.05)
    process.returncode = 0  # it is left alone: this kernel does not wait for it when it ends
    return record
