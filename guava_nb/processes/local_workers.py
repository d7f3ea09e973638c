"""Starts worker processes and watches them.

One process per device, spawned or forked from a clean nursery, never from a kernel and never inside it: memory is freed by
ending it, CUDA state in the notebook does not matter. It has a process session of its own, because an interrupted cell sends
SIGINT to the kernel's whole process group. The join code goes through a pipe, so no process list shows it.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import secrets
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import msgspec

from guava_nb.config import DistributedConfig
from guava_nb.config.state_folder import make_private_folder
from guava_nb.errors import GuavaError, JoinCodeError
from guava_nb.link.dialler import visit
from guava_nb.link.options import LinkOptions, link_options
from guava_nb.processes.nursery import WORKER_WORDS, ForkedProcess, find_nursery, worker_environment
from guava_nb.processes.old_logs import forget_old
from guava_nb.processes.pipe import (
    EXIT_AGAIN,
    EXIT_LOST,
    EXIT_OK,
    EXIT_REFUSED,
    MARK,
    MAX_LINE_CHARS,
    ending_text,
)
from guava_nb.processes.pulse import PulseWatch
from guava_nb.protocol.joincode import JoinCode, check_same_session
from guava_nb.protocol.messages import CrashReport
from guava_nb.status import OwnFigures
from guava_nb.systems import own_group

__all__ = ["ListenAt", "WorkerHandle", "WorkerState", "close_all", "launch", "lines_of"]


#: Enough for the traceback of a crash below Python together with what was printed before it.
TAIL_LINES = 120
#: Bytes of output read at once; characters after which a worker's log file grows no more.
_BLOCK_BYTES, MAX_LOG_CHARS = 64 << 10, 64 << 20
#: Times that a worker's process is replaced that lost its device or was blocked for ever: more often, the cause comes again.
MOST_REPLACED = 3


@dataclass(frozen=True, slots=True)
class ListenAt:
    """Where a worker listens; port 0 takes a free one."""

    host: str = "127.0.0.1"
    port: int = 0


@dataclass(frozen=True, slots=True)
class WorkerState:
    """What a worker process last said of itself.

    Attributes:
        state: "starting", "listening", "joining", "ready", "preparing", "working", "validating", "reconnecting", "left",
            "failed" or "crashed".
        step: optimizer steps applied so far in the present run.
        lines: its last printed lines.
        joined: it was in the session once.
        error: name of the error that it failed with.
        figures: what it measured of itself, at most some two seconds ago.
    """

    state: str
    name: str
    step: int
    device: str
    address: str
    detail: str = ""
    lines: tuple[str, ...] = ()
    exit_status: int | None = None
    joined: bool = False
    error: str = ""
    figures: OwnFigures = OwnFigures()


class WorkerHandle:
    """A worker process that this process started. Thread-safe."""

    def __init__(
        self,
        code: JoinCode | ListenAt,
        device: str,
        name: str,
        threads: int | None,
        log_path: Path | None,
        config: DistributedConfig | None = None,
    ) -> None:
        """Start the process."""
        self._config = config or DistributedConfig()
        self._listens = code if isinstance(code, ListenAt) else None
        self._code = code if isinstance(code, JoinCode) else None
        self._device, self._wanted = device, name
        self._identity = secrets.token_bytes(32)
        self._log_path = log_path
        self._last: dict[str, Any] = {"state": "starting", "step": -1, "detail": ""}
        self._name, self._joined, self._figures = name, False, OwnFigures()
        self._lines: deque[str] = deque(maxlen=TAIL_LINES)
        self._partial, self._logged = "", 0
        self._ended = threading.Event()
        self._killed = self._leaves = False
        self._threads, self._replaced = threads, 0
        self._has_saved = False  # another process goes on from the state on this disk
        self._process = self._spawn(threads)
        self._vitals = PulseWatch(link_options(self._config), self._identity, self._watched, self._ended)
        threading.Thread(target=self._watch, name="guava-watch", daemon=True).start()

    def _spawn(self, threads: int | None) -> subprocess.Popen[str] | ForkedProcess:
        process = _forked(worker_environment(threads)) or _spawned(worker_environment(threads))
        order = {
            "code": None if self._code is None else self._code.encode(),
            "listen": None if self._listens is None else [self._listens.host, self._listens.port],
            "device": self._device,
            "name": self._wanted,
            "identity": self._identity.hex(),
            "threads": threads,
            "config": self._config.to_dict(),
        }
        assert process.stdin is not None
        with contextlib.suppress(OSError):  # it died at once: `_watch` reports it with its last lines
            process.stdin.write(json.dumps(order) + "\n")
            process.stdin.flush()
        return process

    # --------------------------------------------------------------------------------------------------------- watching

    def _watch(self) -> None:
        log = self._open_log()
        with log or contextlib.nullcontext():
            status = self._follow(log)
            while self._is_replaced(status):
                self._replaced += 1
                cause = f"its process cannot go on ({self._last['detail']}) and is replaced"
                if status != EXIT_AGAIN:
                    self._on_crash(status)  # so that no one waits for it
                    cause = f"{self._last['detail']}. Another process goes on from the state on this disk"
                self._last = {
                    "state": "starting",
                    "step": -1,
                    "detail": f"{cause}: {self._replaced} of {MOST_REPLACED} times",
                }
                self._process = self._spawn(self._threads)
                status = self._follow(log)
        if status not in (EXIT_OK, EXIT_REFUSED, EXIT_LOST, EXIT_AGAIN):
            self._on_crash(status)
        self._ended.set()

    def _is_replaced(self, status: int | None) -> bool:
        """Whether another process takes the place of one that ended so: it lost its device, or left a state on the disk."""
        is_loss = status not in (None, EXIT_OK, EXIT_REFUSED, EXIT_LOST) and self._has_saved and self._listens is None
        return (
            (status == EXIT_AGAIN or is_loss) and self._replaced < MOST_REPLACED and not (self._killed or self._leaves)
        )

    def _follow(self, log: IO[str] | None) -> int:
        """Read what the process says until it ends; returns its exit status."""
        process = self._process
        assert process.stdout is not None
        for lines in lines_of(process.stdout):
            for line in lines:
                self._on_line(line, log)
            if log is not None:
                log.flush()
        if self._partial:
            self._on_line("", log)
        status = process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        return status

    def _open_log(self) -> IO[str] | None:
        if self._log_path is None:
            return None
        try:
            make_private_folder(self._log_path.parent)
            return self._log_path.open("a", encoding="utf-8")
        except OSError as error:  # its output must be read all the same, or it would wait for us when the pipe is full
            self._lines.append(f"what this worker prints is not kept on disk: {error}")
            return None

    def _watched(self) -> tuple[JoinCode, str, int, int] | None:
        """What is told of it to the orchestrator while it is silent; None: it has not joined, or is dialled from there."""
        code, last = self._code, self._last
        if code is None or self._listens is not None or not self._joined or last["state"] in ("starting", "joining"):
            return None
        return code, str(last["state"]), int(last["step"]), self._process.pid

    def _on_line(self, line: str, log: IO[str] | None) -> None:
        text, mark, record = line.partition(MARK)
        line, self._partial = self._partial + text, ""
        if mark:
            self._partial = line[
                -_BLOCK_BYTES:
            ]  # the user's code had not ended its line when the state came in between
            self._vitals.heard()
            self._on_state(record)
            return
        self._lines.append(line[:MAX_LINE_CHARS])
        if log is not None and self._logged < MAX_LOG_CHARS:
            self._logged += len(line)
            log.write(line + "\n" if self._logged < MAX_LOG_CHARS else "(no more is kept of what this worker prints)\n")

    def _on_state(self, record: str) -> None:
        try:
            last = json.loads(record)
            if "saved" in last:
                self._has_saved = True
                return
            if "figures" in last:
                self._figures = msgspec.convert(last["figures"], OwnFigures)
                return
            if self._listens is not None and last.get("code"):
                self._code = JoinCode.decode(last["code"])
            last = {
                "state": str(last["state"]), "step": int(last["step"]), "detail": str(last["detail"]),
                "error": str(last.get("error", "")),
            }  # fmt: skip
        except (AttributeError, ValueError, TypeError, KeyError, JoinCodeError, msgspec.ValidationError):
            return  # something wrote into the middle of it, or printed the mark; the next one will do
        if last["state"] in ("left", "failed", "ready") and last["step"] < 0:  # of the run that is over
            last["step"] = self._last["step"]
        self._last = last
        self._joined = self._joined or last["state"] == "ready"
        if last["state"] in ("ready", "working") and last["detail"]:
            self._name = last["detail"]

    def _on_crash(self, status: int) -> None:
        lines = tuple(self._lines)
        if self._killed:
            self._last = {"state": "left", "step": self._last["step"], "detail": "ended on request"}
        else:
            self._last = {"state": "crashed", "step": self._last["step"], "detail": ending_text(status, lines)}
        if self._code is None or self._listens is not None or (self._killed and not self._joined):
            return  # no orchestrator knows of it yet, or the one that dials it notices by itself
        report = CrashReport(status, lines)
        with contextlib.suppress(GuavaError):  # the orchestrator may be gone as well; it notices the loss by itself
            visit(self._code, self._identity, report, LinkOptions(connect_timeout_s=5.0))

    # --------------------------------------------------------------------------------------------------- for the user

    @property
    def pid(self) -> int:
        """The process's number."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process runs, or is being replaced."""
        status = self._process.poll()
        return not self._ended.is_set() and (status is None or self._is_replaced(status))

    @property
    def code(self) -> JoinCode | None:
        """Where it joined; of one that listens, what to dial it with, None until it does."""
        return self._code

    def status(self) -> WorkerState:
        """Return what it last said of itself."""
        last = self._last
        return WorkerState(
            state=str(last["state"]),
            name=self._name or self._wanted,
            step=int(last["step"]) + 1,
            device=self._device,
            address="" if self._code is None else self._code.address,
            detail="" if last["detail"] == self._name else str(last["detail"]),
            lines=tuple(self._lines),
            exit_status=self._process.poll(),
            joined=self._joined,
            error=str(self._last.get("error", "")),
            figures=self._figures,
        )

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for its end; returns whether it has ended."""
        return self._ended.wait(timeout_s)

    def leave(self) -> None:
        """Ask it to leave after the step in work."""
        self._leaves = True
        self._order("leave")

    def redirect(self, code: JoinCode | str) -> None:
        """Let it dial the same session by another code from now on, as when a tunnel got another address.

        Raises:
            JoinCodeError: the code is damaged, belongs to another session, or this worker does not dial; nothing has changed.
        """
        new = code if isinstance(code, JoinCode) else JoinCode.decode(code)
        if self._code is None or self._listens is not None:
            raise JoinCodeError("this worker listens: the other side dials it, and the new code is for that side")
        check_same_session(self._code, new)
        self._code = new
        self._order(f"dial {new.encode()}")

    def _order(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # it has ended already
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()

    def kill(self) -> None:
        """End the process now."""
        self._killed = True
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    def close(self, timeout_s: float = 5.0) -> None:
        """Ask it to leave, and end it if it does not within `timeout_s`."""
        close_all([self], timeout_s)

    def __repr__(self) -> str:
        """One line without secrets."""
        state = self.status()
        return f"WorkerHandle({state.name or state.device}: {state.state}, {state.address or 'no address'}, pid {self.pid})"


def lines_of(stream: IO[str]) -> Iterator[list[str]]:
    """Give the lines of a process's output as they come, in blocks: a flood costs one call a block, and bounded memory.

    A carriage return ends a line too, and within a block the next one takes its place, as on a terminal. Of a line without an
    end the last 64 KiB are kept.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    source, rest, data = stream.buffer, "", b" "  # type: ignore[attr-defined]
    while data:
        data = source.read1(_BLOCK_BYTES)
        *whole, last = (rest + decoder.decode(data, not data)).split("\n")
        done, mark, rest = last.rpartition("\r")
        rest = rest[-_BLOCK_BYTES:]
        ended = [line.rstrip("\r").rpartition("\r")[2] for line in (*whole, *([done] if mark else []))]
        yield ended if data or not rest else [*ended, rest]


