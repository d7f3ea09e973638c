"""Runs the user's cells at this worker, in one namespace that stays, and answers what was asked of it.

Knows the records of `code_records` and Python; knows no run. The random state of runs is kept apart from that of cells.
"""

from __future__ import annotations

import ast
import ctypes
import difflib
import linecache
import os
import signal
import sys
import threading
import types
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from guava_nb.config.units import show_bytes
from guava_nb.data.randomness import RandomState
from guava_nb.errors import ConfigError, GroupBroken
from guava_nb.protocol.messages import (
    CodeRan,
    CodeValues,
    InstallPackages,
    Message,
    PlaceFiles,
    RunCode,
    RunProgram,
)
from guava_nb.spec.cell_checks import file_name, source_lines
from guava_nb.spec.missing_modules import absent_part, missing_package
from guava_nb.spec.plain_values import pack_values, unpack_values
from guava_nb.worker.error_text import NOTE, error_text, lost_device, trace_text
from guava_nb.worker.process_group import GroupSeat
from guava_nb.worker.user_code.packages import install
from guava_nb.worker.user_code.program import ProgramEnded, run_program
from guava_nb.worker.user_code.user_files import FileFolder

__all__ = ["CellRunner", "Interruptible"]

# A call that another thread can interrupt, also where it sleeps. Knows signals and threads, and nothing of what is called.

_Result = TypeVar("_Result")


