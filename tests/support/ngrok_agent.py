"""The fake ngrok agent as tests use it: its switches, and which of its processes run."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import psutil

from tests.support.processes import eventually

PROGRAM = Path(__file__).with_name("fake_ngrok.py")
TOKEN = "2abcDEFghiJKLmnoPQRstuVWXyz_4QzRtYuIoPaSdFgHjKlZxC"


class FakeNgrok:
    """An agent's program in a folder of its own, and its switches; `close` ends what still runs of it."""

    def __init__(self, folder: Path, **plan: Any) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.program = folder / "ngrok"
        self.program.write_text(
            f"#!{sys.executable}\nimport runpy\nrunpy.run_path({str(PROGRAM)!r}, run_name='__main__')\n"
        )
        self.program.chmod(0o755)
        self.plan(**plan)

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs to have this agent and no token."""
        return {"NGROK_PATH": str(self.program), "FAKE_NGROK": str(self.folder), "TMPDIR": str(self.folder)}

    def plan(self, **plan: Any) -> None:
        (self.folder / "plan.json").write_text(json.dumps(plan))

    def notes(self) -> dict[int, dict[str, Any]]:
        """What each agent wrote down, by its process; those that still run."""
        found = {int(path.stem): json.loads(path.read_text()) for path in self.folder.glob("agents/*.json")}
        return {pid: note for pid, note in found.items() if self._runs(pid)}

    def running(self) -> list[int]:
        return sorted(self.notes())

    def only(self) -> int:
        """The one agent that runs."""
        (pid,) = eventually(self.running, 10, "an agent runs")
        return pid

    def reconnect(self) -> None:
        os.kill(self.only(), signal.SIGUSR1)

    def leftovers(self) -> list[Path]:
        """Files of ours that should be gone when nothing runs."""
        return list(self.folder.glob("guava_nb-tunnels-*/*"))

    def close(self) -> None:
        for pid in self.running():
            os.kill(pid, signal.SIGKILL)

    def _runs(self, pid: int) -> bool:
        try:
            process = psutil.Process(pid)
            return process.status() != psutil.STATUS_ZOMBIE and any("ngrok" in word for word in process.cmdline())
        except psutil.Error:
            return False