def _forked(environment: Mapping[str, str]) -> ForkedProcess | None:
    """Return a process from the nursery of this environment; None where there is none, or it has ended."""
    nursery = find_nursery(environment)
    if nursery is not None:
        with contextlib.suppress(OSError):
            return ForkedProcess(nursery)
    return None


def _spawned(environment: Mapping[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        WORKER_WORDS,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="replace",
        env=environment,
        **own_group(),
    )


def close_all(workers: Sequence[WorkerHandle], timeout_s: float = 5.0) -> None:
    """Ask all to leave, then end those that have not within `timeout_s` together."""
    deadline = time.monotonic() + timeout_s
    for worker in workers:
        if worker.alive:
            worker.leave()
    for worker in workers:
        if not worker.wait(max(0.0, deadline - time.monotonic())):
            worker.kill()
            worker.wait(timeout_s)


def launch(
    code: JoinCode | ListenAt,
    device: str = "auto",
    name: str = "",
    threads: int | None = None,
    log_folder: Path | None = None,
    config: DistributedConfig | None = None,
) -> WorkerHandle:
    """Start one worker process for one device.

    Args:
        code: the session to join, or where to listen for orchestrators.
        threads: torch's threads in it; None leaves torch's choice.
        log_folder: where a file with everything it prints goes.
        config: how patient its link is; None takes the defaults.
    """
    path = None
    if log_folder is not None:
        safe = "".join(c if c.isalnum() or c in "-_." else "_" for c in name or device)
        forget_old(log_folder, "worker-")
        path = log_folder / f"worker-{safe}-{time.strftime('%Y%m%d-%H%M%S')}.log"
    return WorkerHandle(code, device, name, threads, path, config)
