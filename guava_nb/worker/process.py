"""Entry of a worker process: `python -m guava_nb.worker.process`, started by `guava_nb.processes.local_workers` alone.

With the argument `nursery` it loads everything and is then forked for each worker, see `guava_nb.processes.nursery`.

Standard input: one JSON line with the order (join code, device, name, ...: secrets come this way, never in argv), then
"leave", or "dial CODE" when the session has a new join code. End of input means that the process that started this one is gone.
Standard output: what the user's code prints, and lines that start with `MARK` with this worker's state as JSON, about once a
second with its figures, or when the state of a run was saved on the disk.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib
import io
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, TextIO

from guava_nb.processes.nursery import serve
from guava_nb.processes.pipe import EXIT_AGAIN, EXIT_LOST, EXIT_OK, EXIT_REFUSED, MARK, NURSERY
from guava_nb.spec.loading import loading_without_collections

if TYPE_CHECKING:  # torch is loaded when the order is read
    from guava_nb.config import DistributedConfig
    from guava_nb.protocol.joincode import JoinCode
    from guava_nb.protocol.messages import Message
    from guava_nb.status import OwnFigures
    from guava_nb.worker.worker_session import WorkerSession

    Tell = Callable[[dict[str, Any]], None]

__all__ = ["main"]

#: What every worker loads.
_PRELOADED = ("torch", "guava_nb.worker.worker_session", "guava_nb.worker.listening")
#: Seconds between two reports of figures: what a person follows, and no load on the pipe.
FIGURES_S = 1.0


def main() -> int:
    """Run one worker until its session ends; returns the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is for the notebook; it reaches us as "leave"
    orders = _take_orders()
    order = json.loads(orders.readline())
    if order.get("threads"):
        os.environ.setdefault("OMP_NUM_THREADS", str(order["threads"]))
    with loading_without_collections():
        importlib.import_module("guava_nb.worker.worker_session")  # and torch
    gc.freeze()  # what was loaded stays: no later collection need look at it
    return _work(order, orders)


class _NoKeyboard(io.TextIOBase):
    """Standard input of the user's code: what asks there would wait for ever."""

    def readline(self, size: int | None = -1, /) -> str:  # type: ignore[override]  # as of io.TextIOBase itself
        """Say that there is none."""
        raise RuntimeError(
            "a worker has no keyboard: take input() and breakpoint() out of what runs here; what is printed here can be seen by "
            "%guava_log"
        )

    read = readline


def _take_orders() -> TextIO:
    """Return the pipe by which orders come, out of reach of the user's code, whose input() would swallow them."""
    orders = open(os.dup(0), encoding="utf-8")  # noqa: SIM115 - open as long as the process runs
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    sys.stdin = _NoKeyboard()
    return orders


def _work(order: dict[str, Any], orders: TextIO) -> int:
    import torch

    from guava_nb.config import DistributedConfig
    from guava_nb.errors import GuavaError
    from guava_nb.link.options import link_options
    from guava_nb.protocol.joincode import JoinCode
    from guava_nb.telemetry.hardware import pick_device
    from guava_nb.worker.worker_session import WorkerSession

    _print_stacks_when_asked()
    tell = _teller()

    def report(state: str, step: int, detail: str, **more: str) -> None:
        tell({"state": state, "step": step, "detail": detail, **more})

    try:
        if order.get("threads"):
            torch.set_num_threads(int(order["threads"]))
        config = DistributedConfig.from_dict(order["config"])
        code = None if order["code"] is None else JoinCode.decode(order["code"])

        def new_member() -> WorkerSession:
            return WorkerSession(
                code, pick_device(order["device"]), order["name"], identity=bytes.fromhex(order["identity"]),
                report=report, options=link_options(config), on_stuck=partial(_end_blocked, report),
            )  # fmt: skip

        if code is not None:
            reason = _dial(new_member(), orders, tell)
        else:
            reason = _be_dialled(new_member, config, order["listen"], orders, tell)
    except GuavaError as error:
        report("failed", -1, str(error), error=type(error).__name__)
        return EXIT_AGAIN if type(error).__name__ == "DeviceLost" else EXIT_REFUSED
    finally:
        for stream in (sys.stdout, sys.stderr):
            if finish := getattr(stream, "finish", None):
                finish()
    report("left", -1, reason)
    return EXIT_OK


def _end_blocked(report: Callable[[str, int, str], None], reason: str) -> None:
    """End this process, whose loop never will; another takes its place."""
    report("failed", -1, reason)
    os._exit(EXIT_AGAIN)


