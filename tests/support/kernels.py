"""Real IPython kernels whose cells run on a thread, so that two notebooks can be at work at once."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from jupyter_client.manager import KernelManager

from tests.support.warm import without_servers

ROOT = Path(__file__).resolve().parents[2]
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class Kernel:
    """A kernel and what its last cell has sent so far: `text`, and every message in `messages`.

    `prefix`: words in front of its command, such as those that enter a network namespace; it is talked to through files.
    `python`: which one runs it. `folder`: where it runs, which it imports from.
    """

    def __init__(
        self, *prefix: str, python: str = sys.executable, folder: Path | None = None, **environment: str
    ) -> None:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("GUAVA_") and name != "CI"}
        self._state = tempfile.TemporaryDirectory(prefix="guava-state-")  # of no other kernel's session
        own = {"GUAVA_UI": "text", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "XDG_STATE_HOME": self._state.name}
        env = {**kept, **own, **environment}
        self.manager = KernelManager(kernel_name="python3", transport="ipc" if prefix else "tcp")
        self.manager.kernel_spec.argv[:1] = [*prefix, python]
        self.manager.start_kernel(env=env, **({} if folder is None else {"cwd": str(folder)}))
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=90)
        self.text = ""
        self.messages: list[Any] = []
        self._threads: list[threading.Thread] = []
        self._closing = False

    def run(self, cell: str, timeout_s: float = 60) -> str:
        """Run a cell that must end well; returns what it showed."""
        status, text = self.attempt(cell, timeout_s)
        assert status == "ok", f"{cell}\n{text}"
        return text

    def attempt(self, cell: str, timeout_s: float = 60, typed: str | None = None) -> tuple[str, str]:
        """Run a cell; returns "ok" or "error" and what it showed. `typed` is the answer to what it asks."""
        self.text, self.messages = "", []
        request = self.client.execute(cell, allow_stdin=typed is not None)
        if typed is not None:
            self.client.get_stdin_msg(timeout=timeout_s)
            self.client.input(typed)
        deadline = time.monotonic() + timeout_s
        idle = False
        while not idle:
            message = self._next(self.client.get_iopub_msg, request, deadline, cell)
            self.messages.append(message)
            self.text += _COLOURS.sub("", _text_of(message["msg_type"], message["content"]))
            idle = message["content"].get("execution_state") == "idle"
        reply = self._next(self.client.get_shell_msg, request, deadline, cell)
        return reply["content"]["status"], self.text

    def _next(self, get: Callable[..., Any], request: str, deadline: float, cell: str) -> Any:
        """The next message about a request, looking up often: a kernel that was killed sends nothing any more."""
        while not self._closing and time.monotonic() < deadline:
            with contextlib.suppress(queue.Empty):
                message = get(timeout=0.2)
                if message["parent_header"].get("msg_id") == request:
                    return message
        raise TimeoutError(f"{cell} did not end; so far: {self.text}")

    def start(self, cell: str, timeout_s: float = 90, typed: str | None = None) -> Callable[[], tuple[str, str]]:
        """Run a cell on a thread; returns a function that waits for its end and gives what `attempt` gives."""
        result: list[tuple[str, str]] = []
        self.text = ""

        def work() -> None:
            with contextlib.suppress(TimeoutError):  # `wait` tells it, if anybody waits
                result.append(self.attempt(cell, timeout_s, typed))

        thread = threading.Thread(target=work)
        self._threads.append(thread)
        thread.start()

        def wait() -> tuple[str, str]:
            thread.join(timeout_s)
            assert result, f"{cell} never ended; so far: {self.text}"
            return result[0]

        return wait

    def wait_for(self, pattern: str, timeout_s: float = 40) -> None:
        """Wait until the running cell has shown something."""
        wait_until(lambda: re.search(pattern, self.text), lambda: f"{pattern!r} in {self.text}", timeout_s)

    def interrupt(self) -> None:
        """Press the interrupt button."""
        self.manager.interrupt_kernel()

    def kill(self) -> None:
        """End the kernel like the system does when memory runs out."""
        self.process.kill()

    @property
    def process(self) -> psutil.Process:
        """The kernel's process."""
        return psutil.Process(self.manager.provisioner.process.pid)

    def children(self) -> list[psutil.Process]:
        """Every process below the kernel."""
        return without_servers(self.process.children(recursive=True))

    def close(self) -> None:
        """End it, whatever it does."""
        self._closing = True
        for thread in self._threads:
            thread.join(10)
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)
        self._state.cleanup()


def wait_until(reached: Callable[[], object], what: Callable[[], str], timeout_s: float) -> None:
    """Poll with a deadline; `what` says what did not come."""
    deadline = time.monotonic() + timeout_s
    while not reached():
        assert time.monotonic() < deadline, f"after {timeout_s} s still no {what()}"
        threading.Event().wait(0.05)


def gone(processes: list[psutil.Process]) -> bool:
    """Whether all of them have ended; an unburied zombie has."""
    return not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes)


def _text_of(kind: str, content: Any) -> str:
    if kind == "stream":
        return str(content["text"])
    if kind in ("execute_result", "display_data", "update_display_data"):
        return str(content["data"].get("text/plain", "")) + "\n"
    if kind == "error":
        return "\n".join(content["traceback"]) + "\n"
    return ""
