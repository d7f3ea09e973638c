"""A Python process of its own that runs what a test sends it, piece by piece: a script, or a second machine's.

with Console() as console:
    console.run("import torch")
    assert console.run("answer = torch.ones(2).sum().item()") == 2.0
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_MARK = "\x1eanswer "


class Console:
    """The test's end."""

    def __init__(self, **environment: str) -> None:
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **environment}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.console"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, env=env, cwd=ROOT, start_new_session=True,
        )  # fmt: skip
        self.lines: list[str] = []
        self._answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, name="console-reader", daemon=True)
        self._reader.start()

    def __enter__(self) -> Console:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)
        self._reader.join(10)
        self.process.stdout.close()

    def start(self, code: str) -> None:
        """Send a piece of code; `finish` gives what it left in `answer`."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(code) + "\n")
        self.process.stdin.flush()

    def finish(self, timeout_s: float = 90) -> Any:
        try:
            answer = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            raise AssertionError(f"no answer within {timeout_s:g} s:\n" + "\n".join(self.lines[-40:])) from None
        assert answer["error"] is None, answer["error"] + "\n" + "\n".join(self.lines[-40:])
        return answer["value"]

    def run(self, code: str, timeout_s: float = 90) -> Any:
        self.start(code)
        return self.finish(timeout_s)

    def wait_line(self, pattern: str, since: int = 0, timeout_s: float = 60) -> str:
        """Wait for a printed line after the first `since` ones."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                for line in self.lines[since:]:
                    if re.search(pattern, line):
                        return line
                left = deadline - time.monotonic()
                assert left > 0, f"{pattern!r} was not printed within {timeout_s:g} s:\n" + "\n".join(self.lines[-40:])
                self._changed.wait(left)

    def interrupt(self) -> None:
        """What Ctrl-C does to the script alone."""
        self.process.send_signal(signal.SIGINT)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            before, mark, record = line.rstrip("\n").partition(_MARK)
            with self._changed:
                if before or not mark:
                    self.lines.append(before)
                self._changed.notify_all()
            if mark:
                self._answers.put(json.loads(record))
        self._answers.put({"error": "the process ended", "value": None})


def main() -> None:
    """The process's end."""
    names: dict[str, Any] = {"__name__": "__console__"}
    while True:
        try:
            line = sys.stdin.readline()
            if not line:
                return
            error = None
            try:
                exec(compile(json.loads(line), "<console>", "exec"), names)
            except BaseException:
                error = traceback.format_exc()
            print(_MARK + json.dumps({"error": error, "value": names.pop("answer", None)}), flush=True)
        except KeyboardInterrupt:  # came when nothing ran any more
            continue


if __name__ == "__main__":
    main()
