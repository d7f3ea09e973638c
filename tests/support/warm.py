"""Processes that begin with torch loaded, so that a test does not pay four seconds of processor time for each worker.

A warm process is forked from a server that has imported the heavy libraries, and goes on as `python -m MODULE` would: its own
arguments, environment, folder, streams and session. It is a real process in every way that the tests use: it can be killed,
stopped and looked at. Workers, commands and scripts begin with our modules loaded, too, as workers of a nursery do for users;
kernels begin with nothing of ours. What `install` replaces is `subprocess.Popen`, for the modules named in
`WARM_MODULES` only, also behind `ip netns exec NAME`; every other command starts as ever, and with GUAVA_TEST_COLD set all do.

A warm process that starts others has a server of its own, forked before it has a thread: the workers of a kernel are warm,
and below it. A script of a test's own is warm as `python -m tests.support.script FILE`.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import multiprocessing
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psutil

__all__ = ["context", "install", "without_servers"]

ROOT = Path(__file__).resolve().parents[2]
#: Start processes themselves.
_STARTERS = (
    "ipykernel_launcher", "guava_nb.notebook.background.process", "jupyterlab", "pytest", "guava_nb", "tests.support.console",
    "tests.support.namespace_programs", "tests.support.script", "torch.distributed.run",
)  # fmt: skip
WARM_MODULES = (
    *_STARTERS, "guava_nb.worker.process", "tests.faults.matrix.worker",
    "tests.conformance.torch_suite", "guava_nb.spec.changed_code",
)  # fmt: skip
#: Those that begin with our modules loaded, which takes each a quarter of a second, and these modules.
_WITH_OURS = (
    "guava_nb.worker.process", "tests.faults.matrix.worker", "guava_nb", "guava_nb.notebook.background.process",
    "tests.support.script",
)  # fmt: skip
OURS = ("guava_nb.worker.worker_session", "guava_nb.worker.listening", "guava_nb.cli.main", "guava_nb.orchestrator")
#: They have taken `Popen` by its own name, and may be loaded before `install`.
_HAVE_POPEN = {
    "jupyter_client.launcher", "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler",
}  # fmt: skip
_IN_NAMESPACE = ["ip", "netns", "exec"]
PRELOADED = (
    "torch", "torch._dynamo", "torch.distributed.pipelining", "numpy", "matplotlib.figure", "psutil", "msgspec",
    "websockets.server", "zstandard", "pyflakes.api", "filelock",
)  # fmt: skip
#: The last one compiles a grammar: three seconds.
FOR_NOTEBOOKS = ("jupyter_client", "nbformat")
_SERVES = "guava-warm"
_ROOM_FOR_WORDS = "-" * 500  # a process of its own has its words written here, where `ps` finds them
_ORDER_BYTES = 1 << 17
_START_S = 180.0


class Server:
    """The other end of a server: forks processes when told."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self._lock = sock, threading.Lock()
        self._sock.settimeout(_START_S)

    @classmethod
    def started(cls) -> Server:
        """A server in a new interpreter."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
        words = [sys.executable, str(Path(__file__).resolve()), str(theirs.fileno()), _ROOM_FOR_WORDS]
        subprocess.Popen(words, env=environment, cwd=ROOT, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        theirs.close()
        return cls(ours)

    def fork(self, order: dict[str, Any], streams: Iterable[int], status: int) -> int:
        """Have a process made; returns its number. Its exit status comes out of the pipe whose end is `status`."""
        data = json.dumps(order).encode()
        assert len(data) < _ORDER_BYTES
        with self._lock:
            socket.send_fds(self._sock, [data], [*streams, status])
            return int(self._sock.recv(64))


def serve(sock: socket.socket, loads_ours: bool = False) -> dict[str, Any]:
    """Fork a process for each order. Returns in each of them, with its order; ends when nobody is left to give orders.

    Args:
        loads_ours: have a server below this one, with our modules loaded, fork those that begin with them.
    """
    _call_this_process(_SERVES)
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is for the process that it serves
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(woken)
    running: dict[int, int] = {}
    with_ours: Server | None = None
    while True:
        ready = select.select([sock, wake], [], [])[0]
        if wake in ready:
            os.read(wake, 4096)
            _bury(running)
        if sock not in ready:
            continue
        data, fds, *_ = socket.recv_fds(sock, _ORDER_BYTES, 4)
        if not data:
            os._exit(0)
        *streams, status = fds
        order: dict[str, Any] = json.loads(data)
        if loads_ours and order["module"] in _WITH_OURS:
            if with_ours is None:
                ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                if os.fork() == 0:
                    _keep_only(theirs, sock, ours)
                    preload_ours()
                    return serve(theirs)
                theirs.close()
                with_ours = Server(ours)
            sock.send(str(with_ours.fork(order, streams, status)).encode())
            for fd in fds:
                os.close(fd)
            continue
        pid = os.fork()
        if pid == 0:
            _begin(order, streams, sock)
            return order
        running[pid] = status
        for fd in streams:
            os.close(fd)


def _keep_only(kept: socket.socket, *others: socket.socket) -> None:
    """Close all that was opened but this and the standard streams."""
    signal.set_wakeup_fd(-1)
    for other in others:
        other.detach()
    os.closerange(3, kept.fileno())
    os.closerange(kept.fileno() + 1, 1 << 16)


def _bury(running: dict[int, int]) -> None:
    for pid in list(running):
        done, how = os.waitpid(pid, os.WNOHANG)
        if done:
            status = running.pop(pid)
            with contextlib.suppress(OSError):  # nobody waits for it any more
                os.write(status, str(os.waitstatus_to_exitcode(how)).encode())
            os.close(status)


def _begin(order: dict[str, Any], streams: list[int], sock: socket.socket) -> None:
    """Take the streams, and a session if that was asked for; then tell our number."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if order["new_session"]:
        os.setsid()
    if order["namespace"]:
        _enter(order["namespace"])
    for number, fd in enumerate(streams):
        os.dup2(fd, number)
    sock.send(str(os.getpid()).encode())
    sock.detach()
    os.closerange(3, 1 << 16)
    _call_this_process("python")
    _show_words([sys.executable, "-m", order["module"], *order["arguments"]])


