"""The checkpoints that a run makes by itself: written in the background, named by step and session, the newest kept."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Protocol

import psutil

from guava_nb.cluster.job import Job
from guava_nb.cluster.job_events import Wake
from guava_nb.config.units import show_bytes
from guava_nb.data.sizes import size_of
from guava_nb.errors import CheckpointError
from guava_nb.sync.replica_set import ReplicaSet
from guava_nb.sync.state_at_workers import changed_in_python
from guava_nb.training import checkpoint
from guava_nb.training.plan import Position, TrainingPlan

__all__ = ["RunFiles"]


class Place(Protocol):
    """As much of a run's accounting as a checkpoint needs: see `StepAccounting`."""

    @property
    def steps(self) -> int:
        """Optimizer steps that are committed."""

    def where(self) -> Position:
        """Return the committed position."""


class RunFiles:
    """Writes the checkpoints of one run, one at a time; a file that cannot be written is told, and the run goes on.

    Args:
        job, replica_set, plan: of the run.
        place: gives how far it is.

    Attributes:
        name: how the names of the run's files begin.
        extras: what each of its checkpoints has beside state and place.
    """

    def __init__(self, job: Job, replica_set: ReplicaSet, plan: TrainingPlan, place: Place) -> None:
        """Nothing was written yet."""
        self._job, self._replica_set, self._place = job, replica_set, place
        self._notice, self._folder, self._keep = job.cluster.notice, plan.save_folder, plan.keep
        self.name = plan.save_name or replica_set.run_id
        self._base, self._log_mark = plan.base, plan.log_mark
        self._writer: threading.Thread | None = None
        self._is_writing = self._told_slow = False
        self._num_failed = 0  # since the last one that was written
        self._written: dict[str, list[Path]] = {}

    def begin(self, kind: str) -> None:
        """Copy the state that the master holds, and begin to write it.

        Args:
            kind: "" for those of a period, "best" for the best, of which there is one.
        """
        self._finish_last()
        self._replica_set.keep_own(self._job)
        master, held_step = self._replica_set.master, self._replica_set.master_step
        needed, free = size_of([*master.model.state_dict().values(), master.optimizer.state_dict()]), _free_bytes()
        step = self._place.steps
        path = self._folder / "-".join(filter(None, (self.name, kind, f"step-{step}.pt")))
        if free < needed:
            self._failed(path, f"its copy needs {show_bytes(needed)} of memory, and {show_bytes(free)} are free here")
            return
        state, place = master.state(), self._place.where()
        write = partial(checkpoint.write, path, state, step - 1, place, self._replica_set.spec, self.extras)
        self._is_writing = True
        self._writer = threading.Thread(
            target=self._write, args=(path, kind, write, held_step), name="guava-saving", daemon=True
        )
        self._writer.start()

    @property
    def extras(self) -> checkpoint.Extras:
        """What a checkpoint of now has beside state and place."""
        own = self._replica_set.own_of(self._replica_set.master_step)
        return checkpoint.Extras(self._base, self._log_mark, changed_in_python(self._replica_set), own)

    def save(self, path: Path) -> None:
        """Write the state that the master holds to this file, before it returns.

        Raises:
            CheckpointError: the file cannot be written.
        """
        held, place = self._replica_set, self._place
        held.keep_own(self._job)
        checkpoint.write(path, held.master.state(), place.steps - 1, place.where(), held.spec, self.extras)
        held.note_saved(path, held.master_step)

    def finish(self) -> None:
        """Wait until the last file is whole, or was given up."""
        if self._writer is not None:
            self._writer.join()
        if self._num_failed > 1:
            newest = self._replica_set.newest_file()
            self._notice(
                f"the last {self._num_failed} checkpoints of {self.name} were not saved; "
                + (f"the newest that is there is {newest}" if newest else "no other one is there")
                + ": save_checkpoint(path) (%guava_save PATH) writes the state of now"
            )

    def _finish_last(self) -> None:
        if self._is_writing and not self._told_slow:
            self._told_slow = True
            self._notice(
                f"a checkpoint is due while the last one is still being written to {self._folder}: the steps wait for it. Save "
                "less often (save_every, --save-every), or on a faster disk"
            )
        self._job.pump(lambda: not self._is_writing)

    def _write(self, path: Path, kind: str, write: Callable[[], None], held_step: int) -> None:
        try:
            write()
        except CheckpointError as error:
            self._failed(path, str(error).removeprefix(f"cannot write {path}: "))
        except Exception as error:
            self._failed(path, f"{type(error).__name__}: {error}")
        else:
            if self._num_failed > 1:
                self._notice(f"{path} is saved; {self._num_failed} checkpoints before it were not")
            self._num_failed = 0
            self._replica_set.note_saved(path, held_step)
            self._let_go_of_older(path, kind)
        finally:
            self._is_writing = False
            self._job.post(Wake())

    def _failed(self, path: Path, why: str) -> None:
        """Tell the first one that is not saved; a full disk stays full, and a night has many of them."""
        self._num_failed += 1
        if self._num_failed == 1:
            self._notice(f"{path} was not saved: {why}. The run goes on; how many more were not saved is told later")

    def _let_go_of_older(self, path: Path, kind: str) -> None:
        written = self._written.setdefault(kind, [])
        if path in written:  # the run went back, and came here again
            written.remove(path)
        written.append(path)
        keep = 1 if kind else self._keep
        while keep is not None and len(written) > keep:
            with contextlib.suppress(OSError):
                written.pop(0).unlink(missing_ok=True)


def _free_bytes() -> int:
    return int(psutil.virtual_memory().available)
