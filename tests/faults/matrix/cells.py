"""The table: which cells there are, and the outcome of each, written down before anything runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["CELLS", "FAULTS", "MODES", "PHASES", "Cell", "Expected", "covering", "expected", "senseless"]

#: A step in the second of two epochs of three steps: the last snapshot of a model in parts lies before it.
STEP = 4
#: Steps that count after the snapshot of the epoch's end.
_SNAPSHOT = 3


@dataclass(frozen=True)
class Mode:
    """A column of modes.

    Attributes:
        name, settings: as for `set_mode`.
        options: of the run.
        workers: that take part; one more is there as a spare where the size is fixed.
        elastic: whole replicas: the run goes on with the workers that are left.
        direct: members exchange over sockets of their own, which no relay of the tests carries.
    """

    name: str
    settings: dict[str, Any]
    options: dict[str, Any]
    workers: int = 2
    elastic: bool = False
    direct: bool = False

    @property
    def copied(self) -> bool:
        """What one member holds of the state, another one holds, too."""
        return self.workers > 1 and (self.elastic or self.name == "hybrid")

    @property
    def spares(self) -> bool:
        """Whether others can do the work of a worker that hangs."""
        return self.elastic and not self.direct and self.workers > 1


_PLAN = {"tensor_plan": {"0.linear": "colwise", "1.linear": "rowwise"}}
_RELAY, _DIRECT = {"path": "relay"}, {"path": "direct"}
_SGD: dict[str, Any] = {"optimizer": "SGD", "optimizer_args": {"lr": 0.1}}
MODES: dict[str, Mode] = {
    "data": Mode("data", _RELAY, {}, 3, elastic=True),
    "lone": Mode("data", _RELAY, {}, 1, elastic=True),
    "site": Mode("data", _RELAY, {"optimizer_site": "orchestrator"}, 3, elastic=True),
    # A round of one step of SGD, averaged, is the plain step however it is shared out; longer rounds: test_local_faults.py.
    "local": Mode("data", _RELAY, {"sync": "local", "sync_every": 1, "outer": "average", **_SGD}, 3, elastic=True),
    "direct": Mode("data", _DIRECT, {}, 3, elastic=True, direct=True),
    "zero 1": Mode("zero", {"zero_stage": 1, "dp": 2, **_RELAY}, {}),
    "zero 2": Mode("zero", {"zero_stage": 2, "dp": 2, **_RELAY}, {}),
    "zero 3": Mode("zero", {"zero_stage": 3, "dp": 2, **_RELAY}, {}),
    "zero 3 direct": Mode("zero", {"zero_stage": 3, "dp": 2, **_DIRECT}, {}, direct=True),
    "tensor": Mode("tensor", {"tp": 2, **_RELAY, **_PLAN}, {}),
    "pipeline": Mode("pipeline", {"pp": 2, "micro_batches": 2, **_RELAY}, {}),
    "pipeline direct": Mode("pipeline", {"pp": 2, "micro_batches": 2, **_DIRECT}, {}, direct=True),
    "hybrid": Mode("hybrid", {"dp": 2, "pp": 2, "micro_batches": 2, **_RELAY}, {}, 4),
}

PHASES = ("join", "source", "batch received", "forward", "backward", "bucket half sent", "waiting for the sum", "optimizer",
          "commit", "validation", "prediction", "checkpoint", "leave")  # fmt: skip
ENDS = ("SIGKILL", "SIGTERM", "exit")
STOPS = ("SIGSTOP 5 s", "SIGSTOP 60 s")
LINKS = ("cut in mid-frame", "silence", "reset at a random byte")
RAISES = ("exception", "out of memory", "full disk", "context death")
HANGS = ("slow", "deadlock")
#: After these a worker's process is of no use: a person ends it, or the orchestrator its session.
REPLACED = ("deadlock", "hostile")
NANS = ("nan in input", "nan in loss", "nan in gradient", "nan in buffer")
FAULTS = ENDS + STOPS + LINKS + RAISES + NANS + HANGS + ("hostile",)

#: Where the user's own code runs, or memory is asked for.
_USERS_CODE = ("source", "batch received", "forward", "backward", "optimizer", "commit", "validation", "prediction")
_NAN_AT = {
    "nan in input": "batch received",
    "nan in loss": "forward",
    "nan in gradient": "backward",
    "nan in buffer": "forward",
}
_NOTHING_LOST = ("source", "validation", "prediction")
#: What an error says of its cause.
_CAUSES = {
    "exception": "this place is cursed",
    "out of memory": "out of memory",
    "full disk": "No space left on device",
    "context death": "cannot use its device",
    "nan in input": "NaN or Inf in",
    "nan in loss": "NaN or Inf in",
    "nan in gradient": "NaN or Inf in the gradient of",
    "nan in buffer": "NaN or Inf in buffer",
}


@dataclass(frozen=True, order=True)
class Cell:
    """One fault at one phase in one mode."""

    mode: str
    phase: str
    fault: str

    def __str__(self) -> str:
        return f"{self.mode} | {self.phase} | {self.fault}"


@dataclass(frozen=True)
class Expected:
    """What must come of a cell; in both cases the samples are committed once each, the weights those of the steps that count.

    Attributes:
        halts: the run, or the pass over data, ends with an error that has these words. "": it goes on.
        steps: that count then.
        names_step: the error names the step, counted from 1.
        names_worker: it names the worker at which the fault was.
        told: a notice has these words.
    """

    halts: str = ""
    steps: int = 6
    names_step: bool = False
    names_worker: bool = True
    told: str = ""


def senseless(mode: str, phase: str, fault: str) -> str:
    """Return why there is no such cell; "" where there is."""
    one = MODES[mode]
    if phase == "checkpoint" and mode == "site" and fault != "full disk":
        return "the orchestrator holds the state: no worker is asked for it"
    if fault in RAISES:
        if phase == "checkpoint":
            if fault == "context death":
                return "the stand-in raises once, and a lost device gives no state when it is asked again either"
            return "" if fault != "exception" else "no code of the user's runs while a state is sent or written"
        if phase not in _USERS_CODE:
            return "no code of the user's runs there, and no memory is asked for"
        if mode == "site" and phase in ("optimizer", "commit"):
            return "optimizer and schedule are the orchestrator's: tests/faults/test_commit_errors.py"
    if fault in NANS and phase != _NAN_AT[fault]:
        return f"the value comes to be at the phase {_NAN_AT[fault]!r}"
    if mode == "lone" and phase in ("bucket half sent", "waiting for the sum"):
        return "a lone worker commits by itself and sends no gradients"
    if phase == "bucket half sent" and one.direct:
        return "the bytes go through sockets of gloo's own"
    return ""


def expected(mode: str, phase: str, fault: str) -> Expected:
    """Return the outcome that was written down for a cell."""
    if mode == "local" and fault in RAISES and phase in ("optimizer", "commit"):
        phase = "backward"  # the user's optimizer and schedule step within the round, before its commit
    gone = (*ENDS, *REPLACED)
    if phase == "prediction" and fault in (*gone, STOPS[1]) and not MODES[mode].elastic:
        return Expected("needs")  # a pass does not wait for workers: so many are needed, so many are here
    if phase == "prediction" and fault in gone and mode == "lone":
        return Expected("was lost")
    if fault == "hostile" and phase != "join":
        return Expected(told="its session was ended, because it sent a Accept")
    if fault in HANGS and phase in ("forward", "backward"):
        return Expected(told="is slow: no answer" if MODES[mode].spares else "waits for")
    if fault in ENDS + STOPS + LINKS + HANGS + REPLACED:
        return Expected()
    whole, cause = mode in ("data", "lone", "site", "local"), _CAUSES[fault]
    if fault == "out of memory" and phase in ("forward", "backward") and whole:
        return Expected()  # the shard is cut into smaller pieces
    if (phase, fault) == ("checkpoint", "full disk"):
        return Expected(told=cause)  # of a callback: a run is worth more than one of its checkpoints
    if fault == "context death" and not MODES[mode].copied and phase not in _NOTHING_LOST:
        return Expected(cause, _SNAPSHOT, names_step=True)  # its process had the only copy of what it held
    if phase == "optimizer":
        return Expected(cause, _steps_held(mode, fault), names_step=True)
    steps = {"source": 0, "validation": 3, "prediction": 6, "commit": STEP + 1, "checkpoint": STEP + 1}.get(phase, STEP)
    # What is not finite on one rank of a group is so on all of them after the sum, or in the stages before.
    spreads = fault in NANS and not whole
    return Expected(cause, steps, phase not in _NOTHING_LOST, names_worker=not spreads)


def _steps_held(mode: str, fault: str) -> int:
    """Return the steps that count where one worker could not apply the last one."""
    if mode in ("data", "site") or (mode in ("direct", "hybrid") and fault in ("out of memory", "context death")):
        return STEP + 1  # the others have applied it, and it cannot be undone everywhere
    if fault != "out of memory" or mode == "lone":
        return STEP  # the others take it back, where there are any
    return _SNAPSHOT  # torch's own optimizers keep no copy


CELLS = [
    Cell(mode, phase, fault)
    for mode in MODES
    for phase in PHASES
    for fault in FAULTS
    if not senseless(mode, phase, fault)
]


#: What the tests run, by mode, as "phase: fault, fault".
_COVERING = {
    "data": (
        "join: SIGKILL", "source: exception", "batch received: nan in input", "forward: out of memory, nan in loss, deadlock",
        "backward: SIGKILL, slow", "bucket half sent: reset at a random byte", "waiting for the sum: SIGSTOP 5 s, SIGSTOP 60 s",
        "optimizer: SIGTERM, exception", "commit: exit", "validation: SIGKILL", "prediction: SIGKILL",
        "checkpoint: full disk, SIGKILL", "leave: exit",
    ),
    "lone": (
        "optimizer: SIGKILL, exception", "prediction: SIGKILL", "commit: reset at a random byte", "checkpoint: silence",
        "join: cut in mid-frame", "source: context death", "forward: deadlock", "backward: hostile",
    ),
    "local": ("backward: SIGKILL", "waiting for the sum: hostile", "optimizer: exception, context death"),
    "site": ("bucket half sent: SIGKILL", "optimizer: cut in mid-frame", "commit: SIGTERM"),
    "direct": ("backward: SIGKILL", "optimizer: exception", "forward: nan in buffer"),
    "zero 1": ("optimizer: SIGKILL, full disk", "bucket half sent: cut in mid-frame"),
    "zero 2": ("forward: nan in buffer, deadlock", "backward: context death", "checkpoint: out of memory, SIGTERM"),
    "zero 3": ("backward: exit", "leave: SIGTERM", "validation: exception"),
    "zero 3 direct": ("forward: SIGKILL",),
    "tensor": ("forward: SIGKILL", "checkpoint: SIGKILL", "commit: exception"),
    "pipeline": (
        "join: exit", "batch received: silence", "backward: nan in gradient", "waiting for the sum: reset at a random byte",
        "prediction: exception", "backward: hostile",
    ),
    "pipeline direct": ("forward: exit",),
    "hybrid": ("forward: SIGKILL", "backward: exception"),
}  # fmt: skip


def covering() -> list[Cell]:
    """Each phase, each fault and each mode at least once, and the pairs that are met most often."""
    chosen = [(mode, *pairs.split(": ")) for mode, lines in _COVERING.items() for pairs in lines]
    return [Cell(mode, phase, fault) for mode, phase, faults in chosen for fault in faults.split(", ")]
