"""A clean process that loads the libraries once and forks worker processes: each begins in milliseconds and shares its memory.

The nursery is spawned, has no thread of its own and never touches CUDA. It is told by a socket, its standard input; for each
worker it gets three descriptors: the worker's standard input, its output, and a pipe that carries the worker's number and later
its exit status. It ends with the process that started it. Linux only: elsewhere libraries do not bear a fork.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence

from guava_nb.processes.pipe import NURSERY
from guava_nb.spec.loading import loading_without_collections

__all__ = ["WORKER_WORDS", "ForkedProcess", "Nursery", "begin_nursery", "close_unused", "expect_workers"]
__all__ += ["find_nursery", "serve", "worker_environment"]

#: The command line of a worker process.
WORKER_WORDS = (sys.executable, "-m", "guava_nb.worker.process")
#: Longest wait for a nursery to load everything: from a slow network disk it can take that long.
START_S = 60.0
_NURSERY_OF: dict[tuple[object, ...], Nursery] = {}
_lock = threading.Lock()


# ------------------------------------------------------------------------------------------------ who wants processes


class ForkedProcess:
    """A process that a nursery forks, with what is used of `subprocess.Popen`. Thread-safe.

    Attributes:
        stdin, stdout: our ends of its pipes; its standard error goes where its output goes.
    """

    def __init__(self, nursery: Nursery) -> None:
        """Ask for it; it is forked as soon as the nursery has loaded everything.

        Raises:
            OSError: the nursery has ended.
        """
        its_input, our_input = os.pipe()
        our_output, its_output = os.pipe()
        self._status, its_status = os.pipe()
        self.stdin = open(our_input, "w", encoding="utf-8")  # noqa: SIM115 - open as long as the process runs
        self.stdout = open(our_output, encoding="utf-8", errors="replace")  # noqa: SIM115
        self._close_status = weakref.finalize(self, os.close, self._status)
        self._close_status.atexit = False
        self._told, self._is_over = b"", False
        self._lock = threading.Lock()
        try:
            nursery.fork([its_input, its_output, its_status])
        except OSError:
            self.stdin.close()
            self.stdout.close()
            raise
        finally:
            for fd in (its_input, its_output, its_status):
                os.close(fd)
        self._nursery: Nursery | None = nursery

    @property
    def pid(self) -> int:
        """Its number; waits until it is forked.

        Raises:
            ProcessLookupError: the nursery ended before, or has not loaded everything within a minute.
        """
        told = self._words(1, START_S)
        if not told:
            raise ProcessLookupError(f"the process was not started within {START_S:g} s")
        return int(told[0])

    def poll(self) -> int | None:
        """Return its exit status, negative for a signal; None while it runs."""
        return self._exit_status(0)

    def wait(self) -> int:
        """Wait for its end; returns its exit status."""
        status = self._exit_status(None)
        with self._lock:
            nursery, self._nursery = self._nursery, None
            self._is_over = True
            self._close_status()  # now, since a session keeps the handles of all processes that it ever started
        if nursery is not None:
            nursery.leave()
        return -signal.SIGKILL if status is None else status

    def kill(self) -> None:
        """End it now, if it runs.

        Raises:
            ProcessLookupError: it never did, see `pid`.
        """
        pid = self.pid
        if self.poll() is None:
            os.kill(pid, signal.SIGKILL)

    def _exit_status(self, timeout_s: float | None) -> int | None:
        told = self._words(2, timeout_s)
        if len(told) > 1:
            return int(told[1])
        return -signal.SIGKILL if self._is_over else None  # with the nursery, which was ended and saw it no more

    def _words(self, wanted: int, timeout_s: float | None) -> list[bytes]:
        """Return what was told of it: its number, its exit status; waits until so many words are there or no more will come."""
        poll = select.poll()
        poll.register(self._status, select.POLLIN)
        while True:
            with self._lock:
                if poll.poll(0) and not self._is_over:
                    data = os.read(self._status, 64)
                    self._told, self._is_over = self._told + data, not data
                words = self._told.split(b"\n")[:-1]
            if len(words) >= wanted or self._is_over or not poll.poll(None if timeout_s is None else timeout_s * 1000):
                return words


class Nursery:
    """The nursery of one environment. It ends when the last of its processes has ended. Thread-safe.

    Attributes:
        was_asked: for a process, once at least.
    """

    def __init__(self, words: Sequence[str], environment: Mapping[str, str]) -> None:
        """Spawn it."""
        self._socket, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its:
            self._process = subprocess.Popen(words, stdin=its.fileno(), env=environment, start_new_session=True)
        self.was_asked = False  # for a process
        self._num_running = 0

    def fork(self, descriptors: Sequence[int]) -> None:
        """Have a process forked that gets these for its input, its output, and to tell of itself.

        Raises:
            OSError: the nursery has ended.
        """
        with _lock:
            socket.send_fds(self._socket, [b"fork"], descriptors)
            self.was_asked = True
            self._num_running += 1

    def leave(self) -> None:
        """One of its processes has ended."""
        with _lock:
            self._num_running -= 1
            if self._num_running:
                return
            for key in [key for key, one in _NURSERY_OF.items() if one is self]:
                del _NURSERY_OF[key]
        self.close()

    def close(self) -> None:
        """End it, and with it the memory that it holds."""
        self._socket.close()
        self._process.kill()
        self._process.wait()


def begin_nursery(words: Sequence[str], environment: Mapping[str, str]) -> None:
    """Begin to load what worker processes need, for those that are started with this environment in this folder.

    Does nothing where there is such a nursery, or where processes cannot be forked.
    """
    if sys.platform == "linux":
        with _lock:
            if _key(environment) not in _NURSERY_OF:
                _NURSERY_OF[_key(environment)] = Nursery(words, environment)


def worker_environment(threads: int | None) -> dict[str, str]:
    """Return the environment of a worker process with so many of torch's threads; None leaves it to torch.

    Threads that wait for each other spin for some 50 µs and then sleep, where the user's environment does not say otherwise. By
    default they spin for milliseconds: with other programs on the cores, each burns the time that the one it waits for needs.
    """
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "utf-8:replace"}
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", "1000")
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    return environment


def expect_workers(threads: int | None) -> None:
    """Begin to load what workers with so many threads need; each `launch` of such a worker then takes milliseconds."""
    begin_nursery([*WORKER_WORDS, NURSERY], worker_environment(threads))


def close_unused() -> None:
    """End each nursery that no process was asked of yet: nothing will be."""
    with _lock:
        unused = [key for key, one in _NURSERY_OF.items() if not one.was_asked]
        nurseries = [_NURSERY_OF.pop(key) for key in unused]
    for nursery in nurseries:
        nursery.close()


def find_nursery(environment: Mapping[str, str]) -> Nursery | None:
    """Return the nursery that was begun for this environment and folder, if there is one."""
    with _lock:
        return _NURSERY_OF.get(_key(environment))


def _key(environment: Mapping[str, str]) -> tuple[object, ...]:
    return (os.getcwd(), *sorted(environment.items()))


# ------------------------------------------------------------------------------------------------------- in the nursery


def serve(modules: Sequence[str]) -> None:
    """Load these modules, then fork a process for each order: returns in each of them, and never in the nursery itself.

    A module that cannot be loaded is left out: the worker that needs it meets the same error, and can tell it.
    """
    with loading_without_collections():
        for name in modules:
            with contextlib.suppress(Exception):
                importlib.import_module(name)
    gc.freeze()  # or collections would write into every page, and nothing would stay shared
    with socket.socket(fileno=os.dup(0)) as orders:
        _fork_as_told(orders)
    if "numpy" in sys.modules:  # what Python draws differs after a fork, what numpy draws does not
        sys.modules["numpy"].random.seed()


def _fork_as_told(orders: socket.socket) -> None:
    ours, woken = socket.socketpair()
    woken.setblocking(False)
    handlers = [(number, signal.getsignal(number)) for number in (signal.SIGCHLD, signal.SIGINT)]
    signal.signal(signal.SIGCHLD, lambda *_: None)  # or it would wake no thread
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
    running: dict[int, int] = {}
    while True:
        ready = select.select([orders, ours], [], [])[0]
        if ours in ready:
            ours.recv(4096)
            _bury(running)
        if orders not in ready:
            continue
        data, descriptors, *_ = socket.recv_fds(orders, 16, 3)
        if not data:
            os._exit(0)  # who started this process has ended
        *streams, status = descriptors
        pid = os.fork()
        if not pid:
            break
        os.write(status, b"%d\n" % pid)
        running[pid] = status
        for fd in streams:
            os.close(fd)
    signal.set_wakeup_fd(-1)
    for number, handler in handlers:
        signal.signal(number, handler)
    os.setsid()
    for target, fd in enumerate((streams[0], streams[1], streams[1])):
        os.dup2(fd, target)
    for fd in (*streams, *running.values()):
        os.close(fd)  # `status` stays open: its end tells of ours where the nursery was ended
    ours.close()
    woken.close()


def _bury(running: dict[int, int]) -> None:
    """Tell the exit status of those that have ended."""
    for pid in list(running):
        done, how = os.waitpid(pid, os.WNOHANG)
        if done:
            status = running.pop(pid)
            with contextlib.suppress(OSError):  # no caller waits for it any more
                os.write(status, b"%d\n" % os.waitstatus_to_exitcode(how))
            os.close(status)