class Interruptible:
    """Runs one call at a time; `interrupt` raises KeyboardInterrupt in it and nowhere else.

    On the main thread a signal does it, which ends a sleep and a wait too. On another thread Python raises between two of its
    instructions, so a call into C ends first.
    """

    def __init__(self) -> None:
        """Nothing runs."""
        self._access = threading.Lock()
        self._thread = 0  # that runs a call; 0: none

    def run(self, call: Callable[[], _Result]) -> _Result:
        """Make the call; returns or raises what it does."""
        is_main = threading.current_thread() is threading.main_thread()
        before = signal.signal(signal.SIGINT, self._on_signal) if is_main else None
        try:
            self._thread = threading.get_ident()
            return call()
        finally:
            self._end()
            if is_main:
                signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)

    def interrupt(self) -> None:
        """Interrupt the call, if one runs; from any thread."""
        with self._access:
            if not self._thread:
                return
            if self._thread != threading.main_thread().ident:
                _raise_in(self._thread, KeyboardInterrupt)
            elif os.name == "nt":
                signal.raise_signal(signal.SIGINT)
            else:
                signal.pthread_kill(self._thread, signal.SIGINT)

    def _end(self) -> None:
        """From here on nothing is raised; what was meant for the call and comes now is dropped."""
        while self._thread:
            try:
                with self._access:
                    thread, self._thread = self._thread, 0
                    if thread != threading.main_thread().ident:
                        _raise_in(thread, None)
            except KeyboardInterrupt:
                continue

    def _on_signal(self, number: int, frame: Any) -> None:
        if self._thread:
            raise KeyboardInterrupt


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    """Have a thread raise this as soon as it runs Python code again; None: take back what it did not raise yet."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread), None if error is None else ctypes.py_object(error)
    )


_MODULE = "guava_px"
#: A tensor's record says where its bytes lie; a structure is bounded by the codec.
_MOST_TENSORS = 10_000

Send = Callable[[Message, Sequence[memoryview]], None]


class CellRunner:
    """The namespace of the user's cells at this worker, and what runs them.

    Args:
        send: queues a message for the orchestrator; never blocks.
        device: of this worker; cells find it as `device`.
        seat: takes this worker's place in the process groups of programs; None refuses them.
    """

    def __init__(self, send: Send, device: torch.device, seat: GroupSeat | None = None) -> None:
        """Nothing has run."""
        self._send, self._device, self._seat = send, device, seat
        self._module: types.ModuleType | None = None
        self._code = Interruptible()
        self._files = FileFolder()
        self._request = 0  # in work
        self._stopped = 0  # the last request that was to be interrupted
        self._random: RandomState | None = None  # of cells, after the last one
        self._in_program = False  # a program's group, and no run's, stands in the seat

    def interrupt(self, request_id: int | None = None) -> None:
        """Interrupt this request, or whatever is in work; from any thread, also before the request has come here."""
        self._stopped = self._request if request_id is None else request_id
        if self._request == self._stopped:
            self._code.interrupt()
            if self._in_program and self._seat is not None:
                self._seat.give_up("the program was interrupted")

    def close(self) -> None:
        """Forget what cells defined, and take the user's files away."""
        self._module = None
        self._files.close()

    def end_program(self) -> None:
        """All ranks have ended: leave the group of the last program, if this worker is still in it."""
        if self._in_program and self._seat is not None:
            self._seat.leave()
        self._in_program = False

    def answer(
        self, message: RunCode | RunProgram | InstallPackages | PlaceFiles, payload: memoryview, worker: str
    ) -> str:
        """Do what was asked and tell how it ended; returns what made this process lose its device, "" where it did not."""
        lost = ""
        try:
            self._request = message.request_id
            report = self._code.run(lambda: self._done(message, payload, worker))
        except BaseException as error:  # whatever the user's code raises, SystemExit too
            report, lost = self._failed(message.request_id, error)
        finally:
            self._request = 0
        for stream in (sys.stdout, sys.stderr):  # a last line without its end
            getattr(stream, "finish", stream.flush)()
        self._send(report, ())  # before the others see that this rank is gone: it is the cause
        if report.type_name or (self._seat is not None and not self._seat.is_direct):
            self.end_program()
        return lost

    def _done(self, message: Message, payload: memoryview, worker: str) -> CodeRan:
        assert isinstance(message, RunCode | RunProgram | InstallPackages | PlaceFiles)
        if message.request_id == self._stopped:
            raise KeyboardInterrupt
        if isinstance(message, InstallPackages):
            return CodeRan(request_id=message.request_id, text=install(message.packages))
        if isinstance(message, PlaceFiles):
            return CodeRan(request_id=message.request_id, text=self._files.place(message.files))
        if isinstance(message, RunProgram):
            return self._ran_program(message, worker)
        return self._ran(message, payload, worker)

    def _ran(self, message: RunCode, payload: memoryview, worker: str) -> CodeRan:
        names = self._namespace(message.rank, worker).__dict__
        names.update(unpack_values(message.values, payload))
        with _RandomStateOfCells(self):
            last = _run(message.cell, message.text, names) if message.text else None
        for name in message.wanted:
            if name not in names:
                near = difflib.get_close_matches(name, [known for known in names if not known.startswith("_")], n=2)
                hint = f"; did you mean {' or '.join(near)}?" if near else ""
                raise ConfigError(f"no cell and no %guava_push has defined {name!r} here{hint}")
        wanted = {name: names[name] for name in message.wanted} | ({} if last is None else {"": last})
        if not wanted:
            return CodeRan(request_id=message.request_id)
        tree, buffers = pack_values(wanted, strictly=False)
        nbytes = sum(buffer.nbytes for buffer in buffers)
        if nbytes > message.most_bytes or len(tree.tensors) > _MOST_TENSORS:
            shown = " and ".join(filter(None, wanted)) or "the last value of the cell"
            raise ConfigError(
                f"{shown}: {show_bytes(nbytes)} in {len(tree.tensors)} tensors and arrays; at most "
                f"{show_bytes(message.most_bytes)} in {_MOST_TENSORS} may come back at one "
                "time: take a part, or end the cell's last line with a semicolon"
            )
        self._send(CodeValues(message.request_id, tree), buffers)
        return CodeRan(request_id=message.request_id, nbytes=nbytes)

    def _ran_program(self, message: RunProgram, worker: str) -> CodeRan:
        if self._seat is None:
            raise ConfigError(
                "a worker inside the user's own process takes part in no program: start it with %guava_worker or guava worker"
            )
        seat, module = self._seat, self._namespace(message.seat, worker)
        self._in_program = True
        with _RandomStateOfCells(self):
            run_program(
                message, module, seat, self._device,
                lambda: _execute(message.name, message.text, module.__dict__),
            )  # fmt: skip
        return CodeRan(request_id=message.request_id)

    def _namespace(self, seat: int, worker: str) -> types.ModuleType:
        """One module for all cells, so that classes and functions defined there know where they live."""
        if self._module is None:
            self._module = sys.modules[_MODULE] = types.ModuleType(_MODULE)
            vars(self._module).update(device=self._device, worker=worker, rank=seat, display=_show)
        return self._module

    def _failed(self, request_id: int, error: BaseException) -> tuple[CodeRan, str]:
        lost = lost_device(error)
        text = f"{error_text(error)}. {NOTE}" if lost else f"{error_text(error)}{_import_hint(error)}"
        trace = "" if isinstance(error, ConfigError | KeyboardInterrupt | ProgramEnded) else trace_text(error)
        kind = type(error).__name__
        if self._in_program and self._seat is not None and self._seat.broken_by(error):
            kind = GroupBroken.__name__  # another rank's end, and no error of this one's code
        return CodeRan(request_id=request_id, type_name=kind, text=text, traceback=trace), lost


