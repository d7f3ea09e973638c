"""What a person may want to know of a session, as plain data.

Made by the orchestrator and the worker, shown by `guava_nb.render`. Knows nothing of displays, sockets or torch. What
could not be measured is None, never 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = [
    "NEW_CODE_NEEDED",
    "DeviceUse",
    "EpochFigures",
    "OwnFigures",
    "Points",
    "RunStatus",
    "Status",
    "Validated",
    "WireBytes",
    "WorkerStatus",
]

#: One validation: step, loss, accuracy, perplexity; the last two are None where they have no meaning.
Validated = tuple[int, float, float | None, float | None]

#: A curve: (optimizer step, value).
Points = tuple[tuple[int, float], ...]

#: In what a worker says of itself whose session is away behind a tunnel.
NEW_CODE_NEEDED = "a new join code may be needed"


@dataclass(frozen=True, slots=True)
class WireBytes:
    """Bytes that crossed the wire, seen from the orchestrator, headers included, before encryption.

    `gradient_bytes` and `activation_bytes` are None where workers exchange them directly: they are not counted there.
    """

    out_bytes: int = 0
    in_bytes: int = 0
    sample_bytes: int = 0
    gradient_bytes: int | None = 0
    activation_bytes: int | None = 0
    parameter_bytes: int = 0
    control_bytes: int = 0


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One worker as the orchestrator sees it.

    Attributes:
        state: "joining", "ready", "working", "suspect", "lost" or "left".
        share: part of each batch it gets, 0 to 1.
        step_s: seconds of forward and backward in its last step.
        wait_s: seconds without work in its last step.
        round_trip_s: seconds of a heartbeat there and back.
        samples, out_bytes, in_bytes: of the present or the last run; before the first, since it joined.
        detail: one sentence when something is worth saying (why it was lost, a version difference).
        queued_batches, queued_bytes: that it was sent and has not worked on.
        rate_out_bytes_s, rate_in_bytes_s: what the line to it and from it does at least, as far as was seen or measured.
        worker_waits, data_waits: part of the time in which it waited for data, and data for it, 0 to 1.
        awaited_s: seconds for which it is still waited for, when its connection broke.
        power_w, busy: of its device lately; joules: of its boards in this run, also where others share them.
        memory_used_bytes, memory_bytes: of its GPU; of its machine where it works on the processor.
    """

    name: str
    rank: int
    state: str
    device: str
    device_name: str
    hostname: str
    share: float | None = None
    step_s: float | None = None
    wait_s: float | None = None
    round_trip_s: float | None = None
    samples: int = 0
    out_bytes: int = 0
    in_bytes: int = 0
    detail: str = ""
    queued_batches: int = 0
    queued_bytes: int = 0
    rate_out_bytes_s: float | None = None
    rate_in_bytes_s: float | None = None
    worker_waits: float | None = None
    data_waits: float | None = None
    power_w: float | None = None
    joules: float | None = None
    busy: float | None = None
    memory_used_bytes: int | None = None
    memory_bytes: int | None = None
    awaited_s: float | None = None


@dataclass(frozen=True, slots=True)
class OwnFigures:
    """What a worker measured of itself.

    Attributes:
        samples: it worked on and that were committed, in the present or the last run.
        share: part of its last step's samples that it got, 0 to 1.
        step_s: seconds of forward and backward in its last step.
        waits: part of the time in which it waited for data, 0 to 1.
        busy, memory_used_bytes, memory_bytes, power_w: as in `WorkerStatus`, while it has a run.
        joules: of its boards in the present or the last run, also where others share them.
        rate_out_bytes_s: what the line to the session does at least.
        rate_in_bytes_s: what came from it lately, which is less than the line can do while it is not busy.
        round_trip_s: seconds of a heartbeat there and back.
        out_bytes, in_bytes: sent and received since it joined.
        threads: torch's, in its last step; None where it has a GPU.
    """

    device_name: str = ""
    samples: int = 0
    share: float | None = None
    step_s: float | None = None
    waits: float | None = None
    busy: float | None = None
    memory_used_bytes: int | None = None
    memory_bytes: int | None = None
    power_w: float | None = None
    joules: float | None = None
    rate_out_bytes_s: float | None = None
    rate_in_bytes_s: float | None = None
    round_trip_s: float | None = None
    out_bytes: int = 0
    in_bytes: int = 0
    threads: int | None = None


