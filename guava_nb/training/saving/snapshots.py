"""The state that a run goes back to, where it exists only once: when it is asked for, and what would be lost now."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from guava_nb.cluster.job import Job
from guava_nb.sync.beginning import Beginning
from guava_nb.sync.replica_set import ReplicaSet
from guava_nb.sync.state_copy import StateCopy
from guava_nb.training.plan import Snapshot, TrainingPlan
from guava_nb.training.run import Run
from guava_nb.training.saving.snapshots_at_worker import Kept, SnapshotsAtWorker
from guava_nb.training.step_accounting import StepAccounting

__all__ = ["FIRST_S", "Snapshots", "mean_life_s", "period_s", "stall_s"]

# How often the state comes to the orchestrator where it exists only once; pure.
#
# A vanished worker costs the work since the last snapshot that came, so it costs a period and a transfer at most. J. W. Young, "A
# first order approximation to the optimum checkpoint interval", Communications of the ACM 17 (9), 1974: with a cost of C seconds
# each and one loss in M seconds, the least is lost with a period of sqrt(2 C M).

#: The first snapshot of a run, and the least between two: a shorter loss is none to a person.
FIRST_S = 10.0
#: Of work that a vanished worker may cost, where the line allows it.
MOST_LOST_S = 300.0
#: Of the time, for which steps may stand still for snapshots.
MOST_PART = 0.02
#: Before anything was lost in a run: one worker in two hours.
_LIFE_S = 7200.0
#: Of a transfer's time: what it takes of the line and of processors, while steps go on.
_TRANSFER_PART = 0.1


def period_s(stalled_s: float, transfer_s: float, life_s: float = _LIFE_S) -> float:
    """Return the seconds from one snapshot to the next.

    Args:
        stalled_s: for which steps stood still for one.
        transfer_s: from the question to the state's arrival.
        life_s: between two losses of a worker.

    Returns:
        By Young's rule, but no more than leaves a loss of 300 s with the transfer, and no less than keeps the stalls at 2 % of
        the time and lets a transfer end before the next. So on a thin line two transfers are lost at most.
    """
    young = math.sqrt(2 * (stalled_s + _TRANSFER_PART * transfer_s) * life_s)
    return max(FIRST_S, stalled_s / MOST_PART, transfer_s, min(young, MOST_LOST_S - transfer_s))


def mean_life_s(trained_s: float, num_losses: int) -> float:
    """Return the seconds between two losses, as far as a run has shown them, with one in two hours assumed before it."""
    return (_LIFE_S + trained_s) / (1 + num_losses)


def stall_s(before: Sequence[float], during: Sequence[float]) -> float | None:
    """Return for how long steps stood still for a snapshot: what its steps took more than steps take.

    Args:
        before, during: times of commits, the last of `before` being that at which it was taken; None where there are too few.
    """
    gaps = sorted(now - last for last, now in zip(before, before[1:], strict=False))
    if not gaps or not during:
        return None
    return max(0.0, during[-1] - before[-1] - len(during) * gaps[len(gaps) // 2])


#: Commits that tell how long a step takes.
_RECENT = 20
#: Parameters up to which, and seconds of a transfer up to which, the steps wait for a snapshot: 0.2 s in ten are 2 %.
AT_ONCE_BYTES, _AT_ONCE_S = 1 << 20, 0.2


class Snapshots:
    """Asks for snapshots of one run between two steps, and takes them when they have come; steps go on meanwhile.

    Args:
        job, replica_set, plan, run, accounting: of the run.
        clock: monotonic seconds.
    """

    def __init__(
        self, job: Job, replica_set: ReplicaSet, plan: TrainingPlan, run: Run, accounting: StepAccounting,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """None was asked for."""
        self._job, self._replica_set, self._plan = job, replica_set, plan
        self._run, self._accounting, self._clock = run, accounting, clock
        self._began = self._asked_at = clock()
        self._coming: tuple[StateCopy, Snapshot] | None = None
        self._measured: tuple[int, tuple[int, int]] | None = (
            None  # commits, epoch and validations when it was asked for
        )
        self._stalled_s = self._transfer_s = 0.0
        self._period_s = FIRST_S
        self._losses = 0
        self.there = SnapshotsAtWorker(job, replica_set, plan, accounting, clock)

    @property
    def by_time(self) -> bool:
        """Whether the time decides: the user set no number of steps, and no budget of bytes."""
        return self._plan.snapshot_every_steps is None and self._plan.budget is None

    @property
    def in_background(self) -> bool:
        """Whether steps go on while one is taken."""
        return (self.by_time and not self.at_once) or self.there.is_forced

    def _is_alone(self, team: Sequence[int]) -> bool:
        """Whether the state exists only once: with one worker, or in parts."""
        return len(team) == 1 or not self._replica_set.elastic

    def is_due(self, team: Sequence[int]) -> bool:
        """Whether one shall be taken now; `team`: the members to whom steps are issued."""
        waits = self._clock() < self._asked_at + self._period_s
        if not self._is_alone(team) or waits or self._coming is not None:
            return False
        return self.by_time or bool(self._accounting.snapshot.kept.loss)

    def fits_epoch(self) -> bool:
        """Whether one shall be taken at an epoch's end: it keeps the stalls at their part of the time."""
        if self._plan.snapshot_every_steps is not None or not self._is_alone(self._accounting.team):
            return False
        return self.at_once or self._coming is None and self._clock() - self._asked_at >= self._stalled_s / MOST_PART

    @property
    def at_once(self) -> bool:
        """Whether one is so small that the steps wait for it."""
        is_small = self._replica_set.master.weights_bytes <= AT_ONCE_BYTES
        return is_small and self._transfer_s <= _AT_ONCE_S and not self.there.is_forced

    def took_one(self, since: float) -> None:
        """One was taken, for which the steps waited since then."""
        self._coming, self._asked_at = None, self._clock()
        self._transfer_s = self._asked_at - since
        self._set_period()

    def begin(self) -> None:
        """Ask for the state of the last committed step, with none in flight."""
        if self._coming is not None:
            return
        save, whole = self.there.order(self._period_s) if self.there.is_chosen() else (None, True)
        copy = self._replica_set.ask_for_copy(self._job, save, whole)
        if copy is None:
            return
        accounting, history = self._accounting, self._run.history
        kept = Beginning(accounting.state_name(), None, {})
        self._coming = copy, Snapshot(copy.step, accounting.where(), kept)
        self.there.asked(*self._coming)
        self._asked_at = self._clock()
        self._measured = len(history), self._place()

    def look(self) -> None:
        """Take the one that was asked for, if it has come; forget it if it cannot come any more."""
        self._measure()
        if self._coming is None:
            return
        copy, snapshot = self._coming
        here, failed = self._job.ready | self._job.suspects, self._job.failed
        if not copy.is_over(lambda rank: rank not in here or rank in failed):
            return
        self._coming = None
        if copy.is_whole and copy.step <= self._replica_set.step:
            self._transfer_s = self._clock() - self._asked_at
            if copy.save is not None:
                self.there.took(copy, self._transfer_s)
            if copy.whole:
                state = dict(self._replica_set.join(copy.parts()))
                snapshot.kept.fill(state)
                self._accounting.keep_snapshot(snapshot)
                self.there.took_exact(copy, self._transfer_s, state)
        self._set_period()

    def forget(self, but: Kept | None = None) -> None:
        """The run goes back: what is on its way, or at a worker, may be of a step that is done anew; not `but`, where it goes."""
        self._coming = self._measured = None
        self.there.forget(but)
        self._losses += 1
        self._asked_at = self._clock()

    def at_risk(self) -> tuple[int, int] | None:
        """Return how many entries of the history would be left if the worker's process were killed, and if its disk were lost.

        None: others hold the state, too.
        """
        replica_set = self._replica_set
        if replica_set.spec.optimizer_site == "orchestrator" or not replica_set.at:
            return None
        if len(replica_set.at) > 1 and replica_set.elastic:
            return None
        newest, disk, near = self._accounting.snapshot.step, self.there.step_on_disk, self.there.at
        newest = newest if near is None else max(newest, near.step)
        on_disk = newest if disk is None else max(newest, disk)
        return on_disk + 1 - self._accounting.first_step, newest + 1 - self._accounting.first_step

    def _place(self) -> tuple[int, int]:
        return self._accounting.position.epoch, len(self._run.validations)

    def _measure(self) -> None:
        """What its steps took more than others, once one has followed its arrival; not where other things were done meanwhile."""
        history = self._run.history
        if self._measured is None or self._coming is not None or len(history) <= self._measured[0]:
            return
        (count, place), self._measured = self._measured, None
        times = [record["seconds"] for record in history[max(0, count - _RECENT) :]]
        at = min(count, _RECENT)
        found = stall_s(times[:at], times[at:]) if place == self._place() else None
        if found is not None:
            self._stalled_s = (self._stalled_s + found) / 2 if self._stalled_s else found
            self._set_period()

    def _set_period(self) -> None:
        life_s = mean_life_s(self._clock() - self._began, self._losses)
        self._period_s = period_s(self._stalled_s, self._transfer_s, life_s)
