"""Samples that kill the process of each worker that computes them, as a pure count.

A shard whose code kills its process would go from worker to worker until none is left. One loss proves nothing, since workers
come and go; the third worker lost over the same samples does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from guava_nb.cluster.roster import Member
from guava_nb.data.sample_text import sample_text
from guava_nb.errors import SamplesKill
from guava_nb.sync.step_in_flight import StepInFlight
from guava_nb.sync.step_machine import ShardTask

__all__ = ["MOST_LOSSES", "PoisonSamples", "Blamed", "Samples"]

MOST_LOSSES = 3

Samples = tuple[int, tuple[int, ...]]  # epoch and ids


@dataclass(frozen=True, slots=True)
class Blamed:
    """Samples over which too many workers were lost."""

    samples: Samples
    victims: tuple[int, ...]

    def error(self, members: Sequence[Member]) -> SamplesKill:
        """Return the error that says so; `members` are the victims."""
        epoch, ids = self.samples
        names = ", ".join(member.name for member in members)
        return SamplesKill(
            f"{len(members)} workers were lost while they worked on {sample_text(ids)} of epoch {epoch + 1} ({names}; the "
            f"last one: {members[-1].detail}). The step was not applied. Look at what your code does with these samples, and at "
            "the memory they need; %guava_log shows the last lines of each worker"
        )


class PoisonSamples:
    """Which workers were lost over which samples."""

    def __init__(self) -> None:
        """No worker was lost yet."""
        self._at_work: dict[int, Samples] = {}
        self._lost: dict[Samples, list[int]] = {}

    def hold(self, rank: int, samples: Samples) -> None:
        """A member vanished while it worked on these samples; it may come back."""
        self._at_work.setdefault(rank, samples)

    def vanished(self, rank: int, steps: Iterable[StepInFlight]) -> None:
        """A member vanished: note the oldest shard that it owes, if any; the others only wait in its queue."""
        owed = ((step, task) for step in steps for task in step.machine.owed_by(rank))
        step, task = next(owed, (None, None))
        if step is not None and task is not None and task.sample_ids:
            self.hold(rank, _samples(step, task))

    def committed(self, step: StepInFlight) -> None:
        """All samples of a step were computed after all."""
        for task in step.machine.tasks:
            if task.sample_ids:
                self.done(_samples(step, task))

    def back(self, rank: int) -> None:
        """It came back: nothing was wrong with the samples."""
        self._at_work.pop(rank, None)

    def lost(self, rank: int) -> Blamed | None:
        """It is lost for good; returns the samples if `MOST_LOSSES` workers were lost over them by now."""
        samples = self._at_work.pop(rank, None)
        if samples is None:
            return None
        victims = self._lost.setdefault(samples, [])
        victims.append(rank)
        return Blamed(samples, tuple(victims)) if len(victims) >= MOST_LOSSES else None

    def done(self, samples: Samples) -> None:
        """They were computed after all."""
        self._lost.pop(samples, None)


def _samples(step: StepInFlight, task: ShardTask) -> Samples:
    return step.epoch, tuple(task.sample_ids)
