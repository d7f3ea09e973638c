"""`guava worker`: joins a session with one process per device, or listens for one, and says what they do until they end."""

from __future__ import annotations

import argparse
import contextlib
import getpass
import os
import signal
import socket
import sys
from collections.abc import Callable, MutableMapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from guava_nb.cli.join_file import JoinFile
from guava_nb.cli.live import LiveLines, live_lines
from guava_nb.cli.pasting import PastedLines
from guava_nb.config.state_folder import make_private_folder, state_folder, write_private
from guava_nb.errors import ConfigError
from guava_nb.launchers.task_place import TaskPlace, task_place
from guava_nb.processes.gpu_driver import check_device
from guava_nb.processes.interrupts import interrupts_counted
from guava_nb.render import redact, to_text, worker_view

if TYPE_CHECKING:
    from guava_nb.processes.local_workers import WorkerHandle, WorkerState
    from guava_nb.protocol.joincode import JoinCode

__all__ = ["add_command", "ask_for_code", "devices_for", "follow", "own_device", "read_code"]

VARIABLE = "GUAVA_JOIN_CODE"
POLL_S = 0.5
_LEAVING = (
    "leaving after this step, when the orchestrator has what only this worker holds; interrupt again to end it now"
)
CRASH_LINES = 10
#: Of what a worker printed, in the lines that are written over.
LIVE_LINES = 3
ENDED = frozenset({"left", "failed", "crashed"})
AWAY = "reconnecting"

EPILOG = f"""\
The join code is a secret. As an argument it can be seen in this machine's process list while the command runs. Safer
are the variable {VARIABLE}, or no code at all: then you are asked for it and it is not shown. A program that starts this
command gives --join-file: a file that only this user can read, or "-" and one line of standard input. The file is read again,
and the next line is read, when the session is away: a new code leads there. Where torchrun, Slurm or an MPI starts several of
these on one machine, each takes the GPU of its local rank.
"""

NOTICE = """\
Joining lets the orchestrator run its Python code on this machine, as you. Join only sessions that you trust.
Free Colab runtimes do not allow distributed workers and may be ended; paid plans with compute units do allow them."""