def _enter(namespace: str) -> None:
    """Go into a network namespace that has a name, see ip-netns(8); Python has a call for it from 3.12 on."""
    with open(f"/run/netns/{namespace}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0):
            raise OSError(ctypes.get_errno(), f"{namespace} cannot be entered")


def _become(order: dict[str, Any]) -> None:
    """Be what `python -m MODULE ARGUMENTS` would be."""
    os.environ.clear()
    os.environ.update(order["environment"])
    tempfile.tempdir = None  # what was preloaded has asked for it, in the environment of that time
    os.chdir(order["folder"])
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    encoding, _, errors = os.environ.get("PYTHONIOENCODING", "utf-8").partition(":")
    sys.stdin = open(0, encoding=encoding, errors=errors or "strict", closefd=False)  # noqa: SIM115 - it stays open
    for name, fd, fallback in (("stdout", 1, "strict"), ("stderr", 2, "backslashreplace")):
        binary = open(fd, "wb", 0 if unbuffered else -1, closefd=False)  # noqa: SIM115
        made = _text(binary, encoding, errors or fallback, fd, unbuffered)
        setattr(sys, name, made)
        setattr(sys, f"__{name}__", made)
    sys.__stdin__ = sys.stdin
    sys.path[:] = [order["folder"], *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *_base_path]
    sys.argv[:] = ["-m", *order["arguments"]]
    _be_like_nobody_else()
    if order["module"] in _STARTERS and not _all_cold():
        install(_forked_server())
    runpy.run_module(order["module"], run_name="__main__", alter_sys=True)


def _text(binary: Any, encoding: str, errors: str, fd: int, unbuffered: bool) -> Any:
    import io

    return io.TextIOWrapper(binary, encoding, errors, line_buffering=os.isatty(fd) or fd == 2, write_through=unbuffered)


def _be_like_nobody_else() -> None:
    """Draw random numbers of one's own, and take as many threads as the environment says."""
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)))


def _forked_server() -> Server:
    """A server for this process, which has no threads yet."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        ours.close()
        raise SystemExit(_become(serve(theirs)))  # unwinds what was to be done here
    theirs.close()
    return Server(ours)


def _call_this_process(name: str) -> None:
    Path("/proc/self/comm").write_text(name)


def _show_words(words: list[str]) -> None:
    """Be found by one's command line: written over that of the server, as far as there is room."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end, see proc(5)
    text = "\0".join(words).encode()[: end - start - 1]
    ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


# --------------------------------------------------------------------------------------------------------- who starts them


