"""Workers as the tasks of a Slurm job: one worker a task, started by srun in a job that sbatch takes."""

from __future__ import annotations

import getpass
import shlex
import sys
import time
from pathlib import Path
from typing import ClassVar

from guava_nb.errors import ConfigError
from guava_nb.launchers.launcher import Launcher, Order, remove_secret, worker_words, write_secret
from guava_nb.launchers.programs import find_program, last_line, run_program
from guava_nb.protocol.joincode import JoinCode

__all__ = ["SlurmLauncher"]

#: Administrators do not like to see squeue asked more often.
LOOK_S = 20.0
#: Seconds before a job's time limit at which its workers are asked to leave, unless signal= says another time.
BEFORE_LIMIT_S = 90
#: What this launcher says itself.
_OURS = ("ntasks", "job-name", "wrap", "array", "parsable", "test-only", "wait", "requeue", "no-requeue")
_WAY = "run the notebook on a machine of the cluster that has Slurm's commands, mostly a login node"


class SlurmLauncher(Launcher):
    """`slurm:N[,gpus=G][,python=PATH][,KEY=VALUE...]`; each other KEY is a long option of sbatch, such as time or partition."""

    name = "slurm"
    example = "slurm:8,gpus=1,time=4:00:00,partition=gpu"
    options: ClassVar = {
        "gpus": "GPUs of each worker; 1 where the cluster has any",
        "python": "the Python, or the folder of a virtual environment, to use on the nodes (this one)",
    }
    is_prompt = False

    def __init__(self, what: str) -> None:
        super().__init__(what)
        words, found = self.read(what, passes_on=True)
        self.count = self.read_count(words)
        self._python = _python_in(found.pop("python", "") or sys.executable)
        self._gpus = self.read_number(found, "gpus", 0) if "gpus" in found else None
        found.pop("gpus", None)
        if taken := [key for key in found if key in _OURS]:
            raise ConfigError(f"--on slurm: {taken[0]} is set by guava_nb itself; leave it out")
        if wrong := [key for key in found if not key.replace("-", "").isalnum()]:
            raise ConfigError(f"--on slurm: {wrong[0]!r} is no long option of sbatch")
        self._more = found
        self._job, self._state, self._looked = "", "", 0.0
        self._log = self._code = Path()
        self._over = ""

    def check(self) -> None:
        """Whether Slurm is here, and would take such a job."""
        for program in ("sbatch", "scancel", "squeue", "sinfo"):
            find_program(program, _WAY)
        if self._gpus is None:
            kinds = run_program(["sinfo", "-h", "-o", "%G"])
            if kinds.returncode:
                raise ConfigError(f"Slurm does not answer: {last_line(kinds.stderr)}")
            self._gpus = int("gpu" in kinds.stdout)
        done = run_program(
            ["sbatch", "--test-only", *self._options(Path("/dev/null"))], self._script(Path("/dev/null"))
        )
        if done.returncode:
            raise ConfigError(f"Slurm would not take this job: {last_line(done.stderr)} (--on {self.name}:{self.what})")

    def start(self, order: Order) -> str:
        """Hand the job in."""
        self._code = self.leave_code(order)
        self._log = order.folder / f"{self.mark}.log"
        done = run_program(["sbatch", "--parsable", *self._options(self._log)], self._script(self._code))
        if done.returncode:
            raise ConfigError(f"Slurm did not take the job: {last_line(done.stderr)}")
        self._job = done.stdout.strip().partition(";")[0]
        return f"Slurm has job {self._job} ({self.count} workers); what it prints is in {self._log}"

    def _options(self, log: Path) -> list[str]:
        given = {
            "job-name": self.mark, "ntasks": str(self.count), "output": str(log), "open-mode": "append",
            "signal": f"TERM@{BEFORE_LIMIT_S}", **({"gpus-per-task": str(self._gpus)} if self._gpus else {}), **self._more,
        }  # fmt: skip
        return [f"--{key}={value}" if value else f"--{key}" for key, value in given.items()] + ["--requeue"]

    def _script(self, code: Path) -> str:
        """A task that ends does not end the others, and one that is lost does not end the job."""
        words = worker_words(self._python, str(code), self.mark)
        return f"#!/bin/sh\nexec srun --kill-on-bad-exit=0 --wait=0 {shlex.join(words)}\n"

    def follow(self, code: JoinCode) -> None:
        """Put the new code where tasks look for it when the session is away, and those that start later read it."""
        if self._code.name:
            write_secret(self._code, code.encode())

    def look(self) -> str:
        """Each change of the job's state."""
        if not self._job or self._over or time.monotonic() - self._looked < LOOK_S:
            return ""
        self._looked = time.monotonic()
        done = run_program(["squeue", "-h", "-j", self._job, "-o", "%T (%r)"])
        if done.returncode and "Invalid job id" not in done.stderr:
            return ""
        state = (done.stdout.splitlines() or [""])[0].strip().replace(" (None)", "").lower()
        before, self._state = self._state, state
        if state == before:
            return ""
        if not state:
            self._over = f"Slurm's job {self._job} has ended: {self._last()}"
            return self._over
        return f"Slurm's job {self._job}: {state}"

    def _last(self) -> str:
        try:
            return last_line(self._log.read_text(encoding="utf-8", errors="replace")[-4000:])
        except OSError:
            return f"it wrote nothing into {self._log}"

    def failure(self) -> str:
        """Why no worker comes any more."""
        return self._over

    def end(self) -> str:
        """Take the job back, by its name."""
        if self._code.name:
            remove_secret(self._code)
        done = run_program(["scancel", f"--name={self.mark}", f"--user={getpass.getuser()}"])
        return f"scancel failed: {last_line(done.stderr)}" if done.returncode else ""


def _python_in(path: str) -> str:
    """The program, where a virtual environment's folder was named."""
    folder = Path(path).expanduser()
    return str(folder / "bin" / "python") if folder.is_dir() else str(folder)
