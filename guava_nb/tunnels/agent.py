"""One process of the ngrok agent, with a private configuration; pyngrok starts it.

pyngrok keeps one process for each path of the program, so ours get a path of their own: nothing of ours is mixed with
what else this kernel does with pyngrok. The token stands in a file that only this user can read, never in an argument.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import shlex
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.request import ProxyHandler, build_opener

import psutil

from guava_nb.errors import ConfigError
from guava_nb.tunnels.agent_program import load_pyngrok, required_agent
from guava_nb.tunnels.ngrok_errors import explain, is_port_in_use, is_unreachable
from guava_nb.tunnels.records import GRACE_S, Record, end_orphans, end_process, open_record
from guava_nb.tunnels.tokens import VARIABLE

__all__ = ["Agent", "start_agent"]

#: Seconds for the agent's start and its endpoint together.
START_S = 25.0
#: Seconds for which it may fail to reach its servers, where it tries for ever.
REACH_S = 10.0
#: Seconds for which what the agent said last is taken for true, and for its answer.
LOOK_S = 0.5
ANSWER_S = 1.0
#: Seconds of silence of a running agent after which it counts as one that does not forward.
SILENT_S = 10.0

_THREAD = "guava-ngrok"
_STDERR = "stderr"
#: One start at a time: the environment is changed for it.
_STARTING = threading.Lock()
_WITHOUT_PROXY = build_opener(ProxyHandler({}))
#: What pyngrok's calls may raise; besides its own errors, those of the request that it does not wrap.
_PROBLEMS = (OSError, HTTPException, ValueError)


# --------------------------------------------------------------------------------------------------------- one process


def start_agent(token: str, proto: str, port: int, given_up: threading.Event, **options: Any) -> Agent:
    """Start an agent with one endpoint that forwards to a port of the loopback.

    What earlier kernels left running is ended first: an account may have few agents at a time.

    Args:
        token: of the account.
        proto: "tcp" or "http".
        port: to forward to.
        given_up: set from another thread, breaks the start off.
        options: of the endpoint, as pyngrok passes them on.

    Raises:
        ConfigError: it cannot; one sentence. Nothing is left running.
    """
    end_orphans("ngrok")
    program = required_agent()
    for attempts_left in (2, 1, 0):
        agent = Agent(program, token)
        try:
            problem = agent.open(f"127.0.0.1:{port}", proto, options, given_up)
        except BaseException:
            agent.end()
            raise
        if problem is None:
            return agent
        agent.end()
        if given_up.is_set():
            raise ConfigError("the tunnel was stopped while it was starting")
        if not attempts_left or not (is_port_in_use(problem, agent.said) or agent.gave_no_reason(problem)):
            raise ConfigError(agent.told(problem))  # without its cause, whose text may hold the token
    raise AssertionError("the last attempt returned or raised")


class Agent:
    """One process of the agent, with one endpoint. Safe to ask from any thread.

    Attributes:
        url: of the endpoint, as told last; "" when it does not forward.
        said: its last words, when it did not start.
    """

    def __init__(self, program: str, token: str) -> None:
        self.url = self.said = ""
        self._pyngrok = load_pyngrok()
        self._program, self._token = program, token
        self._record: Record = open_record("ngrok")
        self._name = f"guava-{self._record.nonce}"
        try:
            self._settings = self._settle()
        except BaseException:  # interrupted, say: the token lies there
            self._record.forget()
            raise
        self._process: Any = None
        self._lines = 0
        self._deadline = 0.0
        self._late = False
        self._lock = threading.Lock()
        self._looked = self._answered = 0.0
        self._thread: threading.Thread | None = None

    def open(
        self, address: str, proto: str, options: dict[str, Any], given_up: threading.Event
    ) -> BaseException | None:
        """Start it and make the endpoint; returns what went wrong, or None.

        pyngrok waits for a line of the agent as long as that takes: so a thread of its own does, and at our deadline
        the agent is ended, which ends the wait too.

        Args:
            address: to forward to, host:port.
            proto: "tcp" or "http".
            options: of pyngrok's `connect`.
            given_up: set from another thread to end the wait.
        """
        outcome: list[BaseException | Any] = []
        _mute()
        self._thread = threading.Thread(
            target=self._connect, args=(outcome, address, proto, options), name=_THREAD, daemon=True
        )
        with _STARTING, _environment():
            self._thread.start()
            self._deadline = time.monotonic() + START_S
            while self._thread.is_alive() and time.monotonic() < self._deadline and not given_up.is_set():
                self._thread.join(0.02)
                if not self._record.pid and (child := self._child()):
                    self._record.hold(child.pid)
            if self._thread.is_alive():
                self._late = True
                self._end_process()
                self._thread.join(GRACE_S)
        if not outcome:
            return TimeoutError("the agent did not end")
        if isinstance(outcome[0], BaseException):
            with contextlib.suppress(OSError):  # pyngrok reads no further once the process has ended
                self.said = (self._record.folder / _STDERR).read_text(encoding="utf-8", errors="replace")
            return outcome[0]
        self._adopt(outcome[0])
        return None

    def _connect(self, outcome: list[Any], address: str, proto: str, options: dict[str, Any]) -> None:
        """What pyngrok does, in a thread of its own."""
        try:
            outcome.append(
                self._pyngrok.ngrok.connect(address, proto, self._name, pyngrok_config=self._settings, **options)
            )
        except (self._pyngrok.exception.PyngrokError, *_PROBLEMS) as problem:
            outcome.append(problem)

    def _adopt(self, tunnel: Any) -> None:
        self.url = str(tunnel.public_url)
        self._process = self._pyngrok.ngrok.get_ngrok_process(self._settings)
        self._record.hold(self._process.proc.pid)
        self._answered = time.monotonic()
        threading.Thread(target=_drain, args=(self._process.proc.stdout,), name=f"{_THREAD}-log", daemon=True).start()

    def gave_no_reason(self, problem: BaseException) -> bool:
        """Whether it ended at once without a word, or pyngrok, which stops reading at its end, missed the last one."""
        return not self._late and explain(problem, self._token, self.said).endswith("unable to start")

    def told(self, problem: BaseException) -> str:
        """One sentence on what stopped the start."""
        if self._late and not self._lines:
            return (
                f"the ngrok agent at {self._program} said nothing for {START_S:g} s and was ended: run "
                f"`{self._program} diagnose` in a terminal, or remove it so that a new one is fetched"
            )
        if self._late and getattr(problem, "ngrok_error", None) is None and not hasattr(problem, "body"):
            return (
                f"the ngrok agent had no session with ngrok's servers after {START_S:g} s and was ended: the network is "
                "very slow, or a VPN or firewall swallows connect.ngrok-agent.com port 443; `ngrok diagnose` tells more"
            )
        if self.gave_no_reason(problem):
            return (
                f"the ngrok agent at {self._program} ended while it was starting and gave no reason (ended for lack of "
                f"memory, or by a virus scanner?): run `{self._program} diagnose` in a terminal, then start again"
            )
        return explain(problem, self._token, self.said)

    # ------------------------------------------------------------------------------------------------- how it stands

    def look(self) -> str:
        """The endpoint's URL now; "" when it does not forward, as far as one can tell within a second."""
        with self._lock:
            if self._process is None or self._process.proc.poll() is not None:
                self.url = ""
                return ""
            now = time.monotonic()
            if now - self._looked >= LOOK_S:
                self._ask(now)
                self._looked = time.monotonic()
            return self.url

    def _ask(self, now: float) -> None:
        """Ask its local interface; silence counts only when it lasts, as a busy machine is slow to answer."""
        try:
            with _WITHOUT_PROXY.open(f"{self._process.api_url}/api/tunnels", timeout=ANSWER_S) as reply:
                told = json.load(reply)
        except _PROBLEMS:
            if now - self._answered > SILENT_S:
                self.url = ""
            return
        self._answered = now
        urls = [entry.get("public_url") for entry in told.get("tunnels") or () if entry.get("name") == self._name]
        self.url = str(urls[0]) if urls and urls[0] else ""

    def end(self) -> None:
        """End the process, and remove its record and its configuration. Safe to call twice."""
        self._end_process()
        thread, deadline = self._thread, time.monotonic() + GRACE_S
        while thread is not None and thread.is_alive() and time.monotonic() < deadline:
            thread.join(0.05)
            self._end_process()  # it may only now have been started
        if thread is not None and not thread.is_alive():  # else that thread holds pyngrok's lock
            self._pyngrok.process.kill_process(self._settings.ngrok_path)
        self._record.forget()
        self.url = ""

    # ------------------------------------------------------------------------------------------------------- details

    def _settle(self) -> Any:
        """Write the configuration, and give pyngrok's settings.

        The older form of both is asked for: pyngrok 8 and 9 and every agent of version 3 know it.
        """
        import yaml

        folder = self._record.folder
        config = folder / "ngrok.yml"
        held = {
            "version": "2",
            "authtoken": self._token,
            "web_addr": f"127.0.0.1:{_free_port()}",
            "console_ui": False,
            "update_check": False,
        }
        descriptor = os.open(config, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            yaml.safe_dump(held, file)
        settings = self._pyngrok.conf.PyngrokConfig(
            ngrok_path=str(_own_program(self._program, folder)),
            config_path=str(config),
            config_version="2",
            startup_timeout=int(START_S),
            request_timeout=START_S,
            monitor_thread=False,
            log_event_callback=self._hear,
            start_new_session=True,  # an interrupted cell signals the kernel's whole process group
        )
        settings.auth_token = (
            None  # taken from the environment by pyngrok, and passed on as an argument that all can read
        )
        return settings

    def _hear(self, log: Any) -> None:
        self._lines += 1
        if log.lvl == "ERROR" and is_unreachable(str(log.err or "")):  # a warning may be about updates
            self._deadline = min(self._deadline, time.monotonic() + REACH_S)

    def _child(self) -> psutil.Process | None:
        """The process that pyngrok has started for us, while it still waits for it."""
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process().children():
                with contextlib.suppress(psutil.Error):
                    if any(str(self._record.folder) in word for word in child.cmdline()):
                        return child
        return None

    def _end_process(self) -> None:
        process = self._record.process() if self._record.pid else self._child()
        if process is not None:
            end_process(process)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _own_program(program: str, folder: Path) -> Path:
    """The program under a path of its own, whose standard error goes into a file beside it.

    There the agent says its last words, and repeats the token that was refused: a kernel would show that in its output.
    """
    own = folder / Path(program).name
    if os.name == "posix" and not os.statvfs(folder).f_flag & getattr(os, "ST_NOEXEC", 0):
        script = f'#!/bin/sh\nexec {shlex.quote(os.path.abspath(program))} "$@" 2>"${{0%/*}}/{_STDERR}"\n'
        own.write_text(script, encoding="utf-8")
        own.chmod(0o700)
        return own
    ways: tuple[Callable[[str, Path], Any], ...] = (os.symlink, os.link, shutil.copy2)
    for way in ways:
        with contextlib.suppress(OSError):
            way(os.path.abspath(program), own)
            return own
    raise ConfigError(f"{program} cannot be copied to {folder}: is that disk full?")


def _drain(stdout: Any) -> None:
    """Read what the agent prints until it ends: it may not be waited for, and a full pipe would stop it."""
    with contextlib.suppress(*_PROBLEMS):
        while stdout.buffer.read1(1 << 16):
            continue
        stdout.close()


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    """What pyngrok and the agent find in the environment at the start.

    pyngrok must not ask the agent on the loopback through a proxy, and the agent takes its token from our file only.
    """
    names = ("no_proxy", VARIABLE)
    before = {name: os.environ.get(name) for name in names}
    proxied = any(os.environ.get(name) for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"))
    if proxied:
        os.environ["no_proxy"] = ",".join(filter(None, [before["no_proxy"] or os.environ.get("NO_PROXY"), "127.0.0.1"]))
    os.environ.pop(VARIABLE, None)
    ours = {name: os.environ.get(name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            if os.environ.get(name) != ours.get(name):
                continue  # another thread set it meanwhile
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


class _NotOurs(logging.Filter):
    """Keeps what the agent says at its start out of the log: we tell it in one sentence, and it may repeat the token."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.threadName != _THREAD


@functools.cache
def _mute() -> None:
    for name in ("pyngrok.ngrok", "pyngrok.process", "pyngrok.process.ngrok"):
        logging.getLogger(name).addFilter(_NotOurs())
