"""A tunnel through any host that the user has ssh to: `ssh -R`, by the system's own ssh with the user's own settings."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from guava_nb.errors import ConfigError
from guava_nb.systems import own_group
from guava_nb.tunnels.records import end_orphans, remember
from guava_nb.tunnels.registry import split_host
from guava_nb.tunnels.ssh_words import (
    FORWARDING_REFUSED,
    Asked,
    forwarded_port,
    is_chatter,
    refused_forwarding,
    why_not,
)
from guava_nb.tunnels.tunnel import LOOPBACK, Address, Tunnel

__all__ = ["SshTunnel"]

#: For the name, the connection, the keys and the forwarding together.
START_S = 30.0
CONNECT_S = 15
#: A dead line is noticed after three unanswered questions.
ALIVE_EVERY_S, ALIVE_COUNT = 5, 3
#: For one try whether others reach the port.
TRY_S = 4.0
END_S = 3.0
#: What the user's ssh config must not turn into something else. The host's key is checked as the user has it.
OPTIONS = {
    "BatchMode": "yes",  # no person can type a password here
    "ExitOnForwardFailure": "yes",
    "ConnectTimeout": str(CONNECT_S),
    "ServerAliveInterval": str(ALIVE_EVERY_S),
    "ServerAliveCountMax": str(ALIVE_COUNT),
    "ControlMaster": "no",  # a shared connection would keep the port after this process ended
    "ControlPath": "none",
    "PermitLocalCommand": "no",
    "ForwardAgent": "no",
    "LogLevel": "DEBUG1",  # less does not tell that a port of one's own choice is forwarded
}


class SshTunnel(Tunnel):
    """A port of an SSH server, forwarded to this machine.

    Args:
        what: `[USER@]HOST[:PORT]`: an entry of ~/.ssh/config or a name, and the port to listen on there; without one the
            server chooses, and the same is asked for when the tunnel is started again.
        options: further words for ssh, such as ("-F", "file") or ("-p", "2222").

    Raises:
        ConfigError: `what` names no host.
    """

    name = "ssh"

    def __init__(self, what: str, options: Sequence[str] = ()) -> None:
        user, at, host = what.strip().rpartition("@")
        if not host or what.startswith("-") or host.startswith("-"):
            raise ConfigError(
                'the tunnel "ssh" needs a host that you have ssh to: ssh:me@lab.example or an entry of ~/.ssh/config'
            )
        name, self._wanted = split_host(host, "ssh:[USER@]HOST[:PORT]")
        self._target = f"{user}{at}{name}"
        self._options = tuple(options)
        self._lock = threading.Lock()
        self._stops = 0
        self._client: _Client | None = None
        self._to = 0  # the port here
        self._before = 0  # the port there, of the last time
        self._at: Address | None = None
        self._note = ""

    def __repr__(self) -> str:
        return f"SshTunnel({self._target}, {self._at or 'not started'})"

    def start(self, port: int) -> Address:
        """Let the server listen for this machine; see `Tunnel.start`."""
        with self._lock:
            if self._at is not None and self._to == port and self.alive():
                return self._at
            self._end()
            stops = self._stops
            until = time.monotonic() + START_S
            server = self._server()
            host = server.host
            end_orphans(self.name)
            client = self._forward(host, port, until)
            if stops != self._stops:  # `stop` came in between
                client.stop()
                raise ConfigError("the ssh tunnel was stopped while it was started")
            self._client, self._to, self._before = client, port, client.port
            self._at, self._note = self._reach(server, client.port)
            atexit.register(self.stop)
            return self._at

    def stop(self) -> None:
        """End ssh; a start that is under way gives up."""
        self._stops += 1
        client = self._client
        if client is not None:
            client.stop()
        with self._lock:
            self._end()

    def _end(self) -> None:
        client, self._client, self._at, self._note = self._client, None, None, ""
        if client is not None:
            client.stop()
        atexit.unregister(self.stop)

    def alive(self) -> bool:
        """Whether ssh runs; it ends when the server does not answer for a quarter of a minute."""
        client = self._client
        return client is not None and self._at is not None and client.forwards

    def address(self) -> Address | None:
        """Where the server listens, or where workers do with an ssh of their own (see `note`)."""
        return self._at if self.alive() else None

    def note(self) -> str:
        """What to do where the server's port is not reached from outside."""
        return self._note

    # ------------------------------------------------------------------------------------------------------- the server

    def _server(self) -> _Server:
        """What is behind the user's own name for it."""
        done = self._run("-G", "--", self._target)
        words = [line.partition(" ") for line in done.stdout.splitlines()]
        found = {name: value.strip() for name, _, value in reversed(words)}
        if done.returncode or "hostname" not in found:
            raise ConfigError(why_not(done.stderr.splitlines(), Asked(self._target, 0)))
        return _Server(found["hostname"], found.get("user", ""), found.get("port", "22"))

    def _run(self, *words: str) -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run(
                [_program(), *self._options, *words], stdin=subprocess.DEVNULL, capture_output=True, text=True,
                encoding="utf-8", errors="replace", timeout=START_S, check=False,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as problem:
            raise ConfigError(f"ssh cannot be run: {problem}") from problem

    def _forward(self, host: str, port: int, until: float) -> _Client:
        """Start ssh; on the port of the last time if that is free, so that the address stays.

        Raises:
            ConfigError: it ended, or did not come to it in time.
        """
        wanted = self._wanted or self._before
        if wanted and _answers(host, wanted) is None:
            # Another program has it on one kind of address, and sshd would be content with the other kind.
            if self._wanted:
                raise ConfigError(why_not([FORWARDING_REFUSED], Asked(self._target, wanted)))
            wanted = 0
        client = self._try(wanted, port, until)
        if not client.forwards and wanted and not self._wanted and refused_forwarding(client.lines):
            wanted = 0
            client = self._try(wanted, port, until)
        if client.forwards:
            return client
        if client.late:
            raise ConfigError(
                f"ssh to {self._target} did not forward a port within {START_S:g} s; try it by hand: ssh {self._target}"
            )
        forbidden = wanted and refused_forwarding(client.lines) and not self._may_forward(port, until)
        raise ConfigError(why_not(list(client.lines), Asked(self._target, 0 if forbidden else wanted)))

    def _try(self, wanted: int, port: int, until: float) -> _Client:
        client = self._client = _Client(self._words(wanted, port))
        if not client.wait(until):
            client.stop()
        return client

    def _may_forward(self, port: int, until: float) -> bool:
        """Whether the server forwards any port at all: its refusal does not tell."""
        client = self._try(0, port, until)
        client.stop()
        return not refused_forwarding(client.lines)

    def _words(self, wanted: int, port: int) -> list[str]:
        options = [word for name, value in OPTIONS.items() for word in ("-o", f"{name}={value}")]
        where = f"*:{wanted}:{LOOPBACK}:{port}"
        return [_program(), *self._options, "-N", "-T", "-x", *options, "-R", where, "--", self._target]

    def _reach(self, server: _Server, port: int) -> tuple[Address, str]:
        """Try whether others come to the port; the address to dial, and what has to be done for it."""
        host = server.host
        command = f"ssh -N -L {port}:{LOOPBACK}:{port} {server.words}"
        by_hand = f"on each worker's machine run  {command}  before the worker starts, and leave it running"
        problem = _answers(host, port)
        if isinstance(problem, ConnectionRefusedError):
            return Address(LOOPBACK, port), (
                f"{self._target} forwards port {port} for itself only (GatewayPorts is off there, as it is by default). So "
                f"{by_hand}: the join code leads to that. Or ask its administrator to write 'GatewayPorts clientspecified' into "
                "its sshd_config and to reload sshd, then %guava_down and %guava_up: the code then leads there directly"
            )
        if problem is not None:
            return Address(host, port), (
                f"from here {host}:{port} does not answer ({problem}): if workers do not reach it either, a firewall is in the "
                f"way. Open that port there, or choose one that is open (ssh:{self._target}:PORT)"
            )
        return Address(host, port), ""


def _answers(host: str, port: int) -> OSError | None:
    """Try to connect; returns what is in the way, None when a connection opens."""
    try:
        socket.create_connection((host, port), TRY_S).close()
    except OSError as problem:
        return problem
    return None


def _program() -> str:
    found = shutil.which("ssh")
    if found is None:
        raise ConfigError(
            "there is no ssh on this machine: install OpenSSH's client (apt install openssh-client; on Windows: Settings, "
            "Optional features, OpenSSH Client), or take another tunnel"
        )
    return found


class _Server(NamedTuple):
    """An SSH server as any machine can name it."""

    host: str
    user: str
    port: str

    @property
    def words(self) -> str:
        """For the command line of ssh, without the names of this machine's ~/.ssh/config."""
        port = "" if self.port == "22" else f"-p {self.port} "
        return f"{port}{self.user}{'@' if self.user else ''}{self.host}"


class _Client:
    """One ssh process, and what it says. In a process session of its own: an interrupted cell must not end it.

    Attributes:
        port: that is forwarded, 0 until it is.
        ended: it is gone.
        late: it did neither in the time that `wait` was given.
        lines: the last ones that are no chatter.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self.port = 0
        self.ended = self.late = False
        self.lines: deque[str] = deque(maxlen=40)
        self._news = threading.Condition()
        self._owner = os.getpid()
        try:
            self._process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                encoding="utf-8",
                errors="replace",
                **own_group(CREATE_NO_WINDOW=True),
            )
        except OSError as problem:
            raise ConfigError(f"ssh cannot be run: {problem}") from problem
        try:
            self._record = remember(self._process, SshTunnel.name)
        except BaseException:
            self._process.kill()
            self._process.communicate()
            raise
        self._thread = threading.Thread(target=self._read, name="guava-ssh", daemon=True)
        self._thread.start()

    @property
    def forwards(self) -> bool:
        """Whether it runs and the server has granted the port."""
        return self.port > 0 and not self.ended and self._process.poll() is None

    def _read(self) -> None:
        assert self._process.stderr is not None
        with contextlib.suppress(OSError, ValueError):
            for line in self._process.stderr:
                with self._news:
                    self.port = self.port or forwarded_port(line)
                    if not is_chatter(line):
                        self.lines.append(line.rstrip())
                    self._news.notify_all()
        self._process.wait()
        self._record.forget()
        with self._news:
            self.ended = True
            self._news.notify_all()

    def wait(self, until: float) -> bool:
        """Wait until it forwards or has ended, or until a monotonic time; returns whether it forwards."""
        with self._news:
            self.late = not self._news.wait_for(lambda: self.port or self.ended, max(0.0, until - time.monotonic()))
            return self.port > 0 and not self.ended

    def stop(self) -> None:
        """End it; leaves no thread. Safe to call twice; a forked child leaves its parent's alone."""
        if os.getpid() != self._owner:
            return
        self._signal(signal.SIGTERM)
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._signal(getattr(signal, "SIGKILL", signal.SIGTERM))
        if threading.current_thread() is not self._thread:
            self._thread.join(END_S)
        if self._process.stderr is not None and not self._thread.is_alive():
            self._process.stderr.close()

    def _signal(self, number: int) -> None:
        """To ssh and, where it has a session of its own, to what it started: a ProxyCommand need not notice its end."""
        if self._process.poll() is not None:
            return
        with contextlib.suppress(OSError):
            if os.name == "nt":
                self._process.terminate()
            else:
                os.killpg(self._process.pid, number)
