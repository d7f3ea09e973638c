"""The table: every program in every mode on 2 and 3 workers, and what came of a cell.

A cell is right when its weights equal plain PyTorch's to 1e-9; when it was refused with the sentence that its program
expects; or when a notice tells of the difference. All else is a fault.
"""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from guava_nb.errors import GuavaError
from tests.parity.programs import (
    constraints,
    contrastive,
    derivatives,
    detection,
    habits,
    kept,
    language,
    meetings,
    outside,
    recipes,
    signals,
    vision,
)
from tests.parity.programs.program import NOISY, Plain, Program, plain
from tests.support.processes import Session

__all__ = ["CELLS", "MODES", "PROGRAMS", "Cell", "Outcome", "Table", "covering"]

TOLERANCE = 1e-9
#: What tensor mode says of draws.
DRAWS = "The forward draws random numbers"
LIMIT_S = 30.0  # of a cell; one that takes longer hangs

#: name of the column: mode, settings of it, options of the run.
MODES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "data": ("data", {}, {}),
    "relay": ("data", {"path": "relay"}, {}),
    "site": ("data", {}, {"optimizer_site": "orchestrator"}),
    "zero 1": ("zero", {"zero_stage": 1}, {}),
    "zero 3": ("zero", {"zero_stage": 3}, {}),
    "tensor": ("tensor", {}, {}),
    "pipeline": ("pipeline", {}, {}),
}

PROGRAMS: dict[str, Program] = {
    program.name: program
    for module in (
        vision,
        detection,
        kept,
        language,
        signals,
        contrastive,
        recipes,
        constraints,
        derivatives,
        habits,
        outside,
        meetings,
    )
    for program in module.PROGRAMS
}

#: Refusals that say what a mode cannot do, by mode: true of every program that meets them.
MODE_REFUSALS: dict[str, tuple[str, ...]] = {
    "tensor": ("nothing in this model can be shared by", "exchanged gradients are dense; use sparse=False"),
    "pipeline": (
        "a pipeline needs a criterion of outputs and targets",
        "to cut between,",
        "cannot be cut into stages: in the forward of",
        "cannot be cut into stages: its forward calls a",
        "to cut the model into stages",
        "exchanged gradients are dense; use sparse=False",
    ),
    "zero 1": ("exchanged gradients are dense; use sparse=False",),
    "zero 3": ("exchanged gradients are dense; use sparse=False",),
}


@dataclass(frozen=True, order=True)
class Cell:
    """One program in one mode on so many workers."""

    workers: int
    program: str
    mode: str

    def __str__(self) -> str:
        return f"{self.program} | {self.mode} | {self.workers}"


@dataclass(frozen=True)
class Outcome:
    """What came of a cell.

    Attributes:
        kind: "equal", "refused", "told", "silent" (another result and not a word), "error" (a sentence that nobody expected)
            or "hang".
        text: difference, refusal or notice.
        seconds: it took.
        is_right: whether it is what the program expects.
    """

    kind: str
    text: str
    seconds: float
    is_right: bool


CELLS = sorted(
    Cell(workers, name, mode)
    for name, program in PROGRAMS.items()
    for mode in program.modes or MODES
    for workers in (2, 3)
)


def covering() -> list[Cell]:
    """Each program once, so that every mode and both numbers of workers come up often."""
    columns = [(mode, workers) for workers in (2, 3) for mode in MODES]
    chosen = []
    for number, (name, program) in enumerate(PROGRAMS.items()):
        fitting = [
            (m, w) for m, w in columns if m in (program.modes or MODES) and not (m == "pipeline" and program.step)
        ]
        mode, workers = fitting[number * 5 % len(fitting)]
        chosen.append(Cell(workers, name, mode))
    return sorted(chosen)


@functools.cache
def _plain(name: str) -> Plain | Exception:
    try:
        return plain(PROGRAMS[name])
    except Exception as error:  # the program's own: a run must not go where plain PyTorch ends
        return error


def _is_expected(text: str, program: Program, cell: Cell) -> bool:
    expected, phrase = program.expected(cell.mode, cell.workers)
    phrases = MODE_REFUSALS.get(cell.mode, ())
    return any(one.lower() in text.lower() for one in (*phrases, *([phrase] if expected == "refused" else [])))


