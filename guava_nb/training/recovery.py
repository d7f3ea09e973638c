"""How a run goes on when members are lost or leave with the only copy of its state."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from guava_nb.cluster.job import Job, NobodyLeft, StopRequested
from guava_nb.errors import WorkerLost
from guava_nb.sync.replica_set import GroupLost
from guava_nb.sync.states_on_disk import StateOnDisk
from guava_nb.training.boundary import Boundary
from guava_nb.training.budget_gate import BudgetGate
from guava_nb.training.byte_budget import BudgetSpent
from guava_nb.training.membership import Membership
from guava_nb.training.plan import Snapshot, TrainingPlan
from guava_nb.training.run import Run
from guava_nb.training.step_accounting import StepAccounting
from guava_nb.training.step_window import StepWindow

__all__ = ["Handover", "Recovery"]


class Handover(Exception):  # noqa: N818 - no error: unwinds a job to where it can take the state
    """Raised when workers that want to leave hold the only copy of the run's state; the job unwinds and fetches it first."""


@dataclass(eq=False)
class Recovery:
    """Gives up the steps in work, saves what is left of the state, waits for workers, and starts over.

    Attributes:
        held: members that want to leave and wait until the state that they hold is here.
    """

    job: Job
    membership: Membership
    plan: TrainingPlan
    run: Run
    accounting: StepAccounting
    window: StepWindow
    boundary: Boundary
    budget_gate: BudgetGate
    held: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        """No member leaves."""
        self._replica_set = self.membership.replica_set

    def on_leaving(self, rank: int) -> None:
        """Let a member go, unless the others do not hold what it holds: then its state is brought here first."""
        # A released member is available until it is gone, and one whose code raised may hold less.
        others = set(self.membership.available()) - self.job.leaving - self.job.failed
        holds = self.membership.formed and rank in self.membership.current()
        if not holds or (others and self._replica_set.elastic):
            self.membership.cluster.release(rank)
        else:
            self.held.add(rank)

    def recover(self, cause: Exception) -> None:
        """Start over, and again if members are lost meanwhile.

        Raises:
            WorkerLost: too few workers came in time.
            BudgetSpent: another start has no room.
        """
        may_return = self.membership.formed  # also when another one is lost meanwhile
        while True:
            try:
                self._start_over(cause, may_return)
                return
            except (NobodyLeft, GroupLost, Handover) as lost:
                cause = lost

    def _start_over(self, cause: Exception, may_return: bool) -> None:
        """The members cannot go on: wait for workers, and start over from what can be saved of the state.

        Where a group broke and all of its last committed state is still there, that is taken; else the run goes back to the
        last snapshot, data and history included.
        """
        self.boundary.snapshots.look()  # one may have come before the loss
        if isinstance(cause, GroupLost):
            self.membership.cluster.notice(
                f"{cause}; step {self._replica_set.step + 2} is given up and a new group is formed"
            )
            self._give_up(str(cause))
        elif isinstance(cause, Handover):
            self._take_over()
        self._let_go()
        returns = (
            isinstance(cause, NobodyLeft | WorkerLost) and may_return
        )  # the latter where a newcomer waited for the state
        self.window.exchange.give_up(but_applied_first=returns)
        self._tell_wait()
        self.budget_gate.afford_start_over()
        self._wait_for_workers(cause)
        if returns and self._goes_on_with_returned():
            return
        self.go_back()
        self.membership.give_state(self.accounting.snapshot)
        self.window.exchange.give_up()

    def _goes_on_with_returned(self) -> bool:
        """Whether a worker came back with the state of the last committed step: then the run goes on there."""
        replica_set = self._replica_set
        if replica_set.spec.optimizer_site != "workers" or replica_set.spec.parallel is not None:
            return False
        before = replica_set.step
        self.membership.prepare_returned(self.boundary.snapshots.there.on_disk())
        holders, read = replica_set.returned(self.job), replica_set.on_disk.best(self.membership.fit)
        replica_set.on_disk.look_for(())
        if not holders:
            return read is not None and self._goes_on_from_disk(*read)
        self.membership.formed = True
        self.window.exchange.give_up()
        self.accounting.go_on_here()
        names = " and ".join(map(self.membership.cluster.name, holders))
        more = f", {replica_set.step - before} of them not known here before" if replica_set.step > before else ""
        self.membership.cluster.notice(
            f"{names} came back with all {replica_set.step + 1} steps{more}: nothing is done again"
        )
        return True

    def _goes_on_from_disk(self, state: StateOnDisk, ranks: Sequence[int]) -> bool:
        """Go on from a state that workers have read from their disks: nothing is sent."""
        replica_set, snapshots = self._replica_set, self.boundary.snapshots
        kept = snapshots.there.kept(state)
        names = " and ".join(map(self.membership.cluster.name, ranks))
        self._tell_lost(
            kept.snapshot, f"{names} read the state after {replica_set.nth(state.step)} from its disk", "disk"
        )
        self.accounting.go_back(kept.snapshot)
        self.boundary.due.clear()
        replica_set.stand_at(state, ranks)
        snapshots.forget(kept)
        self.membership.formed = True
        self.window.exchange.give_up()
        return True

    def _tell_lost(self, snapshot: Snapshot, then: str, source: str) -> None:
        """Tell and note how much work is done again."""
        steps, seconds = self.run.since(snapshot.step + 1 - self.accounting.first_step)
        if steps or source != "snapshot":
            self.run.losses.append(
                {"steps": steps, "seconds": round(seconds, 3), "after": snapshot.step + 1, "from": source}
            )
            what = (
                f"{_lost_text(steps, seconds)} are lost with the workers that had them and are done again: "
                if steps
                else ""
            )
            self.membership.cluster.notice(f"{what}{then}")

    def go_back(self, tell: bool = True) -> None:
        """Go back to the snapshot with state, data and history; before members get it, since they may be lost meanwhile.

        Where approximate weights are newer, the run goes back to these, and says so.
        """
        newest, source = self.boundary.snapshots.there.newest(), "snapshot"
        then = "the run goes on from the state after "
        if newest is not None:
            snapshot, left_out = newest
            self.accounting.keep_snapshot(snapshot)
            source, tell = "approximate weights", True
            self.run.approximate = (
                f"the run goes on from approximate weights after {self._replica_set.nth(snapshot.step)}, because the exact ones "
                f"were lost with the disk that had them: their last difference left out {left_out:.0%} of the way since the one "
                "before, and the optimizer begins with the state of the last exact ones"
            )
            then = f"{self.run.approximate}. It goes on from the state after "
        snapshot = self.accounting.snapshot
        if tell:
            self._tell_lost(snapshot, f"{then}{self._replica_set.nth(snapshot.step)}", source)
        self.boundary.snapshots.forget()
        self.run.move("preparing", f"the run goes on from the state after {self._replica_set.nth(snapshot.step)}")
        self.accounting.go_back()
        self.boundary.due.clear()
        self.membership.go_back(snapshot)
        self.window.exchange.give_up()

    def keep_whole_state(self) -> None:
        """After an error: let the last step count of which a whole state is left, with the members or here."""
        replica_set = self._replica_set
        at_workers = replica_set.spec.optimizer_site == "workers"
        if replica_set.master_step == replica_set.step or (at_workers and replica_set.in_step(self.job)):
            return
        lost = replica_set.step + 1
        if at_workers and self._held_before():
            self.accounting.take_back()
            return
        if at_workers and replica_set.spec.parallel is not None and self.rescued():
            return
        self.go_back(tell=False)
        self.membership.cluster.notice(
            f"the error left no whole state of {replica_set.unit} {lost} anywhere: the session holds that of "
            f"{replica_set.nth(self.accounting.snapshot.step)}, the last snapshot (snapshot_every_steps takes more of them)"
            + (f". {self.run.approximate}" if self.run.approximate else "")
        )

    def rescued(self) -> bool:
        """Take the last step's state from a replica that could apply it and is whole, if one is left; returns whether it came."""
        self.job.interrupts = 0
        try:
            return self.rescue()
        except (StopRequested, NobodyLeft):
            return False

    def rescue(self) -> bool:
        """Take the last committed step's state from members of a group that is over; returns whether all of it was left."""
        self.membership.formed = False  # that a member is gone is known, and unwinds no more what asks the others
        return self._replica_set.rescue(self.job)

    def _held_before(self) -> bool:
        """Whether the members have the state before the last committed step, or can go back to it."""
        replica_set, last = self._replica_set, self._replica_set.step
        held = self._steps_held()
        together = replica_set.spec.parallel is not None
        if together and held == {last - 1, last}:
            self.window.abort("a step could not be applied everywhere", hear_all=True, last=last - 1)
            held = self._steps_held()
        return (
            last - 1 in held
            and (not together or held == {last - 1})
            and replica_set.connected(self.membership.available())
        )

    def _steps_held(self) -> set[int]:
        return {self._replica_set.at[rank] for rank in self.membership.available()}

    def _take_over(self) -> None:
        """Take the state of the last committed step from members that leave with it.

        Raises:
            BudgetSpent: it may come here once only, so that is the end of the run.
        """
        reason = "a worker leaves with the only copy of the state"
        if not self.budget_gate.affords_handover():
            self.window.abort(reason, hear_all=True)
            raise BudgetSpent
        self._give_up(reason)

    def _let_go(self) -> None:
        """Release those that were held: what they had is here now, or lost."""
        self.membership.leave_out(sorted(self.job.leaving))
        while self.held:
            self.membership.cluster.release(self.held.pop())

    def _give_up(self, reason: str) -> None:
        """Give the steps in work up, hear how far all members are, and save what is there of the state."""
        self.run.generations += 1
        self.accounting.team = ()  # the change is counted here, whatever the next team is
        self.membership.formed = False
        self.window.abort(reason, hear_all=True)
        snapshot = self.accounting.snapshot
        is_newer = self._replica_set.step > snapshot.step or bool(snapshot.kept.loss)
        if is_newer and self.rescue():
            self.accounting.keep(self._replica_set.master.state())
        self._replica_set.disband()

    # ---------------------------------------------------------------------------------------------------- too few workers

    def _tell_wait(self) -> None:
        needed = self._replica_set.least - len(self.membership.fit)
        if needed > 0:
            what = "one to join" if needed == 1 else f"{needed} to join"
            self.run.move(
                "waiting",
                f"too few workers are left. The run waits {self.plan.rejoin_timeout_s:g} s for {what}, and then goes on by "
                f"itself from {self.boundary.snapshots.there.way_on()}: run %guava_worker with the join code elsewhere. To start "
                "one here while this cell is busy, or to see the code: interrupt, then %guava_up --local 1 (--show-code), and "
                "train again",
                self.plan.rejoin_timeout_s,
            )

    def _wait_for_workers(self, cause: Exception) -> None:
        self.membership.formed = False
        deadline = time.monotonic() + self.plan.rejoin_timeout_s
        while len(self.membership.fit) < self._replica_set.least:
            if self.job.interrupts:
                raise StopRequested
            if time.monotonic() > deadline:
                raise self._all_lost() from cause
            self.job.take_one(0.25)

    def _all_lost(self) -> WorkerLost:
        gone = "; ".join(f"{m.name}: {m.detail}" for m in self.membership.cluster.members() if not m.alive)
        least, few = self._replica_set.least, len(self.membership.fit)
        who = f"{least} workers are needed, {few} are left, and too few" if few else "all workers are gone, and none"
        way_on = self.boundary.snapshots.there.way_on()
        here = self.accounting.snapshot.kept.loss or f"The state of {way_on} is here"
        here += f" and its newest checkpoint is {file}" if (file := self._replica_set.newest_file()) else ""
        return WorkerLost(
            f"{who} joined within {self.plan.rejoin_timeout_s:g} s ({gone}). {here}: run %guava_worker with the join code on a "
            "machine and train again"
        )


def _lost_text(num_steps: int, seconds: float) -> str:
    took = "less than 1 s" if seconds < 1 else f"{seconds:.0f} s"
    return f"{num_steps} step{'s' if num_steps > 1 else ''}, {took} of work,"