def add_command(commands: Any) -> None:
    """Declare the subcommand and its options."""
    parser = commands.add_parser("worker", help="join a session from this machine", description=__doc__, epilog=EPILOG)
    parser.add_argument("code", nargs="?", metavar="JOINCODE", help="the join code that %%guava_up shows (see below)")
    parser.add_argument(
        "--join-file", metavar="FILE", help="a file with the join code; - is standard input (see below)"
    )
    parser.add_argument("--listen", action="store_true", help="wait to be dialled, and show the join code, or its file")
    parser.add_argument("--host", default="127.0.0.1", help="with --listen: address to listen on (127.0.0.1)")
    parser.add_argument("--port", type=int, default=0, help="with --listen: port, of the first device (any free one)")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--device", default="auto", help="cpu, cuda, cuda:1, mps; auto takes a GPU if there is one")
    where.add_argument(
        "--gpus",
        metavar="all",
        help="one worker for each GPU: all, or their numbers (0,2); auto: all, or the processor",
    )
    parser.add_argument(
        "--end-with-input", action="store_true", help="leave when standard input ends, with --join-file -"
    )
    parser.add_argument(
        "--mark", metavar="WORD", help="has no effect; a program finds by it the workers that it started"
    )
    parser.add_argument(
        "--asked-status", type=int, default=0, metavar="N", help="exit with N when a signal made it leave (%(default)s)"
    )
    parser.add_argument("--name", default="", help="name of this worker in tables and logs (host and device)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Join and stay until the session ends; 0 when every worker left as it should."""
    if args.listen and (args.code or args.join_file):
        raise ConfigError("--listen waits to be dialled, so it takes no join code: leave one of the two out")
    if args.code and args.join_file:
        raise ConfigError("a join code and --join-file were given: leave one of the two out")
    check_device("cuda" if args.gpus not in (None, "auto") else args.device)
    _end_as_process_1()
    file = JoinFile(args.join_file, args.end_with_input) if args.join_file else None
    code = None if args.listen else read_code(file.first() if file else args.code, os.environ, ask_for_code)
    print(NOTICE, file=sys.stderr)
    devices = devices_for(args.gpus, own_device(args.device, task_place(os.environ)))
    names = [args.name if len(devices) == 1 or not args.name else f"{args.name}-{k}" for k in range(len(devices))]
    workers: list[WorkerHandle] = []
    pasted = file or PastedLines()
    try:
        for k, (device, name) in enumerate(zip(devices, names, strict=True)):
            workers.append(_listening(args, k, device, name) if code is None else _joining(code, device, name))
        live = live_lines(sys.stdout)
        say = _say if live is None else live.say
        asked: list[int] = []
        status = follow(
            workers,
            say,
            pasted=None if code is None else pasted.take,
            live=live,
            asked=lambda: asked.append(args.asked_status),
        )
        return status or max(asked, default=0)
    finally:
        pasted.close()
        for worker in workers:
            if args.listen:
                _forget_code(worker)
            worker.close()


def _end_as_process_1() -> None:
    """As the first process of a container: the kernel delivers it no signal that it has no handler for."""
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def own_device(device: str, place: TaskPlace | None) -> str:
    """The device of this process where others were started with it on this machine: the GPU of its local rank."""
    if device != "auto" or place is None or (place.local_size or 1) == 1:
        return device
    from guava_nb.telemetry.hardware import visible_devices

    here = [found for found in visible_devices() if found != "cpu"]
    if len(here) < 2:  # none, or the one that its starter gave it
        return device
    return here[place.local_rank % len(here)]


def _joining(code: JoinCode, device: str, name: str) -> WorkerHandle:
    from guava_nb.worker.network_worker import (
        start_worker,  # imports torch, which takes seconds: a wrong code is told before
    )

    return start_worker(code, device, name)


def _listening(args: argparse.Namespace, k: int, device: str, name: str) -> WorkerHandle:
    from guava_nb.worker.network_worker import start_listening_worker

    return start_listening_worker(args.host, args.port + k if args.port else 0, device, name)


def read_code(given: str | None, environ: MutableMapping[str, str], ask: Callable[[], str]) -> JoinCode:
    """Take the join code from the line, the environment, or the person.

    The variable is removed from `environ`, so that no code that runs later in this process or its children finds it.

    Raises:
        ConfigError: there is none, or it is damaged.
    """
    from guava_nb.protocol.joincode import JoinCode

    from_environment = environ.pop(VARIABLE, "")
    text = given or from_environment or ask()
    if not text.strip():
        raise ConfigError(f"no join code: give the one that the orchestrator shows, or set {VARIABLE}")
    return JoinCode.decode(text)


def devices_for(gpus: str | None, device: str) -> list[str]:
    """Return the devices to start a worker on.

    Args:
        gpus: "all", "auto", numbers with commas between them, or None.
        device: used without `gpus`.

    Raises:
        ConfigError: no GPU here, or no such number.
    """
    if gpus is None:
        return [device]
    from guava_nb.telemetry.hardware import visible_devices

    here = [found for found in visible_devices() if found != "cpu"]
    if not here and gpus == "auto":
        return ["cpu"]
    if not here:
        raise ConfigError("--gpus: torch sees no GPU here; `guava doctor` says why, and --device cpu works everywhere")
    wanted = here if gpus in ("all", "auto") else [f"cuda:{number.strip()}" for number in gpus.split(",")]
    missing = [name for name in wanted if name not in here]
    if missing:
        raise ConfigError(f"--gpus {gpus}: {', '.join(missing)} not here; here are: {', '.join(here)}")
    return list(dict.fromkeys(wanted))


def follow(
    workers: Sequence[WorkerHandle],
    say: Callable[[str], None],
    poll_s: float = POLL_S,
    pasted: Callable[[], list[str]] | None = None,
    live: LiveLines | None = None,
    asked: Callable[[], None] = lambda: None,
) -> int:
    """Say each change of state until all have ended, and show below it what they do, where lines can be written over.

    The first interrupt, or SIGTERM (Slurm, Kubernetes, a spot machine that is taken away), lets each worker leave after the
    step in work, the second ends the processes.

    Args:
        pasted: gives lines of standard input, looked at while a session is away: one with its new join code leads there.
        live: where what they do is shown; nothing meanwhile, so that what is pasted has a line of its own.
        asked: called at each interrupt and SIGTERM.

    Returns:
        0 when all left as they should, else 1.
    """
    said, heard = [""] * len(workers), 0
    with interrupts_counted(
        signal.SIGTERM
    ) as interrupts:  # raised in the middle of a drawing they would leave half of it there
        while True:
            alive = [worker for worker in workers if not worker.wait(0)]
            if alive:
                alive[0].wait(poll_s)
            if heard < interrupts.count:
                heard += 1
                asked()
                say(_LEAVING if heard == 1 else "ending now")
                for worker in workers:
                    worker.leave() if heard == 1 else worker.kill()
                continue
            told = [worker.status() for worker in workers]
            if live is not None:  # first, so that what is said of one that has ended has no old drawing below it
                live.draw(
                    "" if AWAY in {status.state for status in told} else "\n".join(filter(None, map(_panel, told)))
                )
            for worker, status, last in zip(workers, told, said, strict=True):
                if status.state != last:
                    _say_change(worker, status, say)
            said = [status.state for status in told]
            if not alive:
                return 0 if all(state == "left" for state in said) else 1
            if pasted is not None and AWAY in said:
                _follow_codes(alive, pasted(), say)


def _panel(status: WorkerState) -> str:
    """What one worker does, as its own notebook would show it, with the last lines that it printed; "" after its end."""
    if status.state in ENDED:
        return ""
    return "\n".join([to_text(worker_view(status)), *(f"  | {redact(line)}" for line in status.lines[-LIVE_LINES:])])


def _follow_codes(workers: Sequence[WorkerHandle], lines: Sequence[str], say: Callable[[str], None]) -> None:
    """Lead the workers by each join code among the lines; never shows one."""
    from guava_nb.errors import JoinCodeError
    from guava_nb.protocol.joincode import JoinCode

    for line in filter(str.strip, lines):
        try:
            code = JoinCode.decode(line)
            for worker in workers:
                worker.redirect(code)
        except JoinCodeError as problem:
            say(f"not used: {problem}")
        else:
            say(f"dialling the session at {code.address} now")


def _say_change(worker: WorkerHandle, status: WorkerState, say: Callable[[str], None]) -> None:
    """Say the worker's new state, and what stays of it."""
    detail = f" ({status.detail})" if status.detail and status.state in (*ENDED, AWAY) else ""
    say(f"{status.name or status.device}: {status.state}{detail}, {status.address or 'no address yet'}")
    if status.state == "listening" and worker.code is not None:
        say(f"    {_how_to_dial(worker.code)}")
    if status.state == AWAY:
        say("    if the session has a new join code, paste it here and press Enter: the work goes on where it was")
    if status.state in ENDED:
        for line in to_text(worker_view(status)).splitlines()[1:]:  # its first line was just said
            if line.startswith("  "):
                say(f"  {line}")
    if status.state in ("failed", "crashed"):
        for line in status.lines[-CRASH_LINES:]:
            say(f"    {line}")


def _how_to_dial(code: JoinCode) -> str:
    """How to dial a worker that listens: its code, or the file that has it where what is said here may be kept."""
    if sys.stdout.isatty():
        return f"dial it with  %guava_up --connect {code.encode()}"
    path = _code_file(code)
    try:
        make_private_folder(path.parent)
        write_private(path, f"{code.encode()}\n".encode())
    except OSError as problem:
        return f"its join code cannot be kept in {path} ({problem.strerror or problem}): start it in a terminal, which shows it"
    return f"its join code is in {path}, for you alone: %guava_up --connect asks for it"


def _code_file(code: JoinCode) -> Path:
    """Where the code of a worker that listens is kept: machines may share a home, and a machine has many workers."""
    return state_folder() / f"listening-{socket.gethostname()}-{os.getpid()}-{code.port}.code"


def _forget_code(worker: WorkerHandle) -> None:
    """Remove the file with the code of a worker that listened: it is over."""
    if worker.code is not None:
        with contextlib.suppress(OSError):
            _code_file(worker.code).unlink()


def ask_for_code() -> str:
    """Ask the person at the terminal without echo; "" where there is none."""
    if not sys.stdin.isatty():
        return ""
    return getpass.getpass("Join code (not shown): ")


def _say(line: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # the reader is gone; the work goes on
        print(line, flush=True)
