"""Workers on machines that the user has ssh to: by the system's own ssh, with the user's own settings, keys and jump hosts."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar, TypeVar

from guava_nb.errors import ConfigError
from guava_nb.launchers.attached_process import AttachedProcess
from guava_nb.launchers.install_check import FACTS, PythonThere, facts_in
from guava_nb.launchers.launcher import Launcher, Order, worker_words
from guava_nb.launchers.programs import find_program, last_line, run_program
from guava_nb.protocol.joincode import JoinCode
from guava_nb.tunnels.ssh_words import Asked, why_not

__all__ = ["SshLauncher"]

_Found = TypeVar("_Found")

#: A ProxyCommand of the user's ssh config gives the host to a shell, and an old ssh as it is.
_NO_HOST = "'`\"$\\;&<>|(){}*?!#"

#: For one look at a host: connection, keys, and Python's start.
CHECK_S = 60.0
#: Seconds that workers get to leave when all is ended, and the system of a host to end those that do not.
LEAVE_S, KILL_S = 10.0, 30.0
#: Seconds for a host to grant the port that leads back here.
FORWARD_S = 30.0
#: What the user's ssh config must not turn into something else. The host's key is checked as the user has it.
OPTIONS = {
    "BatchMode": "yes",  # no person can type a password here
    "ExitOnForwardFailure": "yes",
    "ConnectTimeout": "15",
    "ServerAliveInterval": "5",
    "ServerAliveCountMax": "3",
    "ControlMaster": "no",  # a shared connection would be ended by another program's end
    "ControlPath": "none",
    "PermitLocalCommand": "no",
    "ForwardAgent": "no",
    "LogLevel": "INFO",  # tells the port that leads back
}


class SshLauncher(Launcher):
    """`ssh:HOST[,HOST...][,python=PATH][,device=D]`: a worker for each GPU of each host, or one on its processor."""

    name = "ssh"
    example = "ssh:gpu1,me@gpu2"
    options: ClassVar = {
        "python": "the Python, or the folder of a virtual environment, to use on the hosts",
        "device": "cpu, cuda:0, ...: one worker on each host instead of one for each GPU",
    }
    needs_address = False  # a port of the host leads back here

    def __init__(self, what: str, ssh_options: Sequence[str] = ()) -> None:
        super().__init__(what)
        self._hosts, found = self.read(what)
        if not self._hosts:
            raise ConfigError(f"--on ssh needs hosts that you have ssh to, as in --on {self.example}")
        for host in self._hosts:
            if host.startswith("-") or any(
                char.isspace() or not char.isprintable() or char in _NO_HOST for char in host
            ):
                raise ConfigError(f"--on ssh: {host!r} is no host")
            if self._hosts.count(host) > 1:
                raise ConfigError(
                    f"--on ssh: {host} is named twice; a host gets a worker for each of its GPUs by itself"
                )
        self._python, self._device = found.get("python", ""), found.get("device", "")
        self._ssh_options = tuple(ssh_options)
        self._pythons: dict[str, PythonThere] = {}
        self._workers: dict[str, AttachedProcess] = {}
        self._told: set[str] = set()
        self._order: Order | None = None
        self.count = len(self._hosts)  # at least; `check` sees their GPUs

    # ------------------------------------------------------------------------------------------------------- checking

    def check(self) -> None:
        """Ask each host which Python is there, and what that one has."""
        self._pythons = dict(zip(self._hosts, self._on_all(self._look_at), strict=True))
        self.count = sum(1 if self._device else max(1, found.gpus) for found in self._pythons.values())

    def _look_at(self, host: str) -> PythonThere:
        done = run_program(self._words(host, "sh -s"), self._script(), CHECK_S)
        found = facts_in(done.stdout)
        if found is None:
            raise ConfigError(self._why(host, done.returncode, done.stdout, done.stderr))
        pip = f"ssh {host} {shlex.quote(found.path)} -m pip install"
        if problem := found.missing(host, pip, f"; or name another Python there: --on ssh:{host},python=/path/to/venv"):
            raise ConfigError(problem)
        return found

    def _script(self) -> str:
        named = self._python.rstrip("/")
        tried = [named, f"{named}/bin/python"] if named else ["python3", "python"]
        words = " ".join(_quoted(word) for word in tried)
        return (
            f"for p in {words}; do\n"
            '  if [ -d "$p" ] || ! command -v "$p" >/dev/null 2>&1; then continue; fi\n'
            f'  exec "$p" -c {shlex.quote(FACTS)}\n'
            "done\necho guava-no-python\n"
        )

    def _why(self, host: str, status: int, out: str, said: str) -> str:
        if "guava-no-python" in out:
            looked = self._python or "python3 or python"
            return (
                f"{host} has no {looked}: name one there, as in --on ssh:{host},python=/path/to/venv (what a login shell "
                "activates is not seen by ssh)"
            )
        if status == 255:  # ssh's own
            return why_not(said.splitlines(), Asked(host, 0))
        return f"the Python of {host} cannot be run: {last_line(said)}"

    # ------------------------------------------------------------------------------------------------------- starting

    def start(self, order: Order) -> str:
        """Start `guava worker` on all hosts; the join code goes through its standard input."""
        if not self._pythons:
            self.check()
        self._order = order
        self._on_all(self._start_on)
        return f"started guava worker by ssh on {', '.join(self._hosts)}"

    def _start_on(self, host: str) -> None:
        assert self._order is not None
        order, back = self._order, []
        if not order.is_reached_from_elsewhere:
            back = ["-R", f"127.0.0.1:0:127.0.0.1:{order.port}"]
        words = worker_words(
            self._pythons[host].path, "-", self.mark, gpus="" if self._device else "auto", device=self._device
        )
        command = f"exec {shlex.join(words)}"
        worker = self._workers[host] = AttachedProcess(self._words(host, command, *back))
        code = order.code
        if back:
            port = worker.wait_for_port(FORWARD_S)
            if not port:
                raise ConfigError(self._why_ended(host, worker, "did not let a port lead back here"))
            code = code.with_address("127.0.0.1", port)
        worker.say(code.encode())

    def _why_ended(self, host: str, worker: AttachedProcess, else_why: str) -> str:
        sentence = why_not(worker.said(), Asked(host, 0))
        if worker.status() == 255 and "ended: " not in sentence:  # ssh said something that is known
            return sentence
        return f"{host} {else_why}: {last_line(chr(10).join(worker.said()))}"

    def follow(self, code: JoinCode) -> None:
        """Give the new code to workers that a port does not lead back."""
        if self._order is not None and self._order.is_reached_from_elsewhere:
            for worker in self._workers.values():
                worker.say(code.encode())

    def look(self) -> str:
        """Hosts whose worker has ended, each told once."""
        news = []
        for host, worker in self._workers.items():
            if worker.status() is not None and host not in self._told:
                self._told.add(host)
                news.append(self._ended(host, worker))
        return "; ".join(news)

    def failure(self) -> str:
        """Why none is left."""
        if any(worker.status() is None for worker in self._workers.values()):
            return ""
        return "; ".join(self._ended(host, worker) for host, worker in self._workers.items())

    def _ended(self, host: str, worker: AttachedProcess) -> str:
        if worker.status() == 0:
            return f"the worker on {host} has left"
        how = (
            "or the way to it ended the worker"
            if worker.status() == 255
            else f"ended the worker with status {worker.status()}"
        )
        return self._why_ended(host, worker, how)

    # --------------------------------------------------------------------------------------------------------- ending

    def end(self) -> str:
        """Let the workers leave, then end those that do not, on every host that one was started on."""
        workers, self._workers = self._workers, {}
        for worker in workers.values():
            worker.say("leave")
        until = time.monotonic() + LEAVE_S
        # 255: the connection is lost, and the worker may be there.
        left = [host for host, one in workers.items() if one.wait(max(0.0, until - time.monotonic())) in (None, 255)]
        hosts = left if workers else ([] if self._order is not None else self._hosts)
        with ThreadPoolExecutor(max(1, len(hosts))) as pool:
            problems = [problem for problem in pool.map(self._end_on, hosts) if problem]
        for worker in workers.values():
            worker.close()
        return "; ".join(problems)

    def _end_on(self, host: str) -> str:
        """By the mark in its arguments, and by nothing else: numbers of processes are given again."""
        pattern = shlex.quote(f"mark=[{self.mark[0]}]{self.mark[1:]}")  # does not find itself
        look = shlex.quote('$0 ~ ("-m guava_nb worker .*--mark " mark "( |$)") {print $1}')
        find = f'ps -U "$(id -u)" -o pid= -o args= | awk -v {pattern} {look}'
        script = (
            f'p=$({find}); [ -z "$p" ] && exit 0\nkill -TERM $p\n'
            f'for i in 1 2 3 4 5 6 7 8 9 10; do sleep 1; p=$({find}); [ -z "$p" ] && exit 0; done\nkill -KILL $p\n'
        )
        try:
            done = run_program(self._words(host, "sh -s"), script, KILL_S)
        except ConfigError as problem:
            return f"whether its worker on {host} has ended is not known: {problem}"
        if done.returncode == 255:
            return f"whether its worker on {host} has ended is not known: {why_not(done.stderr.splitlines(), Asked(host, 0))}"
        return ""

    # ---------------------------------------------------------------------------------------------------------- words

    def _words(self, host: str, command: str, *more: str) -> list[str]:
        ssh = find_program(
            "ssh", "install OpenSSH's client (apt install openssh-client; on Windows: Optional features)"
        )
        options = [word for name, value in OPTIONS.items() for word in ("-o", f"{name}={value}")]
        return [ssh, *self._ssh_options, "-T", "-x", *options, *more, "--", host, command]

    def _on_all(self, call: Callable[[str], _Found]) -> list[_Found]:
        """Call with every host at once; the first failure is raised when all have answered."""
        with ThreadPoolExecutor(len(self._hosts)) as pool:
            waiting = [pool.submit(call, host) for host in self._hosts]
        return [one.result() for one in waiting]


def _quoted(word: str) -> str:
    """For a shell there, which knows what its user's home is."""
    if word.startswith("~/"):
        return '"$HOME"/' + shlex.quote(word[2:])
    return shlex.quote(word)
