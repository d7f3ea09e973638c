"""`guava run`: runs an unchanged torch.distributed program in this process; its process group goes through a hub."""

from __future__ import annotations

import argparse
import atexit
import importlib.util
import os
import runpy
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from guava_nb.cli.meeting import board_of, meet_at_board
from guava_nb.cli.orchestrate import SEVERAL, orchestrate
from guava_nb.cli.worker import VARIABLE, ask_for_code, read_code
from guava_nb.errors import ConfigError
from guava_nb.launchers.task_place import TaskPlace, number_of, task_place, way_to_a_place

if TYPE_CHECKING:
    from guava_nb.backend.preset_group import Place, ProgramGroup

__all__ = ["Outcome", "add_command", "place_from", "run_program"]

BACKENDS = ("auto", "guava", "gloo", "nccl")
WAIT_S = 300.0
#: Who says which rank a process is that nothing else speaks of.
LINE = "the line"
EXIT_INTERRUPTED = 130

EPILOG = f"""\
The program is started once per rank, as torchrun would start it: it finds RANK, WORLD_SIZE and LOCAL_RANK in its
environment, and whatever init_process_group(...) it calls gets a group that needs nothing but the hub. The hub is any
open session (%guava_up, or Orchestrator.open()); its join code may also stand in {VARIABLE}, where no process list shows
it. Under torchrun, mpirun and srun no code is needed, rank 0 has the hub: mpirun -n 4 guava run train.py

With --orchestrate the program is a script with an Orchestrator: rank 0 runs it, the other ranks are the workers of each session
that it opens: torchrun --nproc-per-node 4 -m guava_nb run --orchestrate train.py. Rank 0 computes nothing, so start one process
more than there are GPUs.
"""


def add_command(commands: Any) -> None:
    """Declare the subcommand and its options."""
    parser = commands.add_parser(
        "run", help="run a torch.distributed program over a session", description=__doc__, epilog=EPILOG
    )
    parser.add_argument("--join", metavar="JOINCODE", help="the join code that %%guava_up shows (see below)")
    parser.add_argument("--rank", type=int, metavar="R", help="number of this process, from 0 ($RANK)")
    parser.add_argument("--world-size", type=int, metavar="N", help="number of processes ($WORLD_SIZE)")
    parser.add_argument(
        "--backend",
        choices=BACKENDS,
        default="auto",
        help="auto is guava, which needs only the hub; gloo and nccl need machines that reach each other",
    )
    parser.add_argument(
        "--job", default="program", metavar="NAME", help="for several programs at one hub (%(default)s)"
    )
    parser.add_argument(
        "--wait", type=float, default=WAIT_S, metavar="S", help="seconds to wait for the other ranks (%(default)g)"
    )
    parser.add_argument(
        "--orchestrate",
        action="store_true",
        help="rank 0 runs the program, the other ranks are its workers (see below)",
    )
    parser.add_argument("-m", dest="module", action="store_true", help="the program is a module, as in python -m")
    parser.add_argument("program", metavar="script.py", help="the program")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="its own arguments")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Meet the other ranks, run the program, leave; the exit status is the program's."""
    _check_program(args.program, args.module)
    if args.orchestrate:
        return orchestrate(
            args, task_of(args, os.environ), lambda: run_program(args.program, args.arguments, args.module).status
        )
    place = place_from(args, os.environ)
    at_exit = ExitStack()
    with ExitStack() as now:
        group = now.enter_context(_met(place, args, os.environ))
        os.environ.update(group.environment())
        # Before the program registers functions of its own, which then run before this, as threads that it left do.
        atexit.register(at_exit.close)
        with _interrupts(group.interrupt):
            outcome = run_program(args.program, args.arguments, args.module)
        if outcome.failure:  # the other ranks shall know at once
            group.close(outcome.failure)
        else:
            at_exit.enter_context(now.pop_all())
    if outcome.status == EXIT_INTERRUPTED:
        raise KeyboardInterrupt
    return outcome.status


def _met(
    place: Place, args: argparse.Namespace, environ: MutableMapping[str, str]
) -> AbstractContextManager[ProgramGroup]:
    """The group of this place: at a hub whose code is known, by torchrun's store, or found by what started the processes."""
    if place.code is not None or environ.get("MASTER_ADDR"):
        if place.code is None and number_of(environ, "MASTER_PORT") is None:
            raise ConfigError(
                "MASTER_ADDR is set and MASTER_PORT is not: set both, the same in all processes, or neither"
            )
        from guava_nb.backend.preset_group import ProgramGroup

        return ProgramGroup(place, _say)
    task = task_of(args, environ)
    return meet_at_board(place, task, board_of(task, environ, place.wait_s), _say)


def task_of(args: argparse.Namespace, environ: MutableMapping[str, str]) -> TaskPlace:
    """The place as the line says it, else as what started this process says it; torchrun's variables then say the same.

    Raises:
        ConfigError: it is not told.
    """
    found = task_place(environ)
    told = (number_of(environ, "RANK"), number_of(environ, "WORLD_SIZE"))
    if found is not None:
        _refuse_leftovers(found, environ)
        told = (found.rank, told[1] if found.world_size is None else found.world_size)
    way = SEVERAL if args.orchestrate and told == (None, None) else way_to_a_place(environ)
    rank = _number("--rank", args.rank, "RANK", told[0], way)
    size = _number("--world-size", args.world_size, "WORLD_SIZE", told[1], way)
    task = TaskPlace(LINE, rank, size) if found is None else replace(found, rank=rank, world_size=size)
    if found is not None:
        environ.update({name: value for name, value in task.variables().items() if name.startswith("LOCAL_")})
    return task


