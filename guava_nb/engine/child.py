"""Entry of a worker process: `python -m guava_nb.engine.child`, started by `guava_nb.engine.launcher` and by nothing else.

Standard input: one JSON line with the order (join code, device, name, ...: secrets come this way, never in argv), then
single words ("leave"). End of input means that whoever started this process is gone. Standard output: what the user's code
prints, and lines that start with `MARK` with this worker's state as JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import traceback
from typing import Any, TextIO

__all__ = ["MARK", "main"]

MARK = "\x1eguava "

#: Exit statuses: the launcher tells them apart from a crash.
EXIT_OK, EXIT_REFUSED, EXIT_LOST = 0, 3, 4


def main() -> int:
    """Run one worker until its session ends; returns the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is for the notebook; it reaches us as "leave"
    order = json.loads(sys.stdin.readline())
    if order.get("threads"):
        os.environ.setdefault("OMP_NUM_THREADS", str(order["threads"]))
    return _work(order)


def _work(order: dict[str, Any]) -> int:
    import torch

    from guava_nb.config import DistributedConfig
    from guava_nb.engine.hardware import pick_device
    from guava_nb.engine.member import Membership
    from guava_nb.engine.options import link_options
    from guava_nb.errors import GuavaError
    from guava_nb.protocol.joincode import JoinCode

    _print_stacks_when_asked()
    stdout, lock = sys.stdout, threading.Lock()

    def report(state: str, step: int, detail: str) -> None:
        with lock, contextlib.suppress(OSError):  # whoever reads is gone; `_listen` notices that too
            stdout.write(f"{MARK}{json.dumps({'state': state, 'step': step, 'detail': detail})}\n")
            stdout.flush()

    try:
        if order.get("threads"):
            torch.set_num_threads(int(order["threads"]))
        member = Membership(
            JoinCode.decode(order["code"]), pick_device(order["device"]), order["name"],
            identity=bytes.fromhex(order["identity"]), report=report,
            options=link_options(DistributedConfig.from_dict(order["config"])),
        )  # fmt: skip
        _tee(member)
        threading.Thread(target=_listen, args=(member, sys.stdin), name="guava-orders", daemon=True).start()
        reason = member.run()
    except GuavaError as error:
        report("failed", -1, f"{type(error).__name__}: {error}")
        return EXIT_REFUSED
    finally:
        for stream in (sys.stdout, sys.stderr):
            finish = getattr(stream, "finish", None)
            if finish is not None:
                finish()
    report("left", -1, reason)
    return EXIT_OK


def _print_stacks_when_asked() -> None:
    import faulthandler

    faulthandler.enable(all_threads=False)  # after a crash; our own threads would bury the one that crashed
    if hasattr(faulthandler, "register"):  # kill -USR1: where does it hang?
        faulthandler.register(signal.SIGUSR1, all_threads=True)


def _tee(member: object) -> None:
    from guava_nb.engine.member import Membership
    from guava_nb.engine.tee import LineTee
    from guava_nb.protocol.messages import Log

    assert isinstance(member, Membership)

    def emit(stream: str, lines: tuple[str, ...], dropped: int) -> None:
        member.send(Log(stream, lines, dropped))

    sys.stdout = LineTee(sys.stdout, "stdout", emit)
    sys.stderr = LineTee(sys.stderr, "stderr", emit)


def _listen(member: object, orders: TextIO) -> None:
    from guava_nb.engine.member import Membership

    assert isinstance(member, Membership)
    for line in orders:
        if line.strip() == "leave":
            member.loop.leave("asked to leave")
    # The parent is gone. Leave properly if that is possible soon; a step that never ends must not keep this process.
    member.loop.leave("the process that started this worker ended")
    threading.Timer(10.0, os._exit, (EXIT_LOST,)).start()


if __name__ == "__main__":
    try:
        status = main()
    except BaseException:
        traceback.print_exc()  # the last words, which the launcher reports
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # Skips the interpreter's teardown: with CUDA or a user's threads it can hang, and everything is closed already.
    os._exit(status)