def _import_hint(error: BaseException) -> str:
    """What to do where a module is not here; "" for other errors."""
    if part := absent_part(error):
        return f"; {part}"
    if name := missing_package(error):
        return f"; where {name} is a package, %guava_pip installs it here, and where it is a file of yours, %guava_files sends it"
    return ""


class _RandomStateOfCells:
    """In the block random numbers go on where the last cell left them; after it, where runs left them."""

    def __init__(self, runner: CellRunner) -> None:
        self._runner = runner
        index = runner._device.index or 0
        cuda = runner._device.type == "cuda"
        self._generators = {"cuda": torch.cuda.default_generators[index]} if cuda else {}

    def __enter__(self) -> None:
        self._of_runs = RandomState.take(self._generators)
        if self._runner._random is not None:
            self._runner._random.put(self._generators)

    def __exit__(self, *raised: object) -> None:
        self._runner._random = RandomState.take(self._generators)
        self._of_runs.put(self._generators)


#: Python 3.11 counts the depth of a tree in one place for all threads, and two at one time fail (CPython issue 106905).
_PARSING = threading.Lock()


def _run(cell: str, text: str, names: dict[str, Any]) -> Any:
    """Run a cell; returns the value of its last expression, None where it has none or ends with a semicolon."""
    name = _known(cell, text)
    with _PARSING:
        body = ast.parse(text, name)
        last = body.body.pop() if body.body and isinstance(body.body[-1], ast.Expr) else None
        program = compile(body, name, "exec", dont_inherit=True)
        result = (
            compile(ast.Expression(last.value), name, "eval", dont_inherit=True) if isinstance(last, ast.Expr) else None
        )
    # The text is the user's own cell, from the holder of the session's secret: both lines do no more than the cell says.
    exec(program, names)
    value = None if result is None else eval(result, names)
    return None if text.rstrip().endswith(";") else value


def _execute(cell: str, text: str, names: dict[str, Any]) -> None:
    """Run a whole program. Its text comes from the holder of the session's secret, as that of a cell does."""
    exec(compile(text, _known(cell, text), "exec", dont_inherit=True), names)


def _known(cell: str, text: str) -> str:
    """Return what stands for a file name in tracebacks, where Python finds the text's lines under it."""
    name, lines = file_name(cell), source_lines(text)
    linecache.cache[name] = (len(text), None, lines, name)
    return name


def _show(*values: Any, **_options: Any) -> None:
    """Stand-in for IPython's display."""
    for value in values:
        sys.stdout.write(f"{value!r}\n")