def _teller() -> Tell:
    """Return what writes records to this process's own output, whatever takes the place of `sys.stdout` later."""
    stdout, lock = sys.stdout, threading.Lock()

    def tell(record: dict[str, Any]) -> None:
        with lock, contextlib.suppress(OSError):  # the reader is gone; `_listen` notices that too
            stdout.write(f"{MARK}{json.dumps(record)}\n")
            stdout.flush()

    return tell


def _dial(member: WorkerSession, orders: TextIO, tell: Tell) -> str:
    _tee(member.send)
    _obey(orders, member.loop.leave, member.redirect)
    member.loop.keeper.on_saved = partial(tell, {"saved": True})
    with _figures_told(member.figures, tell):
        return member.run()


def _be_dialled(
    new_member: Callable[[], WorkerSession], config: DistributedConfig, listen: list[Any], orders: TextIO, tell: Tell
) -> str:
    from guava_nb.link.options import link_options
    from guava_nb.worker.listening import ListeningLoop

    host, port = listen
    listening = ListeningLoop(new_member, link_options(config), host, port, config.tls)
    code = listening.open()
    _tee(listening.send)
    _obey(orders, lambda reason: listening.leave())
    try:
        with _figures_told(listening.figures, tell):
            # The code goes to the process that started this one, through the pipe, and into no log.
            shown = {"state": "listening", "step": -1, "detail": code.address, "code": code.encode()}
            return listening.serve(once=False, on_wait=lambda: tell(shown))
    finally:
        listening.close()


@contextlib.contextmanager
def _figures_told(figures: Callable[[], OwnFigures], tell: Tell) -> Iterator[None]:
    """Tell the figures inside the block again and again, from a thread of its own; at its end once more.

    Unchanged ones too: that they come shows that Python code runs here (`processes/pulse.py`).
    """
    ended = threading.Event()

    def look() -> None:
        with contextlib.suppress(Exception):  # a figure that cannot be had must not end the work
            tell({"figures": dataclasses.asdict(figures())})

    def main() -> None:
        while not ended.wait(FIGURES_S):
            look()

    thread = threading.Thread(target=main, name="guava-figures", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        look()


def _print_stacks_when_asked() -> None:
    import faulthandler

    faulthandler.enable(all_threads=False)  # after a crash; our own threads would bury the one that crashed
    if hasattr(faulthandler, "register"):  # kill -USR1: where does it hang?
        faulthandler.register(signal.SIGUSR1, all_threads=True)


def _tee(send: Callable[[Message], None]) -> None:
    from guava_nb.protocol.messages import Log
    from guava_nb.worker.stdout_tee import LineTee

    def emit(stream: str, lines: tuple[str, ...], dropped: int) -> None:
        send(Log(stream, lines, dropped))

    sys.stdout = LineTee(sys.stdout, "stdout", emit)
    sys.stderr = LineTee(sys.stderr, "stderr", emit)


def _obey(orders: TextIO, leave: Callable[[str], None], redirect: Callable[[JoinCode], None] | None = None) -> None:
    def on_end(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a second one ends it at once
        leave("its machine asked it to end (SIGTERM)")

    signal.signal(signal.SIGTERM, on_end)  # Slurm, Kubernetes, a spot machine that is taken away
    threading.Thread(target=_listen, args=(leave, redirect, orders), name="guava-orders", daemon=True).start()


def _listen(leave: Callable[[str], None], redirect: Callable[[JoinCode], None] | None, orders: TextIO) -> None:
    from guava_nb.errors import JoinCodeError
    from guava_nb.protocol.joincode import JoinCode

    for line in orders:
        word, _, rest = line.strip().partition(" ")
        if word == "leave":
            leave("asked to leave")
        elif word == "dial" and redirect is not None:
            with contextlib.suppress(JoinCodeError):  # the sender has read it before
                redirect(JoinCode.decode(rest))
    # The parent is gone. Leave properly if that is possible soon; a step that never ends must not keep this process.
    leave("the process that started this worker ended")
    threading.Timer(10.0, os._exit, (EXIT_LOST,)).start()


if __name__ == "__main__":
    if sys.argv[1:] == [NURSERY]:
        serve(_PRELOADED)  # returns in each worker that it forks
    try:
        status = main()
    except BaseException:
        traceback.print_exc()  # the last words, which the launcher reports
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # Skips the interpreter's teardown: with CUDA or a user's threads it can hang, and everything is closed already.
    os._exit(status)
