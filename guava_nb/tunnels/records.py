"""Which programs we started: so that after a killed kernel the next start ends what was left, and nothing else.

One small file a program, in a folder that only this user can open. A program is ours when process number, start time and
arguments are those on file; it is left over when the process that started it is gone. Everything else is left alone.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import shutil
import socket
import subprocess
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
import psutil

from guava_nb.config.state_folder import private_temporary_folder, write_private
from guava_nb.errors import ConfigError
from guava_nb.systems import remove

__all__ = ["Record", "began_at", "end_orphans", "end_process", "open_record", "private_folder", "remember", "runs"]

#: Seconds by which the start of one process may seem to move, as the system gives it in whole seconds.
_ROUNDED_S = 2.0
#: Seconds between asking a program to end and ending it.
GRACE_S = 3.0


@dataclass
class Record:
    """What is on file about one program.

    Attributes:
        kind: of tunnel, as `Tunnel.name`.
        nonce: tells this start from every other one.
        host: the machine; several may share a folder.
        owner: process that started it.
        owner_started: when that one started, in seconds since the machine did.
        pid: of the program; 0 as long as it is only about to be started.
        started: when it started, in seconds since the machine did.
        arguments: of the program, without its own name.
    """

    kind: str
    nonce: str
    host: str
    owner: int
    owner_started: float
    pid: int = 0
    started: float = 0.0
    arguments: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        """For the program's own files; made by `open_record`, goes with the record."""
        return private_folder() / f"{self.kind}-{self.nonce}"

    @property
    def _file(self) -> Path:
        return private_folder() / f"{self.kind}-{self.nonce}.json"

    def hold(self, pid: int) -> None:
        """Put the program's process on file; nothing when it has ended already."""
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            self.started, self.arguments = began_at(process), tuple(_words(process)[1:])
            self.pid = pid
            self.save()

    def save(self) -> None:
        """Write the file, at once and whole."""
        try:
            write_private(self._file, json.dumps(asdict(self)).encode())
        except OSError as problem:
            raise ConfigError(
                f"{self._file} cannot be written ({problem.strerror or problem}): make room there, or set TMPDIR to another "
                "folder"
            ) from problem

    def forget(self) -> None:
        """The program has ended: remove the record and its folder. Safe to call twice."""
        shutil.rmtree(self.folder, ignore_errors=True)
        remove(self._file)

    def is_left_over(self) -> bool:
        """Whether who started it is gone. Another machine's records are not ours to judge."""
        return self.host == socket.gethostname() and not runs(self.owner, self.owner_started)

    def process(self) -> psutil.Process | None:
        """The program, if it still runs and is the very one that was started."""
        if not self.pid:
            return self._unnoted()
        if not runs(self.pid, self.started):
            return None
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(self.pid)
            return process if _same(tuple(process.cmdline()[1:]), self.arguments) else None
        return None

    def _unnoted(self) -> psutil.Process | None:
        """Its owner died between the start and the note: only the record's folder among its arguments tells it."""
        for process in psutil.process_iter(["cmdline"]):
            if any(str(self.folder) in word for word in process.info["cmdline"] or ()):
                return process
        return None


def open_record(kind: str) -> Record:
    """Note that a program is about to be started, and make its folder; `hold` follows when it runs."""
    me = psutil.Process()
    record = Record(kind, secrets.token_hex(8), socket.gethostname(), me.pid, began_at(me))
    record.folder.mkdir(mode=0o700)
    record.save()
    return record


def remember(process: psutil.Process | subprocess.Popen[str] | subprocess.Popen[bytes], kind: str) -> Record:
    """Note a program that was just started; `forget` when it has ended."""
    record = open_record(kind)
    record.hold(process.pid)
    return record


def end_orphans(kind: str) -> int:
    """End what earlier processes of ours started and left behind; returns how many programs that were."""
    ended = 0
    for path in sorted(private_folder().glob(f"{kind}-*.json")):
        record = _read(path)
        if record is None or record.kind != kind or not record.is_left_over():
            continue
        process = record.process()
        if process is not None:
            end_process(process)
            ended += 1
        record.forget()
    return ended


def end_process(process: psutil.Process) -> None:
    """Ask a program to end, and end it when it does not; returns when it is gone."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process.terminate()
        if not _gone(process):
            process.kill()
            _gone(process)


def _gone(process: psutil.Process) -> bool:
    """Wait for its end, for so long; what only waits for a parent that never asks counts as ended."""
    deadline = time.monotonic() + GRACE_S
    while time.monotonic() < deadline:
        with contextlib.suppress(psutil.TimeoutExpired):
            process.wait(0.02)
            return True
        if process.status() == psutil.STATUS_ZOMBIE:
            return True
    return False


def private_folder() -> Path:
    """The folder of all records: of this user alone, on this machine.

    Raises:
        ConfigError: as `private_temporary_folder`.
    """
    return private_temporary_folder("guava_nb-tunnels")


def _read(path: Path) -> Record | None:
    """A record, or None when it was taken away or is none."""
    try:
        record = msgspec.json.decode(path.read_bytes(), type=Record)
    except (OSError, msgspec.MsgspecError, ValueError):
        return None
    return record if record._file == path else None


def began_at(process: psutil.Process) -> float:
    """Return when a process began, in seconds since the machine did: a clock that is set moves neither."""
    return float(process.create_time() - psutil.boot_time())


def runs(pid: int, started: float) -> bool:
    """Whether that very process runs, which began at `started` as `began_at` gives it: numbers are given again."""
    try:
        process = psutil.Process(pid)
        return abs(began_at(process) - started) < _ROUNDED_S and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.Error, OverflowError, ValueError):  # gone, or the number of no process
        return False


def _words(process: psutil.Process) -> list[str]:
    """Its command line, which is empty for a moment after the system has begun to load a program."""
    deadline = time.monotonic() + GRACE_S
    while not (words := process.cmdline()) and time.monotonic() < deadline:
        time.sleep(0.001)
    return words


def _same(now: tuple[str, ...], then: tuple[str, ...]) -> bool:
    """Whether arguments agree; the first ones may differ: a script puts its interpreter in front, or another program."""
    count = max(1, min(len(now), len(then)) - 1)
    return bool(now and then) and now[-count:] == then[-count:]
