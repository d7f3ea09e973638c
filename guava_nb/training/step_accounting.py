"""What the committed steps of a run add up to: its history, its place in the data, which samples count."""

from __future__ import annotations

import logging
import math
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import nn

from guava_nb.cluster.roster import Member
from guava_nb.data.loader_feed import LoadedBatch
from guava_nb.data.sample_text import sample_text
from guava_nb.errors import SamplesKill, TrainingError
from guava_nb.protocol.messages import Commit, StepApplied
from guava_nb.sync.beginning import Beginning
from guava_nb.sync.step_in_flight import StepInFlight
from guava_nb.sync.step_machine import ShardTask
from guava_nb.telemetry.run_energy import RunEnergy
from guava_nb.training.first_step_check import FirstStepCheck
from guava_nb.training.membership import Membership
from guava_nb.training.plan import Position, Snapshot, TrainingPlan
from guava_nb.training.run import Run

__all__ = ["PoisonSamples", "SampleLedger", "StepAccounting"]

# Which samples were drawn and which were committed, so that "exactly once" is counted and not believed.


class SampleLedger:
    """Two lists of sample ids per epoch: drawn from the loader, and committed by a step.

    A sampler may draw an id several times on purpose; so the two are compared as multisets, id by id.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._drawn: dict[int, array[int]] = {}
        self._committed: dict[int, array[int]] = {}

    def draw(self, epoch: int, ids: Iterable[int]) -> None:
        """Note ids that the loader gave for a step that will be issued."""
        self._drawn.setdefault(epoch, array("q")).extend(ids)

    def commit(self, epoch: int, ids: Iterable[int]) -> None:
        """Note ids whose gradient is part of an applied step."""
        self._committed.setdefault(epoch, array("q")).extend(ids)

    def withdraw_uncommitted(self) -> None:
        """A run that is stopped drew samples ahead: what was never committed was not lost but not reached."""
        for epoch in list(self._drawn):
            self._drawn[epoch] = array("q", self._committed.get(epoch, array("q")))

    def truncate(self, epoch: int, committed: int) -> None:
        """Go back to a state in which `epoch` had this many committed samples and no later epoch had begun."""
        for later in [e for e in self._drawn if e > epoch]:
            del self._drawn[later]
        for later in [e for e in self._committed if e > epoch]:
            del self._committed[later]
        kept = self._committed.get(epoch, array("q"))[:committed]
        self._committed[epoch] = kept
        self._drawn[epoch] = array("q", kept)

    def committed_in(self, epoch: int) -> int:
        """Samples committed in one epoch."""
        return len(self._committed.get(epoch, ()))

    def balance(self) -> tuple[int, int]:
        """Return (lost, duplicated): draws without a commit, and commits without a draw."""
        lost = duplicated = 0
        for epoch in sorted(set(self._drawn) | set(self._committed)):
            drawn, committed = (
                np.array(d.get(epoch, array("q")), dtype=np.int64) for d in (self._drawn, self._committed)
            )
            ids, inverse = np.unique(np.concatenate([drawn, committed]), return_inverse=True)
            difference = np.bincount(inverse[: len(drawn)], minlength=len(ids)) - np.bincount(
                inverse[len(drawn) :], minlength=len(ids)
            )
            lost += int(difference[difference > 0].sum())
            duplicated += int(-difference[difference < 0].sum())
        return lost, duplicated


# Samples that kill the process of each worker that computes them, as a pure count.
#
# A shard whose code kills its process would go from worker to worker until none is left. One loss proves nothing, since workers
# come and go; the third worker lost over the same samples does.

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


log = logging.getLogger(__name__)

#: Calls the callbacks' method of this name with a record.
CallHook = Callable[[str, dict[str, Any]], None]


class StepAccounting:
    """Counts one run's steps and samples.

    Attributes:
        call: calls the user's callbacks.
        position: how far the data has been committed.
        snapshot: the state to go back to, with its position.
        first_step: number of the run's first step.
        team: members that the last step was issued to; () when the next ones are no change.
        poison: samples over which workers were lost.
        check: looks at the record of each step; None: there is no check.
    """

    def __init__(self, membership: Membership, plan: TrainingPlan, run: Run, energy: RunEnergy, call: CallHook) -> None:
        """Begin where the plan does."""
        self._membership, self._plan, self._run, self._energy, self.call = membership, plan, run, energy, call
        self._replica_set = membership.replica_set
        self.note_validated()
        start = plan.start if plan.start.feed is not None else replace(plan.start, feed=self._feed_at())
        if self._replica_set.spec.optimizer_site == "orchestrator":  # the master changes with every step
            self._replica_set.beginning.preserve()
        self.snapshot = Snapshot(self._replica_set.step, start, self._replica_set.beginning)
        self.position = self._before = plan.start
        self.first_step = self._replica_set.step + 1
        self.team: tuple[int, ...] = ()
        self.poison = PoisonSamples()
        self.check: FirstStepCheck | None = None
        self._ledger = SampleLedger()
        self._feed_epoch, self._feed_batches = plan.start.epoch, plan.start.batches
        self._told_empty = self._told_count = self._told_accumulated = False
        self._count_each: float | None = None  # what the first step counts for a sample
        self._went_back: Position | None = None  # there, and no step was issued since

    # ------------------------------------------------------------------------------------------------------------- steps

    def note_team(self, team: Iterable[int]) -> None:
        """Note who takes part from now on; a change begins a new generation."""
        team = tuple(team)
        self._energy.takes_part(team)
        if self.team and team != self.team:
            self._run.generations += 1
        self.team = team

    def draw(self, epoch: int, group: Sequence[LoadedBatch], step: int) -> None:
        """Note the samples of a step that is about to be issued, and where the data stands after it.

        Args:
            epoch: of the step.
            group: its loader batches.
            step: its number, from 0.
        """
        ids, at = [i for batch in group for i in batch.sample_ids], self.position
        self._ledger.draw(epoch, ids)
        every = self._plan.accumulation_steps
        for part in (group[start : start + every] for start in range(0, len(group), every)):
            if len(part) < every or len({batch.rows for batch in part}) > 1:
                self._tell_accumulated(f"batches of {' and '.join(str(batch.rows) for batch in part)} samples")
        if self._plan.note_place is not None:
            self._plan.note_place(
                step, at, len(group), len(ids), lambda: self._feed_at(at.epoch, at.batches), self.steps
            )

    def on_commit(self, step: StepInFlight, commit: Commit, loss_sum: float, count: float) -> None:
        """Count a step that was committed.

        Args:
            step: that was in flight.
            commit: how it is applied.
            loss_sum: of all shards.
            count: what the losses are divided by.
        """
        machine, ids = step.machine, step.sample_ids()
        if self._replica_set.spec.optimizer_site == "orchestrator":
            self._replica_set.master_step = machine.step
        self.poison.committed(step)
        if count == 0:
            self._tell_empty(step)
        self._tell_odd_count(step, loss_sum, count)
        each = count / machine.rows if machine.rows else 0.0
        self._count_each = each if self._count_each is None else self._count_each
        if count > 1 and not math.isclose(each, self._count_each, rel_tol=1e-6):  # elements of a sample are alike
            self._tell_accumulated(
                f"batches whose samples count differently ({count:g} for {machine.rows} samples here)"
            )
        if self._run.done:  # then it was withdrawn as not reached
            self._ledger.draw(step.epoch, ids)
        self._ledger.commit(step.epoch, ids)
        at = self._before = self.position
        self.position = Position(at.epoch, at.batches + step.batches, at.samples + len(ids))
        self._feed_batches = self.position.batches
        before = self.steps
        steps = before + machine.num_steps
        record = {
            "step": steps,
            "epoch": step.epoch + 1,
            "loss": loss_sum / count if count else float("nan"),
            "count": count,
            "samples": machine.rows,
            "tokens": machine.tokens(),
            "skipped": commit.skip,
            "learning_rate": self._replica_set.learning_rate(machine.step),
            "gradient_norm": _gradient_norm(step, commit),
        }
        if self._replica_set.spec.rounds is not None:
            record |= {"round": machine.step + 1, "steps": machine.num_steps, "gradient_norm": None}
        self._run.add_step(record)
        if self.check is not None:
            self.check.after(record)
        if steps // self._plan.log_step_every > before // self._plan.log_step_every:
            log.info("%s: step %d, epoch %d, loss %.6g", self._run.run_id, steps, step.epoch + 1, record["loss"])
        self.call("on_step", record)

    @property
    def steps(self) -> int:
        """Optimizer steps that are committed, counted from the very beginning; a round of local steps has several."""
        return int(self._run.history[-1]["step"]) if self._run.history else self.first_step

    def steps_after(self, step: int) -> int:
        """Return how many optimizer steps, counted from the very beginning, are done after this step, or round."""
        index = step - self.first_step
        return self.first_step if index < 0 else int(self._run.history[index]["step"])

    def _tell_accumulated(self, has: str) -> None:
        """Tell once where batches of one step count unlike those of a loop that divides each loss by their number."""
        every = self._plan.accumulation_steps
        if every > 1 and not self._told_accumulated:
            self._told_accumulated = True
            self._membership.cluster.notice(
                f"accumulation_steps={every}: a step has {has} and is as one batch of all of them. In a loop with "
                f"(loss / {every}).backward() each batch has a weight of 1/{every}, however few samples (or tokens) it has"
            )

    def _tell_empty(self, step: StepInFlight) -> None:
        if not self._told_empty:
            self._told_empty = True
            self._membership.cluster.notice(
                f"step {self.steps + 1} counted nothing: its {step.machine.rows} samples have no target that "
                "is not ignored, so its loss is NaN and nothing was learned from it; further steps like it are not told"
            )

    def _tell_odd_count(self, step: StepInFlight, loss_sum: float, count: float) -> None:
        """Tell, once, of a count that may be no count: with (loss, accuracy) the run trains on their quotient."""
        machine, spec = step.machine, self._replica_set.spec
        role = "step" if spec.criterion is None else "criterion"
        is_of_torch = spec.criterion is not None and any(
            hasattr(home, spec.criterion.name) for home in (nn, nn.functional)
        )
        is_odd = count != int(count) or count <= len(machine.tasks) < machine.rows
        is_plain_sum = math.isclose(count, 1.0, rel_tol=1e-9)  # (loss, None): the parts of the samples, which come to 1
        if self._told_count or is_of_torch or is_plain_sum or not math.isfinite(count) or not (count and is_odd):
            return
        self._told_count = True
        self._membership.cluster.notice(
            f"two values that the {role} returns are read as (sum of losses, count): in step {machine.step + 1} the count is "
            f"{count:g} for {machine.rows} samples, so the loss is {loss_sum:g} / {count:g} = {loss_sum / count:g}. If the "
            "second value is no count but an accuracy, say, return the loss alone. Told once"
        )

    def on_applied(self, rank: int, message: StepApplied) -> None:
        """Note that a member applied a step; one whose parameters differ is behind."""
        difference = self._replica_set.note_commit(rank, message)
        if difference is not None:
            cluster = self._membership.cluster
            if self._replica_set.spec.parallel is not None:  # its group cannot take a step without it
                raise TrainingError(
                    f"{cluster.name(rank)}: {difference}. They must be equal, and all steps from there on go wrong. Something "
                    "changes them on some workers only: code of model, loss, step or optimizer that goes by the samples or by "
                    "chance, or a fault of that machine. Train with one worker, or without that machine"
                )
            cluster.notice(f"{cluster.name(rank)}: {difference}; it gets the state again")
            self._membership.behind.add(rank)
        index = message.step - self.first_step
        if message.learning_rate is not None and 0 <= index < len(self._run.history):
            self._run.history[index]["learning_rate"] = message.learning_rate

    # ----------------------------------------------------------------------------------------------- epochs and snapshots

    def begin_epoch(self, epoch: int) -> None:
        """An epoch begins, or goes on."""
        self._went_back = None
        self._feed_epoch, self._feed_batches = epoch, self.position.batches

    def end_epoch(self, epoch: int) -> dict[str, Any]:
        """All steps of an epoch are committed; returns what a callback gets: epoch, loss, samples."""
        self.position = Position(epoch + 1)
        records = [record for record in self._run.history if record["epoch"] == epoch + 1]
        samples = sum(record["samples"] for record in records)
        loss = sum(record["loss"] * record["samples"] for record in records) / samples if samples else float("nan")
        return {"epoch": epoch + 1, "loss": loss, "samples": self._ledger.committed_in(epoch)}

    def where(self, step: int | None = None) -> Position:
        """Return the committed position with what the loader needs to go on from it.

        Args:
            step: whose state is left, where workers that held a later one are lost; None: that of the last step.
        """
        if step is not None and self._run.history and step + 1 - self.first_step < len(self._run.history):
            return self.snapshot.position if self.snapshot.step <= step else self._plan.start
        if not self._run.history or self._went_back is not None:
            return self.snapshot.position if self._went_back is None else self._went_back
        is_over = self.position.epoch > self._feed_epoch
        return replace(self.position, feed=self._feed_at(self._feed_epoch, self._feed_batches, is_over))

    def note_validated(self) -> None:
        """The validation loader was walked to its end: a run that goes on from here walks it next as this one would."""
        self._walks = None if self._plan.val_feed is None else self._plan.val_feed.walks()

    def _feed_at(self, epoch: int | None = None, batches: int | None = None, at_end: bool = False) -> dict[str, Any]:
        place = self._plan.feed.position(epoch, batches, at_end)
        return place if self._walks is None else {**place, "validation": self._walks}

    def keep(self, state: dict[str, Any]) -> None:
        """Take this state of the last committed step for the snapshot to go back to."""
        self.keep_snapshot(Snapshot(self._replica_set.step, self.where(), Beginning(self.state_name(), None, state)))

    def keep_snapshot(self, snapshot: Snapshot) -> None:
        """Go back there from now on."""
        self._replica_set.beginning.drop()
        self.snapshot = snapshot

    def state_name(self) -> str:
        """Say which state the last committed step left."""
        return f"the state after {self._replica_set.nth(self._replica_set.step)} of {self._replica_set.run_id}"

    def go_back(self, there: Snapshot | None = None) -> None:
        """Forget what came after the snapshot, or after one that a worker has: it will be done again."""
        snapshot = there or self.snapshot
        snapshot.position.rewind(self._plan.feed, self._plan.val_feed)
        self._went_back = snapshot.position
        self._end_at(snapshot.position, snapshot.step)

    def go_on_here(self) -> None:
        """Forget the steps that were issued and not committed: they will be done again, from here on."""
        here = self.where()
        here.rewind(self._plan.feed, self._plan.val_feed)
        self._end_at(here, self._replica_set.step)

    def take_back(self) -> None:
        """Forget the last committed step: it could be applied nowhere."""
        self._replica_set.take_back(self._replica_set.step - 1)
        self._end_at(self._before, self._replica_set.step)
        self._feed_batches = self.position.batches

    def _end_at(self, position: Position, step: int) -> None:
        start, self.position = self._plan.start, position
        already = start.samples if position.epoch == start.epoch else 0
        self._ledger.truncate(position.epoch, position.samples - already)
        self._run.rewind(step + 1 - self.first_step)

    def close(self, done: bool) -> None:
        """Tell the run how many samples were lost and duplicated; not `done`: what was drawn ahead is not lost."""
        self._plan.feed.leave(self._feed_epoch, self._feed_batches)
        if not done:
            self._ledger.withdraw_uncommitted()
        self._run.lost_samples, self._run.duplicated_samples = self._ledger.balance()


def _gradient_norm(step: StepInFlight, commit: Commit) -> float | None:
    """Of the step's mean gradient, before it was clipped; None where it is not known here."""
    square = step.machine.gradient_square() if step.square is None else step.square
    norm = math.inf if square is None else math.sqrt(square) * commit.scale
    return None if commit.skip or not math.isfinite(norm) else norm