class Table:
    """Runs cells on worker processes of this machine, which stay from one cell to the next."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._session: Session | None = None
        self._told: dict[str, list[str]] = {}

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
        self._session = None

    def session(self, workers: int) -> Session:
        """Return the session, with so many workers."""
        if self._session is None:
            self._session = Session(self._folder, num_workers=2)
        self._session.ensure(workers)
        return self._session

    def run(self, cell: Cell, limit_s: float = LIMIT_S) -> Outcome:
        """Train a program, and say what came of it."""
        session = self.session(cell.workers)
        program, started = PROGRAMS[cell.program], time.monotonic()
        try:
            kind, text = self._trained(session.orch, program, cell.mode, limit_s)
        except GuavaError as error:
            kind, text = "refused", f"{type(error).__name__}: {error}"
        except Exception as error:  # a sentence of torch's or Python's, where ours should stand
            kind, text = "error", f"{type(error).__name__}: {error}"
        seconds = time.monotonic() - started
        if kind == "hang":
            self.close()
        text = " ".join(text.split())
        if kind == "refused" and not _is_expected(text, program, cell):
            kind = "error"
        return Outcome(kind, text, seconds, kind in ("equal", "refused", "told"))

    def _trained(self, orch: Any, program: Program, mode: str, limit_s: float) -> tuple[str, str]:
        name, settings, options = MODES[mode]
        orch.set_mode(name, **{"sync_batchnorm": False, **settings, **program.settings})
        before = set(orch.status().note_numbers)
        orch.register_model(_built(program) if program.instance else program.model)
        run = orch.start_training(
            program.data(), num_epochs=program.epochs, detach=True, fresh=True, progress=False,
            **_options(program), **options,
        )  # fmt: skip
        if not run.wait(limit_s):
            state = repr(run)
            run.interrupt()
            run.interrupt()
            return "hang", state
        run.result()
        status = orch.status()
        told = zip(status.note_numbers, status.notes, strict=True)
        notices = [sentence for number, sentence in told if number not in before]
        if run.check and run.check["known"]:  # nothing changed since a run that told it
            notices += self._told.get(program.name, [])
        self._told[program.name] = notices
        state, reference = run.model().state_dict(), _plain(program.name)
        if isinstance(reference, Exception):
            return "silent", f"plain PyTorch raises {reference!r}"
        return _compared(state, [record["loss"] for record in run.history], reference, program, mode, notices)


def _built(program: Program) -> torch.nn.Module:
    torch.manual_seed(0)
    return program.model()


def _options(program: Program) -> dict[str, Any]:
    given: dict[str, Any] = {"optimizer": program.optimizer, "optimizer_args": dict(program.optimizer_args)}
    if program.step is not None:
        given["step"] = program.step
    else:
        given |= {"criterion": program.criterion, "criterion_args": dict(program.criterion_args) or None}
    if program.scheduler is not None:
        given |= {"scheduler": program.scheduler, "scheduler_args": dict(program.scheduler_args)}
    return {**given, **program.options}


def _compared(
    state: dict[str, torch.Tensor],
    losses: list[float],
    reference: Plain,
    program: Program,
    mode: str,
    notices: list[str],
) -> tuple[str, str]:
    expected = {name.replace("_orig_mod.", ""): value for name, value in reference.state.items()}
    if state.keys() != expected.keys():
        return "silent", f"other keys: {sorted(state.keys() ^ expected.keys())}"
    if len(losses) != len(reference.losses):
        return "silent", f"{len(losses)} steps instead of {len(reference.losses)}"
    gaps = {name: _gap(state[name], value) for name, value in expected.items()}
    gaps["loss"] = max(abs(a - b) for a, b in zip(losses, reference.losses, strict=True))
    worst = max(gaps, key=lambda name: gaps[name])
    difference = f"{gaps[worst]:.1e}" + (f" ({worst})" if gaps[worst] > TOLERANCE else "")
    if gaps[worst] <= TOLERANCE:
        return "equal", difference
    phrase = program.expected(mode, 0)[1] if program.told else None
    phrase = DRAWS if mode == "tensor" and phrase == NOISY else phrase  # nothing is cut there
    said = [sentence for sentence in notices if phrase and phrase.lower() in sentence.lower()]
    return ("told", f"{difference}: {said[0]}") if said else ("silent", " / ".join([difference, *notices]))


def _gap(mine: Any, other: Any) -> float:
    if not isinstance(other, torch.Tensor):  # of get_extra_state()
        return 0.0 if mine == other else float("inf")
    if mine.shape != other.shape or mine.is_complex() != other.is_complex():
        return float("inf")
    if not mine.numel():
        return 0.0
    apart = (mine.to(torch.complex128) - other.to(torch.complex128)).abs()
    gap = float(apart.masked_fill(mine == other, 0).max())  # infinities have no difference
    return gap if gap == gap else float("inf")
