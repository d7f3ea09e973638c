"""Inside a worker process: a fault at one (step, phase), once. It writes that it fired before it strikes.

`install` puts the points around the worker's real methods; those in the user's own code (forward, backward, loss) stand in the
shared cell, which calls `at`. A process that is given no plan is like any other.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

__all__ = ["PLAN", "at", "install", "wait_at_gate"]

#: Names, in the environment, the plan of this worker, `NAME.plan`; beside it are its gate, `NAME.gate`, and `claim`, `fired`
#: and `go`, which all workers share.
PLAN = "GUAVA_MATRIX_PLAN"
_HOLD_S = 30.0
#: Half as long again as the matrix waits for an answer.
_SLOW_S = 6.0

_step: int | None = None  # whose shard is in work
_sent: dict[str, int] = {}  # parts of gradients or activations that went out for it
_session: Any = None  # this process's `WorkerSession`


def at(point: str, step: int | None = None) -> str:
    """Strike here if this is the place of the plan; returns which value shall become NaN, "" for none."""
    base = os.environ.get(PLAN)
    if not base:
        return ""
    try:
        plan = json.loads(Path(base).read_text())
    except FileNotFoundError:
        return ""
    step = _step if step is None else step
    if plan["point"] != point or plan["step"] not in (None, step) or not _claimed(Path(base).parent / "claim"):
        return ""
    here, name = Path(base).parent, Path(base).stem
    _tell(here / "fired", {"worker": name, "point": point, "step": step, "fault": plan["fault"], "pid": os.getpid()})
    _ACTIONS.get(plan["fault"], _nothing)(here)
    return str(plan["fault"]) if plan["fault"].startswith("nan") else ""


def _claimed(path: Path) -> bool:
    """Whether nobody has fired yet: a fault strikes once."""
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _tell(path: Path, record: dict[str, Any]) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(record))
    os.replace(partial, path)


def _nothing(here: Path) -> None:
    pass


def _hold(here: Path) -> None:
    """Wait until the other side has prepared what is to happen to the connections."""
    until = time.monotonic() + _HOLD_S
    while not (here / "go").exists() and time.monotonic() < until:
        time.sleep(0.002)


def wait_at_gate() -> None:
    """Wait, with everything loaded, until a worker is needed; end when those who started this process are gone."""
    gate, parent = Path(os.environ[PLAN]).with_suffix(".gate"), os.getppid()
    while not gate.exists():
        if os.getppid() != parent or not gate.parent.exists():
            os._exit(0)
        time.sleep(0.01)


def _send(number: signal.Signals) -> Callable[[Path], None]:
    return lambda here: os.kill(os.getpid(), number)


def _raise(make: Callable[[], BaseException]) -> Callable[[Path], None]:
    def act(here: Path) -> None:
        raise make()

    return act


def _lock_twice(here: Path) -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def _lie(here: Path) -> None:
    """Tell what was not asked, and what no worker says."""
    from guava_nb.protocol.messages import Accept, StepApplied

    _session._send(StepApplied(run_id="run-1", generation=1, step=10**9), ())
    _session._send(Accept("the orchestrator"), ())
    _lock_twice(here)  # until its session is ended: what it would do next counts no more


_ACTIONS: dict[str, Callable[[Path], None]] = {
    "SIGKILL": _send(signal.SIGKILL),
    "SIGSTOP 5 s": _send(signal.SIGSTOP),
    "SIGSTOP 60 s": _send(signal.SIGSTOP),
    "SIGTERM": _send(signal.SIGTERM),
    "exit": lambda here: os._exit(7),
    "exception": _raise(lambda: ValueError("this place is cursed")),
    "out of memory": _raise(lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")),
    "full disk": _raise(lambda: OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))),
    "context death": _raise(lambda: RuntimeError("CUDA error: device-side assert triggered")),
    "slow": lambda here: time.sleep(_SLOW_S),
    "deadlock": _lock_twice,
    "hostile": _lie,
    "cut in mid-frame": _hold,
    "silence": _hold,
    "reset at a random byte": _hold,
}


# ------------------------------------------------------------------------------------------------------------- the points


def install() -> None:
    """Put the points around the methods of this process's worker."""
    from guava_nb.replica.base_replica import BaseReplica
    from guava_nb.replica.group_replica import GroupReplica
    from guava_nb.replica.optimizer import Schedule
    from guava_nb.replica.replica import Replica
    from guava_nb.worker.preparation import Evaluator, Preparation
    from guava_nb.worker.steps import StepRunner
    from guava_nb.worker.worker_session import WorkerSession

    _before(WorkerSession, "greet", _greet)
    _before(Preparation, "build", lambda *_: _note(None) or at("source"))
    _before(StepRunner, "add", lambda runner, message, load: at("batch", message.step))
    _before(StepRunner, "_apply", lambda runner, run, step: _note(runner.committed + 1))
    _before(Replica, "take_parameters", lambda *_: at("optimizer"))
    for kind in (Replica, GroupReplica):
        _before(kind, "_step", lambda *_: at("optimizer"))
    _before(Schedule, "on_step", lambda *_: at("schedule"))
    _before(Evaluator, "evaluate", lambda *_: at("validation"))
    _before(Evaluator, "predict", lambda *_: at("prediction"))
    _before(StepRunner, "send_state", lambda runner, replica, message, ticks: _note(runner.committed))
    _before(BaseReplica, "state", lambda *_, **__: at("checkpoint"))
    _wrap_shard(StepRunner)
    _wrap_send(WorkerSession)


def _before(kind: type, name: str, point: Callable[..., object]) -> None:
    method = getattr(kind, name)

    @functools.wraps(method)
    def wrapped(*args: Any, **words: Any) -> Any:
        point(*args, **words)
        return method(*args, **words)

    setattr(kind, name, wrapped)


def _greet(session: Any, connected: Any) -> None:
    global _session
    _session, session._session = session, connected
    at("join")


def _note(step: int | None) -> None:
    global _step
    _step = step


def _wrap_shard(runner: Any) -> None:
    run_shard = runner._run_shard

    def wrapped(self: Any, run: Any, message: Any, parts: list[Any], *more: Any) -> Any:
        _note(message.step)
        _sent.clear()
        if at("work") == "nan in input":
            parts = [torch.utils._pytree.tree_map(_spoiled, part) for part in parts]
        return run_shard(self, run, message, parts, *more)

    runner._run_shard = wrapped


def _spoiled(value: Any) -> Any:
    return value * float("nan") if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _wrap_send(session: Any) -> None:
    send = session._send

    def wrapped(self: Any, message: Any, buffers: Any) -> None:
        kind = type(message).__name__
        if kind in ("GradientBucket", "Piece", "Parcel") and _step is not None:
            _sent[kind] = _sent.get(kind, 0) + 1
            if _sent[kind] == 2:  # one has gone, the rest of them has not
                at("bucket")
        elif kind == "StepApplied":
            at("commit", message.step)
        elif kind == "Leave":
            at("leave")
        send(self, message, buffers)
        if kind == "ShardReport":
            at("sum", message.step)

    session._send = wrapped