def _refuse_leftovers(found: TaskPlace, environ: MutableMapping[str, str]) -> None:
    """Refuse torchrun's variables that something else left: a starter within a starter has as many processes, or more."""
    outer = task_place({name: text for name, text in environ.items() if name not in ("RANK", "WORLD_SIZE")})
    size = None if outer is None else outer.world_size
    if outer is not None and size is not None and found.world_size is not None and found.world_size < size:
        raise ConfigError(
            f"RANK is {found.rank} and WORLD_SIZE {found.world_size}, and {outer.by} says that this is rank {outer.rank} of "
            f"{size}: unset RANK and WORLD_SIZE, which something else has left"
        )


def _refuse_unlike(task: TaskPlace, environ: MutableMapping[str, str]) -> None:
    """Refuse a line with other numbers than what started the processes says: it is the same for all of them.

    A line may say more processes: each that was started may start several.
    """
    found = task_place(environ)
    if found is None or found.world_size is None or task.world_size is None or task.world_size > found.world_size:
        return
    for option, given, told in (
        ("--rank", task.rank, found.rank), ("--world-size", task.world_size, found.world_size)
    ):  # fmt: skip
        if given != told:
            raise ConfigError(
                f"{option} is {given} on the line, and {found.by} says {told}: leave {option} out, "
                "or give a join code (--join)"
            )


def place_from(args: argparse.Namespace, environ: MutableMapping[str, str]) -> Place:
    """Read which rank this is from the line or the environment.

    Raises:
        ConfigError: it is not told, or there is no such rank.
    """
    task = task_of(args, environ)
    rank, size = task.rank, task.world_size or 0
    if args.wait <= 0:
        raise ConfigError(f"--wait must be above 0 seconds, not {args.wait:g}")
    launched = args.join is None and VARIABLE not in environ and (bool(environ.get("MASTER_ADDR")) or task.by != LINE)
    if launched:
        _refuse_unlike(task, environ)
    code = None if launched else read_code(args.join, environ, ask_for_code)
    from guava_nb.backend.preset_group import Place  # imports torch, which takes seconds: a wrong line is told before

    return Place(rank, size, code, args.job, "guava" if args.backend == "auto" else args.backend, args.wait)


def _number(option: str, given: int | None, variable: str, told: int | None, way: str) -> int:
    number = told if given is None else given
    if number is None:
        raise ConfigError(f"{option} is missing, and {variable} is not set: {way}")
    return number


def _check_program(program: str, module: bool) -> None:
    if module:
        sys.path.insert(0, os.getcwd())
        try:
            found = importlib.util.find_spec(program) is not None
        except (ImportError, ValueError):
            found = False
        finally:
            sys.path.pop(0)
        if not found:
            raise ConfigError(
                f"there is no module {program!r} in this environment: install it here, or give the path of the program "
                "without -m"
            )
    elif not Path(program).exists():
        raise ConfigError(f"there is no program {program!r} in {os.getcwd()}: give its path from there")


# ------------------------------------------------------------------------------------------------------- the program


@dataclass(frozen=True)
class Outcome:
    """How a program ended.

    Attributes:
        status: for the shell.
        failure: in words, for the other ranks; "" when it came to its end.
    """

    status: int
    failure: str = ""


def run_program(program: str, arguments: list[str], module: bool = False) -> Outcome:
    """Run a script or a module as `__main__` in this process, as python would.

    Its traceback is shown as python would show it, without the frames that led to it.
    """
    sys.argv = [program, *arguments]
    sys.path.insert(0, os.getcwd() if module else str(Path(program).resolve().parent))
    try:
        if module:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(program, run_name="__main__")
    except SystemExit as ended:
        return _of_exit(ended.code)
    except KeyboardInterrupt:
        return Outcome(EXIT_INTERRUPTED, "its program was interrupted")
    except BaseException as error:
        error.__traceback__ = _from_program(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        return Outcome(1, f"its program ended with {type(error).__name__}: {' '.join(str(error).split())[:200]}")
    return Outcome(0)


def _of_exit(code: object) -> Outcome:
    if code is None or code == 0:
        return Outcome(0)
    if not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    return Outcome(code, f"its program ended with exit status {code}")


def _from_program(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_frame.f_globals.get("__name__") in (__name__, "runpy"):
        trace = trace.tb_next
    return trace


@contextmanager
def _interrupts(wake: Callable[[], None]) -> Iterator[None]:
    """An interrupt in the block also wakes who waits inside torch, where Python's own handler is not reached.

    A program that handles interrupts itself is left alone.
    """
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)

    def watch() -> None:
        while numbers := ours.recv(64):
            if signal.SIGINT in numbers and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                wake()

    before = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    watcher = threading.Thread(target=watch, name="guava-interrupts", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        theirs.close()
        watcher.join()
        ours.close()


def _say(line: str) -> None:
    print(f"guava: {line}", file=sys.stderr, flush=True)
