"""A program that stays: an ssh or a container with a command in it; what it says, and what is said to it."""

from __future__ import annotations

import contextlib
import subprocess
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence

from guava_nb.errors import ConfigError
from guava_nb.systems import own_group
from guava_nb.tunnels.ssh_words import forwarded_port, is_chatter

__all__ = ["AttachedProcess"]

END_S = 3.0
KEPT_LINES = 40


class AttachedProcess:
    """Runs until the command there has ended. In a process session of its own: an interrupted cell must not end it.

    Args:
        words: of the program, with the command.
        environ: None is that of this process.

    Raises:
        ConfigError: the program cannot be run.
    """

    def __init__(self, words: Sequence[str], environ: Mapping[str, str] | None = None) -> None:
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._port = 0
        self._news = threading.Condition()
        try:
            self._process = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, encoding="utf-8",
                errors="replace", env=environ, **own_group(CREATE_NO_WINDOW=True),
            )  # fmt: skip
        except OSError as problem:
            raise ConfigError(f"{words[0]} cannot be run: {problem}") from problem
        self._thread = threading.Thread(target=self._read, name="guava-attached", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(OSError, ValueError):
            for line in self._process.stdout:
                with self._news:
                    self._port = self._port or forwarded_port(line)
                    if not is_chatter(line) and not forwarded_port(line):
                        self._lines.append(line.rstrip())
                    self._news.notify_all()
        self._process.wait()
        with self._news:
            self._news.notify_all()

    def wait_for_port(self, limit_s: float) -> int:
        """The port of an ssh server that leads back here; 0 where ssh ended before, or the time is over."""
        with self._news:
            self._news.wait_for(lambda: self._port or self._process.poll() is not None, limit_s)
            return self._port

    def say(self, line: str) -> None:
        """Write a line to the command's standard input; one that has ended hears nothing."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()

    def said(self) -> list[str]:
        """The last lines that the program or the command wrote; of one that has ended all of them."""
        if self._process.poll() is not None:
            self._thread.join(END_S)  # what it left to read; longer only where a child of it still writes
        with self._news:
            return list(self._lines)

    def status(self) -> int | None:
        """The command's exit status (255 where ssh itself failed), None as long as it runs."""
        return self._process.poll()

    def wait(self, limit_s: float) -> int | None:
        """Wait for its end; the status as `status` gives it."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(limit_s)
        return None

    def close(self) -> None:
        """End the program here; what runs there is not ended by that. Leaves no thread."""
        if self._process.poll() is None:
            self._process.terminate()
            if self.wait(END_S) is None:
                self._process.kill()
                self._process.wait()
        until = time.monotonic() + END_S
        self._thread.join(max(0.0, until - time.monotonic()))
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None and not self._thread.is_alive():
                with contextlib.suppress(OSError):
                    stream.close()
