"""The training job: a run from its first state to its last, as epochs, boundaries and an end.

A boundary is a moment with no step in flight: newcomers get the state, validation and snapshots happen. Between boundaries
the exchange keeps a few steps issued ahead of need.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import torch

from guava_nb.cluster.cluster import Cluster
from guava_nb.cluster.job import Job, NobodyLeft, StopRequested
from guava_nb.cluster.job_events import Interrupted, Wake
from guava_nb.data.loader_feed import MOST_BATCHES, LoadedBatch
from guava_nb.errors import ClusterError, WorkerLost
from guava_nb.evaluation.passes import pass_over
from guava_nb.protocol.messages import GradientBucket, ShardReport
from guava_nb.spec.run_spec import mode_of
from guava_nb.sync.replica_set import GroupLost, ReplicaSet
from guava_nb.sync.send_credit import SendCredit
from guava_nb.sync.state_at_workers import StateLate
from guava_nb.telemetry.run_energy import RunEnergy
from guava_nb.training.boundary import Boundary
from guava_nb.training.budget_gate import BudgetGate
from guava_nb.training.byte_budget import Budget, BudgetSpent
from guava_nb.training.first_step_check import FirstStepCheck
from guava_nb.training.handed_out import HandedOut
from guava_nb.training.logs.run_log import RunLogs, told_settings
from guava_nb.training.membership import Membership
from guava_nb.training.plan import Position, TrainingPlan
from guava_nb.training.recovery import Handover, Recovery
from guava_nb.training.run import Run, RunSources
from guava_nb.training.saving.run_files import RunFiles
from guava_nb.training.saving.snapshots import Snapshots
from guava_nb.training.status_survey import note_waits, note_workers, total_bytes, wire_meter
from guava_nb.training.step_accounting import StepAccounting
from guava_nb.training.step_window import StepWindow

__all__ = ["TrainingJob"]

log = logging.getLogger(__name__)

#: Bytes of parameters up to which the state comes here at the end of a run; a larger one comes in the background.
MOST_FETCHED_BYTES = 1 << 20
#: Steps in which a worker's error tells how batches are read.
_FIRST_STEPS = 3


class TrainingJob(Job):
    """Runs a plan to its end on its own thread.

    Args:
        model: gives the trained model, for the run's handle.

    Attributes:
        run: the handle.
        membership: who takes part.
        accounting: what is committed, and the snapshot to go back to.
        window: the steps in work.
        logs: what writes down what is committed.
        budget_gate: asks the run's budget, if it has one.
        on_end: called when the run has ended.
    """

    trains = True

    def __init__(
        self, replica_set: ReplicaSet, plan: TrainingPlan, cluster: Cluster, model: Callable[[], torch.nn.Module]
    ) -> None:
        """Prepare; `start` begins."""
        super().__init__(cluster)
        self.replica_set, self.plan = replica_set, plan
        replica_set.attach(self)
        if plan.cache_static:
            replica_set.writer.leave_unread(plan.feed)
        self._energy = RunEnergy(
            cluster.energy, replica_set.run_id, cluster.send, cluster.name, cluster.hello, cluster.worked
        )
        self.run = run = self._new_run(model)
        self.logs = RunLogs(run, cluster.notice, plan.logged)
        self.membership = members = Membership(self, replica_set)
        self.accounting = accounting = StepAccounting(members, plan, run, self._energy, self._call)
        registered, feed = (replica_set.registered, plan.feed) if plan.callbacks else (None, None)
        self._handed_out = HandedOut(cluster.notice, registered, replica_set.code, feed, accounting)
        credit = SendCredit(plan.prefetch_bytes, plan.prefetch_steps, max(1, MOST_BATCHES // plan.batches_per_exchange))
        walk = pass_over(self, replica_set, split_fn=plan.split_fn)
        exchange = replica_set.exchange(self, replica_set, accounting.on_commit, accounting.on_applied, credit)
        self.window = window = StepWindow(self, members, plan, exchange, credit)
        self.budget_gate = gate = BudgetGate(members, window.drain, plan.budget)
        walk.before_batch = gate.before_batch
        self._check = accounting.check = FirstStepCheck(self, members, plan, run, gate, window.drain)
        self.files = RunFiles(self, replica_set, plan, accounting)
        self.snapshots = Snapshots(self, replica_set, plan, run, accounting)
        self._boundary = Boundary(
            members, plan, run, accounting, walk, gate, window.drain, self.files.begin, self.snapshots, self._stop_once
        )
        self._recovery = Recovery(self, members, plan, run, accounting, window, self._boundary, gate)
        self._stop_after, self._stop_deadline = 0, 0.0  # the step and the time after which an interrupt ends the run
        self.on_end: Callable[[], None] = lambda: None
        self.on_slow = lambda rank: window.adopt()
        self._lost_in_callback, self._in_epoch = list[Exception](), False  # a hand-over unwinds only in an epoch
        self._thread = threading.Thread(target=self._main, name="guava-training", daemon=True)

    def _new_run(self, model: Callable[[], torch.nn.Module]) -> Run:
        plan, replica_set, meter = self.plan, self.replica_set, wire_meter(self.cluster, self.replica_set.spec)
        if plan.budget is not None:
            plan.budget.used = lambda: total_bytes(meter())
        sources = RunSources(
            wire=meter,
            route=lambda: replica_set.route,
            layout=lambda: replica_set.layout_text,
            feeding=lambda: self.window.feeding(),
            waits=lambda: note_waits(self.cluster.members()),
            energy=self._energy,
            precision=replica_set.spec.precision,
            reading=lambda: plan.reading_text,
            kept=lambda: self.snapshots.at_risk(),
            interrupt=self.interrupt,
            model=lambda: self._handed_out.note(model()) if self.is_current() else model(),
            budget=plan.budget,
            is_local=replica_set.spec.rounds is not None,
            settings=told_settings(replica_set.run_id, replica_set.spec),
        )
        spec, steps_left = replica_set.spec, plan.steps_left(replica_set.step)
        return Run(replica_set.run_id, mode_of(spec), plan.num_epochs, steps_left, sources)

    # ------------------------------------------------------------------------------------------------ from any thread

    def start(self) -> None:
        """Begin."""
        self.logs.begin(self.plan.log, self.plan.save_folder, self.files.name, self.replica_set.spec)
        self._thread.start()

    def interrupt(self) -> None:
        """Ask for the end; called from any thread. A callback's own step is then the last one."""
        if self.is_current():
            self._stop_here("a callback stopped the run")
        else:
            self.post(Interrupted())

    def _stop_here(self, why: str) -> None:
        self.interrupts += 1
        if self.interrupts == 1:
            self._stop_after = self.replica_set.step
            self.run.move("stopping", why)

    def _stop_once(self, why: str) -> None:
        if not self.interrupts:
            self._stop_here(why)

    def is_current(self) -> bool:
        """Whether the caller is one of the run's own callbacks: it must not wait for the run."""
        return threading.current_thread() is self._thread

    def at_boundary(self, call: Callable[[], None]) -> Future[None]:
        """Have the job call something between two steps; called from any thread, but only others may wait for it."""
        future = self._boundary.calls.ask(call)
        self.post(Wake())
        if self.run.done:
            self._refuse_calls()
        return future

    def with_state(self, call: Callable[[], None]) -> None:
        """Call something when the master has the state of the last committed step; from any thread.

        In a callback that is the state of what it was called for; other threads get that of the next boundary, and wait for it.
        """
        if self.is_current():
            try:
                with self.setting_aside(ShardReport, GradientBucket):
                    self._boundary.call_with_state(call)
            except (NobodyLeft, GroupLost, Handover) as lost:  # no business of the callback, which goes on
                self._lost_in_callback = [lost]
                self._boundary.call_at(self.replica_set.step, call)
        else:
            self.at_boundary(lambda: self._boundary.call_with_state(call)).result(self.plan.rejoin_timeout_s)

    def where(self, step: int | None = None) -> Position:
        """Return the committed position with what the loader needs to go on from it; `step` as in `StepAccounting.where`."""
        return self.accounting.where(step)

    def save(self, path: Path) -> None:
        """Write the state that the master holds to a checkpoint.

        Raises:
            CheckpointError: the file cannot be written.
        """
        self.files.save(path)

    # --------------------------------------------------------------------------------------------------- the whole run

    def _main(self) -> None:
        state, error, message = "failed", None, ""
        try:
            with self.attached():
                state, message = self._execute()
        except BaseException as caught:
            error = caught
        if state != "done":
            self.replica_set.retire()
        self.accounting.close(state == "done")
        self.files.finish()
        note_workers(self.run, self.cluster.members())
        self._energy.end(self.ready)
        self.logs.end(state)
        self.run.end(state, error, message)
        self._refuse_calls()
        self.on_end()

    def _refuse_calls(self) -> None:
        self._boundary.calls.refuse(
            ClusterError("the run ended before it came to this call between two of its steps: call it again now")
        )

    def _execute(self) -> tuple[str, str]:
        """Returns how the run ended, and a sentence on it."""
        try:
            return self._to_an_end()
        except BaseException:  # of a stop, too: a step that was committed may fail while it is applied
            self.window.abort("the run failed", hear_all=True)
            self._recovery.keep_whole_state()
            raise

    def _to_an_end(self) -> tuple[str, str]:
        try:
            self._begin()
            self._until_done()
            return "done", self.replica_set.left_text(self.cluster)
        except StopRequested:
            self.window.abort("stopped by the user")
            self._settle()
            self._boundary.save_best_at_the_end()
            return "stopped", ""
        except BudgetSpent:
            return "stopped", self._stop_at_budget()

    def _begin(self) -> None:
        self.run.begin()
        self.cluster.count_anew()
        self.snapshots.there.expect(self.ready)
        try:
            self.membership.give_state(self.accounting.snapshot)
        except (NobodyLeft, GroupLost) as error:  # before the first step: those who are left may be enough
            self._recovery.recover(error)

    def _until_done(self) -> None:
        plan = self.plan
        while True:
            try:
                while self.accounting.position.epoch < plan.num_epochs and plan.has_step_after(self.accounting.steps):
                    self._do_epoch(self.accounting.position.epoch)
                self._boundary.reach()
                if not (self._may_leave() and self.replica_set.leave(self)):
                    self.membership.fetch()
                return self.membership.tell_absent()
            except (NobodyLeft, WorkerLost, GroupLost, Handover) as error:
                self._recovery.recover(error)

    def _may_leave(self) -> bool:
        """Whether the state may stay with the workers at the end: to bring it here takes long, and can be done later."""
        spec = self.replica_set.spec
        at_workers = spec.optimizer_site == "workers" and self.plan.budget is None and not self._recovery.held
        return at_workers and self.replica_set.master.weights_bytes > MOST_FETCHED_BYTES

    def _do_epoch(self, epoch: int) -> None:
        self._in_epoch = True
        try:
            if self._train_epoch(epoch):
                self._end_epoch(epoch)
            else:
                self._boundary.end_epoch(is_whole=False)
        finally:
            self._in_epoch = False

    def _train_epoch(self, epoch: int) -> bool:
        """Returns whether it was trained to its end; else the run has all its steps."""
        self.run.move("training")
        self.run.begin_epoch(epoch)
        self.budget_gate.begin()
        self.replica_set.writer.next_pass()
        self.accounting.begin_epoch(epoch)
        with closing(self.window.load_epoch(self.accounting.steps)) as feeder:
            while True:
                self.window.wait_for_batches(feeder, self._boundary.reach)
                coming = feeder.next_bytes()
                if coming is not None and not self.plan.has_step_after(self.window.issued_steps(self.accounting.steps)):
                    self.window.drain()
                    return False
                if coming is not None:
                    self._boundary.reach()
                    self.window.wait_for_room(coming)
                else:  # the end, or a batch that cannot be loaded: those before it count
                    self.window.drain()
                batches = feeder.take()
                if batches is None:
                    return True
                batches = batches[: self.window.most_batches(self.accounting.steps)]
                self.window.read_ahead(feeder)
                if self._check.before(batches) and coming is not None:  # members may have come or gone meanwhile
                    self.window.wait_for_room(coming)
                cost = self.budget_gate.afford_step(batches)
                self.budget_gate.issued(self._issue(epoch, batches), cost)

    def _issue(self, epoch: int, batches: Sequence[LoadedBatch]) -> int:
        team = tuple(self.membership.available())
        # A suspect member that misses this step needs the state when it is back.
        self.membership.behind.update(rank for rank in self.membership.current() if rank not in team)
        self.accounting.note_team(team)
        self.accounting.draw(epoch, batches, self.window.exchange.next_step)
        step = self.window.issue(epoch, batches, team)
        num_steps = self.window.exchange.in_flight[step].machine.num_steps
        self._boundary.mark_due(self.window.issued_steps(self.accounting.steps), num_steps)
        if self.snapshots.is_due(team):
            self._boundary.due.add("snapshot")
        return step

    def _end_epoch(self, epoch: int) -> None:
        self.window.drain()
        self.accounting.note_team(self.membership.available())  # a loss after the last step was sent shows only now
        self._boundary.end_epoch()
        record, validations = self.accounting.end_epoch(epoch), self.run.validations
        self._boundary.tick("epoch", validations[-1] if validations else record)
        self.run.add_epoch({**record, "step": self.accounting.steps, "figure": self._energy.end_epoch(self.ready)})
        self._call("on_epoch", record)
        if epoch + 1 < self.plan.num_epochs and self.snapshots.fits_epoch():
            self._boundary.due.add("snapshot")

    def _call(self, hook: str, record: dict[str, Any]) -> None:
        """Call all callbacks that have this hook; one that returns True stops the run. After the end none is called."""
        for callback in () if self.run.done else self.plan.callbacks:
            method = getattr(callback, hook, None)
            if method is None:
                continue
            who = f"{type(callback).__name__}.{hook}"
            if self._handed_out.call(who, partial(method, self.run, record), is_often=hook == "on_step"):
                self._stop_once(f"{who} asked to stop")
        if hook == "on_epoch":
            self._handed_out.look("Code of this process")
        if self._lost_in_callback:
            raise self._lost_in_callback.pop()

    # ------------------------------------------------------------------------------------------------------------- the end

    def _settle(self) -> None:
        """Fetch the state of the last commit, unless that takes too long: then it is fetched when it is asked for."""
        self.interrupts = 0
        try:
            try:
                self._fetch_in_time()
            except GroupLost:
                if not self._recovery.rescue():
                    self._recovery.go_back()
        except (StopRequested, NobodyLeft, WorkerLost) as error:
            if any(rank in self.replica_set.at for rank in self.ready | self.suspects):
                log.info("the final state stays with the workers for now: %s", error)
                return
            self._recovery.go_back()  # no member has what came after the snapshot
        self._boundary.calls.answer()

    def _fetch_in_time(self) -> None:
        """Fetch the state within the grace, since it can be asked for later; but not of members that leave."""
        try:
            self.membership.fetch(self.plan.interrupt_grace_s)
        except StateLate:
            if not self._recovery.held:
                raise
            self.membership.fetch()

    def _stop_at_budget(self) -> str:
        """Bring the state of the last committed step here and save it; returns the sentence on it."""
        budget, saved = self.plan.budget, None
        assert budget is not None
        budget.stopped = True
        self.run.move("stopping", "the budget is used up: the state comes back for a checkpoint")
        try:
            if self.membership.formed:
                self.membership.fetch()
        except (NobodyLeft, WorkerLost, GroupLost) as error:
            if not (isinstance(error, GroupLost) and self._recovery.rescued()):
                self._recovery.go_back()  # what the last snapshot holds is left
        except StopRequested:
            return self._spent(budget, saved)
        if self.replica_set.step >= 0:
            saved = budget.path(self.plan.save_folder, self.files.name, self.accounting.steps)
            self.save(saved)
        self._boundary.calls.answer()
        return self._spent(budget, saved)

    def _spent(self, budget: Budget, saved: Path | None) -> str:
        """The sentence on a budget that is used up; steps count from the very beginning, as in the checkpoint's name."""
        at, steps = self.accounting.position, self.accounting.steps - self.accounting.first_step
        ended = at.batches and at.batches == self.plan.feed.batches_per_epoch and self.plan.val_feed is not None
        lacks = f" (the validation that ends epoch {at.epoch + 1} had no room, and comes first then)" if ended else ""
        return budget.sentence(steps, self.run.total_steps, saved, self.accounting.first_step, lacks)

    def reading_note(self) -> str:
        """What a worker's error in the first steps may come of: how its batches are cut."""
        text = self.plan.reading_text
        return f" (how batches are read: {text})" if text and len(self.run.history) < _FIRST_STEPS else ""

    # ---------------------------------------------------------------------------------------------- what happens to members

    def check(self) -> None:
        """Unwind for an interrupt whose step is done, for a hand-over, or when no member holds the state any more."""
        done = self.replica_set.step >= self._stop_after or not self.window.exchange.in_flight
        if self.interrupts > 1 or (self.interrupts == 1 and (done or time.monotonic() > self._stop_deadline)):
            raise StopRequested
        if self._recovery.held and self._in_epoch:
            raise Handover
        self.membership.check()

    def on_interrupt(self) -> None:
        """The first gives the step in work its time; the second ends at once."""
        if self.interrupts == 1:
            self._stop_after = self.replica_set.step + 1
            self._stop_deadline = time.monotonic() + self.plan.interrupt_grace_s
            self.run.move(
                "stopping", f"stops after {self.replica_set.nth(self._stop_after)}; interrupt again to stop at once"
            )

    def on_suspected(self, rank: int) -> None:
        """Give a suspect worker's shards to others at once; the worker keeps its seat."""
        self.accounting.poison.vanished(rank, self.window.exchange.in_flight.values())
        self.window.adopt()
        self.budget_gate.on_broken(rank)

    def on_leaving(self, rank: int) -> None:
        """Let a worker that leaves go, or first bring here the state that it holds."""
        self._recovery.on_leaving(rank)

    def on_lost(self, rank: int) -> None:
        """Give its shards to others.

        Raises:
            SamplesKill: it was the third that was lost over the same samples.
        """
        self.membership.lose(rank)
        poison = self.accounting.poison
        poison.vanished(rank, self.window.exchange.in_flight.values())
        self.window.adopt()
        died = self.cluster.roster.members[rank].state == "lost" and rank not in self.cluster.expelled
        if died and (blamed := poison.lost(rank)):
            raise blamed.error([self.cluster.roster.members[victim] for victim in blamed.victims])

    def on_resumed(self, rank: int) -> None:
        """Give a worker that is back the shards that no member could take meanwhile; its own it still has."""
        self.accounting.poison.back(rank)
        self.window.adopt()
