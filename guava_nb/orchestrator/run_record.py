"""Where a run stands in the data after each step that it has issued, in files that outlive its process.

The weights are not here: workers hold them. A process that opens the session anew asks a worker at which step it stands, finds
the place in the data here, and goes on. Two files: one is written anew when an epoch begins (what the loader needs), the other
gets a line for each step, and names the first one, so that the lines of an earlier run are never taken for its own. Lines survive
a kill of the process, not a loss of power.
"""

from __future__ import annotations

import contextlib
import glob
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import msgspec
import torch

from guava_nb.cluster.cluster import Cluster
from guava_nb.config.state_folder import OTHERS_WRITE, not_private
from guava_nb.errors import CheckpointError
from guava_nb.protocol.messages import RoundSpec, RunSpec
from guava_nb.sync.replica_set import ReplicaSet
from guava_nb.sync.resident_replica_set import is_own
from guava_nb.training.plan import NotePlace, Position, TrainingPlan
from guava_nb.training.saving.durable_file import NotWritten, write_durably

__all__ = ["LastRun", "RunRecord", "note_place"]

FORMAT = "guava_nb run 1"
_SAVED = "saved"  # begins a line of the steps: a file has the state after that one
_ABOUT_BYTES = 64 << 10


class RunRecord:
    """Writes where one run stands; what an earlier run left there goes with the first step.

    Args:
        path: of the file that is written with each epoch; the one with the steps lies beside it.
        run_id, spec: of the run.
        log: gives the name and counts of its log, see `TrainingPlan.log_mark`.
        tell: takes a sentence when it cannot be written, as on a full disk; the run goes on without it.
        facts: gives `workers`, by name, and `files`: how the paths of its checkpoints begin.
    """

    def __init__(
        self,
        path: Path,
        run_id: str,
        spec: RunSpec,
        log: Callable[[], tuple[str, int, int] | None] = lambda: None,
        tell: Callable[[str], object] = lambda text: None,
        facts: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        """Write nothing yet."""
        self._path, self._run_id, self._spec, self._log, self._tell = path, run_id, spec, log, tell
        self._facts = facts
        self._has_failed = False
        self._steps: IO[str] | None = None
        self._next, self._epoch, self._batches, self._samples = -1, -1, 0, 0

    def issued(
        self, step: int, committed: Position, batches: int, samples: int, feed: Callable[[], dict[str, Any]], done: int
    ) -> None:
        """Note that a step, or a round, is about to be done.

        Args:
            step: its number, from 0.
            committed: how far the data is committed. Where the step does not follow the last one, nothing else is in flight.
            batches, samples: of this step.
            feed: gives what the loader needs to go on from there.
            done: optimizer steps that are committed.
        """
        if self._has_failed:
            return
        try:
            if step != self._next or committed.epoch != self._epoch or self._steps is None:
                self._begin(step, committed, feed(), done)
            assert self._steps is not None
            self._batches += batches
            self._samples += samples
            self._next = step + 1
            self._steps.write(f"{step} {self._epoch} {self._batches} {self._samples}\n")
        except (NotWritten, OSError) as error:
            self._give_up(error)

    def _give_up(self, error: NotWritten | OSError) -> None:
        """Leave nothing that would be out of date, and say so."""
        self._has_failed = True
        with contextlib.suppress(OSError):
            self.close()
        with contextlib.suppress(OSError):
            self.forget(self._path)
        self._tell(
            f"where this run stands cannot be noted in {self._path} ({error}); the run goes on, but a kernel that follows "
            'this one cannot go on with resume="session": save checkpoints (save_interval)'
        )

    def _begin(self, step: int, place: Position, feed: dict[str, Any], done: int) -> None:
        self.close()
        self._epoch, self._batches, self._samples = place.epoch, place.batches, place.samples
        content = {
            "format": FORMAT,
            "run_id": self._run_id,
            "spec": {f: msgspec.to_builtins(getattr(self._spec, f)) for f in self._spec.__struct_fields__},
            "step": step - 1,
            "done": done,
            "place": (place.epoch, place.batches, place.samples),
            "feed": feed,
            "log": self._log(),
            **self._facts(),
            "steps": (name := secrets.token_hex(8)),
        }
        write_durably(self._path, lambda sink: torch.save(content, sink), _ABOUT_BYTES, 0o600)  # type: ignore[arg-type]
        (steps := _steps_of(self._path)).unlink(missing_ok=True)
        handle = os.open(steps, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        self._steps = open(handle, "w", encoding="ascii", buffering=1)  # noqa: SIM115 - it stays open for the run
        self._steps.write(f"{name}\n")

    def close(self) -> None:
        """Write no more; what is written stays."""
        if self._steps is not None:
            self._steps.close()
            self._steps = None

    @staticmethod
    def note_saved(path: Path | None, step: int) -> None:
        """Note, for a process that follows, that a file has the state after this step of the run that lies there."""
        with contextlib.suppress(OSError):  # then that process asks before it gives the run up, which a file has
            if path is not None and path.exists():
                with _steps_of(path).open("a", encoding="ascii") as steps:
                    steps.write(f"{_SAVED} {step}\n")

    @staticmethod
    def forget(path: Path) -> None:
        """Remove what runs left there."""
        for file in (path, _steps_of(path)):
            file.unlink(missing_ok=True)


@dataclass(frozen=True)
class LastRun:
    """What an ended process left of its last run.

    Attributes:
        run_id: its name at the workers.
        spec: its record, as plain data.
        places: epoch, batches and samples after each step that a worker may hold.
        feed: what the loader needs to go on from the first of them.
        log: name and counts of its log; None where there was none.
        workers: that had its state, by name; none where that was not noted.
        files: how the paths of its checkpoints begin.
        saved_step: the newest step after which its state was saved to a file by name; -1: none was.
        done: optimizer steps up to the first of `places`; a round of local steps has several.
    """

    run_id: str
    spec: dict[str, Any]
    places: dict[int, tuple[int, int, int]]
    feed: dict[str, Any]
    log: tuple[str, int, int] | None = None
    workers: tuple[str, ...] = ()
    files: str = ""
    saved_step: int = -1
    done: int = 0

    @classmethod
    def read(cls, path: Path) -> LastRun | None:
        """Return what lies there; None for nothing, nothing that can be read, or what other users may have written."""
        if any(not_private(one, OTHERS_WRITE) for one in (path, _steps_of(path))):
            return None
        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
            if content["format"] != FORMAT:
                return None
            epoch = int(content["place"][0])
            places = {int(content["step"]): tuple(map(int, content["place"]))}
            lines = _steps_of(path).read_text(encoding="ascii").splitlines(keepends=True)
            if content.get("steps", "") not in ("", *(line.strip() for line in lines[:1])):
                lines = []  # of another record: the process ended before it wrote one of this
            saved = [int(line.split()[1]) for line in lines if line.startswith(f"{_SAVED} ") and line.endswith("\n")]
            for line in lines:
                with contextlib.suppress(ValueError):  # the last one may have been cut off
                    step, *place = map(int, line.split() if line.endswith("\n") else ())
                    if len(place) == 3 and place[0] == epoch:  # else of the epoch before: the run ended in between
                        places[step] = (place[0], place[1], place[2])
            log = content.get("log")
            mark = None if log is None else (str(log[0]), int(log[1]), int(log[2]))
            run_id, spec, feed = str(content["run_id"]), dict(content["spec"]), dict(content["feed"])
            workers, files = tuple(map(str, content.get("workers", ()))), str(content.get("files", ""))
            newest, done = max(saved, default=-1), int(content["done"])
            return cls(run_id, spec, places, feed, mark, workers, files, newest, done)  # type: ignore[arg-type]
        except Exception:  # a damaged file may raise any error
            return None

    @classmethod
    def lost(cls, path: Path | None, ended: Sequence[str]) -> str:
        """Return a sentence where the last run's state is gone with the only workers that had it; "" where it may be had.

        Args:
            path: where the run was noted; None where it was not.
            ended: names of the workers that ended with their process.
        """
        last = None if path is None else cls.read(path)
        if last is None or not last.workers or not set(last.workers) <= set(ended):
            return ""
        saved = last.newest_file()
        way = (
            f"go on from its newest checkpoint with --resume {saved}"
            if saved
            else "train anew, and give --save-every 10min: checkpoints outlive a kernel"
        )
        return (
            f"{last.run_id} was trained by workers of that kernel alone ({', '.join(last.workers)}), which ended with it, and "
            f"its weights with them: {way}"
        )

    @classmethod
    def held(cls, path: Path) -> str:
        """Return a sentence where workers may hold what the last run trained and no file has it; "" elsewhere."""
        last = cls.read(path)
        if last is None or last.last_step < 0 or last.saved_step >= last.last_step or last.newest_file() is not None:
            return ""
        names = f" ({', '.join(last.workers)})" if last.workers else ""
        return (
            f"the workers of the kernel before{names} may hold what {last.run_id} trained up to step {last.last_step + 1}, and "
            "no file has it: the same line with --resume session goes on with it (a run that had ended brings its model "
            "back); --fresh gives it up and trains anew"
        )

    def newest_file(self) -> Path | None:
        """Return the checkpoint of the run that was written last; None where there is none any more."""
        start = Path(self.files)
        found = list(start.parent.glob(f"{glob.escape(start.name)}-*step-*.pt")) if self.files else []
        return max(found, key=lambda one: one.stat().st_mtime, default=None)

    @property
    def last_step(self) -> int:
        """The last step that was issued, from 0."""
        return max(self.places)

    def steps_after(self, step: int) -> int:
        """Return how many optimizer steps, from the very beginning, are done after this step, or round, of `places`."""
        if (rounds := msgspec.convert(self.spec.get("rounds"), RoundSpec | None)) is None:
            return step + 1
        before = self.places[min(self.places)][1]
        return self.done - (before - self.places[step][1]) // rounds.batches_per_step  # rounded up

    def content(self, step: int) -> dict[str, Any]:
        """Return what a checkpoint after this step would have beside the state.

        Raises:
            CheckpointError: as `position`.
        """
        place = self.position(step)
        return {
            "step": self.steps_after(step) - 1,
            "position": {name: getattr(place, name) for name in Position.__slots__},
            "spec": self.spec,
            **({"log": self.log} if self.log else {}),
        }

    def position(self, step: int) -> Position:
        """Return the place in the data after a step.

        Raises:
            CheckpointError: the step is of another epoch than the one that was in work.
        """
        if step not in self.places:
            raise CheckpointError(
                f"the workers hold the state after step {step + 1} of {self.run_id}, whose place in the data is not known here: "
                "go on from a checkpoint (resume=PATH), or train anew (fresh=True)"
            )
        epoch, batches, samples = self.places[step]
        is_exact = batches == self.feed.get("batches")
        return Position(
            epoch, batches, samples, {**self.feed, "batches": batches, "now": self.feed["now"] if is_exact else None}
        )


def note_place(path: Path | None, replica_set: ReplicaSet, plan: TrainingPlan, cluster: Cluster) -> NotePlace | None:
    """Return what keeps a run's place for a process that follows this one; None where workers do not keep the rest.

    Args:
        path: where it is kept; None where nothing outlives this process.
    """
    if path is None:
        return None
    spec = replica_set.spec
    if spec.parallel is not None or spec.optimizer_site != "workers" or is_own(spec):
        RunRecord.forget(path)
        return None

    def facts() -> dict[str, Any]:
        names = [cluster.name(rank) for rank in cluster.roster.ready()]
        return {"workers": names, "files": str(Path(plan.save_folder, plan.save_name).absolute())}

    return RunRecord(path, replica_set.run_id, spec, lambda: plan.log_mark, cluster.notice, facts).issued


def _steps_of(path: Path) -> Path:
    return path.with_suffix(".steps")