@dataclass(frozen=True, slots=True)
class EpochFigures:
    """One epoch that was ended.

    Attributes:
        epoch: its number, from 1.
        loss: mean over its samples.
        val: what the last validation in it measured, by name; () without one.
        learning_rate: of its last step.
        took_s: seconds, validation included.
        joules: of all workers that measure.
    """

    epoch: int
    loss: float | None
    val: tuple[tuple[str, float], ...] = ()
    learning_rate: float | None = None
    took_s: float | None = None
    joules: float | None = None


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """How a device was used through a run, as curves of (seconds since the run began, value).

    Attributes:
        workers: names of those on it.
        is_gpu: the figures are of a GPU; else of the machine: its processors and its RAM.
        busy: 0 to 1; the mean between two points.
        memory_used_bytes: of all programs; the most between two points.
    """

    workers: str
    is_gpu: bool
    busy: Points = ()
    memory_used_bytes: Points = ()


@dataclass(frozen=True, slots=True)
class RunStatus:
    """One run.

    `state` is "preparing", "training", "validating", "waiting", "stopping", "done", "stopped", "failed", or "killed" with its
    process.
    """

    run_id: str
    state: str
    mode: str
    epoch: int
    num_epochs: int
    step: int  # committed optimizer steps of this run
    total_steps: int | None
    samples: int
    elapsed_s: float
    samples_per_s: float | None = None
    loss: float | None = None
    losses: tuple[tuple[int, float], ...] = ()  # (step, loss), thinned to at most 500 points
    val: tuple[Validated, ...] = ()
    learning_rate: float | None = None
    message: str = ""  # what it waits for, or why it ended
    wire: WireBytes = field(default_factory=WireBytes)
    path: str = ""  # how the workers reach each other, and why
    batch: str = ""  # how batches are read, in the words of the option `batch`
    loaded_batches: int = 0  # ready at the orchestrator, not sent yet
    loaded_bytes: int = 0
    joules: float | None = None  # of all workers, each board once
    rounds: int = 0  # of local sync; 0 by step sync
    steps_before: int = 0  # steps of the checkpoint it goes on from; epochs count from the very beginning, steps do not
    budget_bytes: int = 0  # most bytes it may send and receive; 0: no limit
    at_risk_steps: int | None = None  # that would be lost with the workers now; None where others have them, too
    at_risk_s: float | None = None  # of work, likewise
    at_risk_killed_steps: int | None = (
        None  # that would be lost if their processes were killed now, and their disks stay
    )
    at_risk_killed_s: float | None = None
    approximate: str = ""  # from which approximate weights it goes on; "" where all are exact
    waits_s: float | None = None  # for how much longer it waits for workers to join
    epochs: tuple[EpochFigures, ...] = ()  # that were ended, the newest 200
    scores: tuple[tuple[str, Points], ...] = ()  # what validations measured beside the loss, by name
    learning_rates: Points = ()
    gradient_norms: Points = ()  # of the mean gradient before clipping
    devices: tuple[DeviceUse, ...] = ()
    settings: tuple[tuple[str, str], ...] = ()  # what a table of runs shows: model, optimizer, its arguments
    began_at: float | None = None  # seconds since 1970
    ended_at: float | None = None


@dataclass(frozen=True, slots=True)
class Status:
    """A whole session.

    Attributes:
        address: host:port that workers dial; the join code itself is a secret and not part of it.
        tunnel: the tunnel that leads there and how it stands; "" without one.
        tunnel_note: what has to be done so that workers get through it; "" for nothing.
        state_note: which workers have the only copy of what was trained; "" where it is here.
        diary: the file with all that happened in the session; "" while there is none.
        notes: what happened; note_numbers: one number for each, growing, as some are forgotten when they are over.
    """

    state: str  # "closed", "open"
    address: str
    mode: str
    expected_workers: int
    workers: tuple[WorkerStatus, ...] = ()
    run: RunStatus | None = None
    cells: tuple[str, ...] = ()  # names of shared cells
    notes: tuple[str, ...] = ()
    tunnel: str = ""
    tunnel_note: str = ""
    state_note: str = ""
    note_numbers: tuple[int, ...] = ()
    diary: str = ""