class WarmPopen(subprocess.Popen):  # type: ignore[type-arg]
    """`Popen` that lets a server fork what it can.

    Attributes:
        server: where from.
    """

    server: Callable[[], Server]
    _status = -1

    def _execute_child(self, args: Any, *details: Any) -> None:
        (executable, preexec_fn, _, pass_fds, folder, environment, _, _, shell, *pipes) = details[:15]
        namespace, words = self._taken_apart(args)
        unbuffered = words[1:3] == ["-u", "-m"]  # as torchrun starts its ranks
        if unbuffered:
            del words[1]
        warm = (
            words[:2] == [sys.executable, "-m"] and words[2] in WARM_MODULES and executable is None and preexec_fn is None
            and not pass_fds and not shell and not self._is_other(environment)
        )  # fmt: skip
        if not warm:
            super()._execute_child(args, *details)
            return
        ends = [
            (pipes[0], pipes[1]),
            (pipes[3], pipes[2]),
            (pipes[5], pipes[4]),
        ]  # the child's, and ours where it is a pipe
        order = {
            "module": words[2],
            "arguments": words[3:],
            "namespace": namespace,
            "environment": {
                **(os.environ if environment is None else environment),
                **({"PYTHONUNBUFFERED": "1"} if unbuffered else {}),
            },
            "folder": os.fspath(folder or os.getcwd()),
            "new_session": bool(details[20]),
        }
        self._status, status = os.pipe()
        try:
            streams = [number if theirs == -1 else theirs for number, (theirs, _) in enumerate(ends)]
            self.pid = type(self).server().fork(order, streams, status)
        finally:
            devnull = getattr(self, "_devnull", -1)
            for fd in {status, devnull, *(theirs for theirs, ours in ends if ours != -1)} - {-1}:
                os.close(fd)
        self._child_created = True

    @staticmethod
    def _taken_apart(args: Any) -> tuple[str, list[str]]:
        """The name of the network namespace, or "", and what is started in it."""
        words = [] if isinstance(args, (str, bytes)) else [os.fspath(word) for word in args]
        return (words[3], words[4:]) if words[:3] == _IN_NAMESPACE and len(words) > 4 else ("", words)

    @staticmethod
    def _is_other(environment: Any) -> bool:
        """Whether it is to see other libraries than the server has loaded: those that this process does not see itself."""
        path = (os.environ if environment is None else environment).get("PYTHONPATH", "")
        return any(word not in ("", *sys.path) and Path(word).resolve() != ROOT for word in path.split(os.pathsep))

    def _internal_poll(self, *state: Any, **more: Any) -> int | None:
        if self._status == -1:
            return super()._internal_poll(*state, **more)
        self._look(0)
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        if self._status == -1:
            return super()._wait(timeout)
        if not self._look(timeout):
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return self.returncode

    def _look(self, timeout_s: float | None) -> bool:
        """Wait for its exit status; returns whether it came."""
        with self._waitpid_lock:
            if self.returncode is None and select.select([self._status], [], [], timeout_s)[0]:
                told = os.read(self._status, 16)
                self.returncode = int(told) if told else -signal.SIGKILL  # the server was ended, and did not see it
                os.close(self._status)
                self._status = -2
        return self.returncode is not None


def install(server: Server | None = None) -> None:
    """Let `subprocess.Popen` of this process start warm processes, from this server or from one that starts when needed."""
    if _all_cold() or subprocess.Popen is WarmPopen:
        return
    made = [server] if server is not None else []
    lock = threading.Lock()

    def only() -> Server:
        with lock:
            if not made:
                made.append(Server.started())
            return made[0]

    WarmPopen.server = staticmethod(only)
    subprocess.Popen = WarmPopen  # type: ignore[misc]
    for name in _HAVE_POPEN & sys.modules.keys():
        sys.modules[name].Popen = WarmPopen  # type: ignore[attr-defined]


def context() -> Any:
    """`multiprocessing` for pools of ranks: its processes begin with torch loaded, too."""
    if _all_cold():
        return multiprocessing.get_context("spawn")
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(["tests.support.preloaded"])
    return made


def preload(names: Iterable[str]) -> None:
    """Import what is there of these, without collecting garbage meanwhile, which would take a third of the time."""
    gc.disable()
    for name in names:
        with contextlib.suppress(ImportError):
            __import__(name)
    gc.enable()


def preload_ours() -> None:
    """Import our own modules from this tree, for processes that begin with them; the path stays as it was."""
    sys.path.insert(0, str(ROOT))
    preload(OURS)
    sys.path.remove(str(ROOT))
    gc.freeze()  # or collections would write into every page, and nothing would stay shared


def _all_cold() -> bool:
    return sys.platform != "linux" or bool(os.environ.get("GUAVA_TEST_COLD"))


def without_servers(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Leave out the servers of warm processes: they belong to the tests, not to what is tested."""
    kept = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.name() != _SERVES:
                kept.append(process)
    return kept


_base_path = [word for word in sys.path if word and Path(word) != Path(__file__).parent]

if __name__ == "__main__":
    preload((*PRELOADED, *FOR_NOTEBOOKS))
    gc.freeze()  # as above
    _become(serve(socket.socket(fileno=int(sys.argv[1])), loads_ours=True))
