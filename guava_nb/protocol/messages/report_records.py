"""What a worker reports: printed lines, failures, its end, energy."""

from __future__ import annotations

from enum import Enum
from typing import ClassVar

import msgspec

from guava_nb.protocol.messages.wire_types import Channel, Message

__all__ = [
    "AskEnergy",
    "BoardEnergy",
    "CrashReport",
    "Energy",
    "Failure",
    "FailureKind",
    "Log",
    "PhaseReport",
    "TaskEnergy",
    "Vitals",
]


class Log(Message, frozen=True):
    """Worker to orchestrator (METRICS): lines it printed; `dropped` were left out by the rate limit."""

    NUMBER: ClassVar[int] = 48
    CHANNEL: ClassVar[Channel] = Channel.METRICS

    stream: str
    lines: tuple[str, ...]
    dropped: int = 0


class FailureKind(str, Enum):
    """Why a worker could not do what was asked."""

    USER = "user"  # the user's code raised
    MEMORY = "memory"  # one sample alone does not fit the device
    INTERNAL = "internal"  # the worker gave up the run: nothing is known of its replica any more
    GROUP = "group"  # a member of the process group is gone
    TORN = "torn"  # a member is gone, and parameters were half exchanged


class Failure(Message, frozen=True, kw_only=True):
    """Worker to orchestrator: user code raised, or the worker could not do what was asked.

    Attributes:
        generation: of the group that broke, for the kinds `GROUP` and `TORN`; else of the `Prepare` of the replica that failed.
        request_id: of the `Evaluate`, `Predict` or `FetchState` that failed; 0: none.
    """

    NUMBER: ClassVar[int] = 49

    run_id: str
    kind: FailureKind
    type_name: str
    text: str
    traceback: str
    request_id: int = 0
    generation: int = -1


class CrashReport(Message, frozen=True):
    """From the process that watched a worker: it ended by itself with this status; its last lines."""

    NUMBER: ClassVar[int] = 50

    exit_status: int
    tail: tuple[str, ...]


class Vitals(Message, frozen=True):
    """From the process that watches a worker: its process is there, whether or not it can say so itself.

    Attributes:
        pid: its number on its machine.
        quiet_s: for so long none of its Python code ran; 0: it runs.
        stuck_s: for so long neither its state nor its step changed.
        is_stopped: it gets no processor, by a signal, a debugger or a frozen container.
        busy_cores: processor seconds that it took per second, lately; None: not measured.
        keeps_s: for so long the sender will go on to speak for a worker that does not.
    """

    NUMBER: ClassVar[int] = 52

    pid: int
    quiet_s: float
    stuck_s: float
    is_stopped: bool
    busy_cores: float | None = None
    keeps_s: float = 0.0


class BoardEnergy(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Energy of one board in a stretch of time; `joules` None: not measured.

    Attributes:
        key: of the hardware; all reports on one board have the same.
        method: how it was measured.
        readings: how many the figure rests on.
        uncovered_s: seconds without a figure.
        too_short: the stretch is not much longer than the sensor's own pace: the figure says little.
        problem: of the last reading; "" when there was none.
    """

    key: str
    name: str
    method: str
    joules: float | None
    readings: int = 0
    uncovered_s: float = 0.0
    too_short: bool = False
    problem: str = ""


class PhaseReport(msgspec.Struct, frozen=True, array_like=True):
    """Time and energy of one phase of the steps since this worker prepared its run."""

    phase: str
    seconds: float
    joules: float | None


class TaskEnergy(msgspec.Struct, frozen=True, array_like=True):
    """Time and energy of what the user named a task, of those that ended; `joules` None: not measured.

    Tasks may lie within one another and within phases: they are views of the same time.

    Attributes:
        times: how often it was done.
    """

    task: str
    seconds: float
    joules: float | None
    times: int = 0


class Energy(Message, frozen=True, kw_only=True):
    """Worker to orchestrator (METRICS), about once a second during a run, and as the answer to `AskEnergy`.

    Attributes:
        mark: of the question that this answers; 0 when it was not asked for.
        seconds: since this worker prepared the run; `boards` and `phases` are of that stretch.
        why: what has no sensor, and why, in one sentence; "" when everything has.
        busy, memory_used_bytes, memory_bytes, power_w: of the device, at this moment; None where it does not tell.
        cpu_busy, host_memory_used_bytes, host_memory_bytes: of the machine.
        rates: bytes a second of the machine: disk read, disk written, network out, network in; None where unknown.
        flops: floating point operations of one sample, forward and backward; None when not counted.
        tasks: what the user's own code named.
        up_bytes_s: what the line to the orchestrator does at least; None until it was seen.
    """

    NUMBER: ClassVar[int] = 112
    CHANNEL: ClassVar[Channel] = Channel.METRICS

    run_id: str
    mark: int
    seconds: float
    boards: tuple[BoardEnergy, ...] = ()
    phases: tuple[PhaseReport, ...] = ()
    why: str = ""
    busy: float | None = None
    memory_used_bytes: int | None = None
    memory_bytes: int | None = None
    power_w: float | None = None
    cpu_busy: float | None = None
    host_memory_used_bytes: int | None = None
    host_memory_bytes: int | None = None
    rates: tuple[float | None, ...] = ()
    flops: float | None = None
    tasks: tuple[TaskEnergy, ...] = ()
    up_bytes_s: float | None = None


class AskEnergy(Message, frozen=True):
    """Orchestrator to worker: tell your energy now; the answer carries the mark."""

    NUMBER: ClassVar[int] = 113
    CHANNEL: ClassVar[Channel] = Channel.METRICS

    run_id: str
    mark: int
