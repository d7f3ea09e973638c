"""The training job: epochs, boundaries, membership, interrupts.

A boundary is a moment with no step in flight: newcomers get the state, validation and snapshots happen. Between boundaries
the exchange keeps a few steps issued ahead of need.
"""

# over budget: when a run does what, and what ends it, is read in one place.

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from guava_nb.cluster.cluster import Cluster
from guava_nb.cluster.job import NobodyLeft, StopRequested
from guava_nb.cluster.job_events import Interrupted, Wake
from guava_nb.data.loader_feed import MOST_BATCHES, LoadedBatch
from guava_nb.data.split import RowSplitter
from guava_nb.errors import ClusterError, GuavaError, WorkerLost
from guava_nb.evaluation.passes import pass_over
from guava_nb.protocol.messages import Abort, Commit, Committed, Tick
from guava_nb.sync.batch_feeder import Feeder
from guava_nb.sync.replica_set import GroupLost, ReplicaSet, StateLate
from guava_nb.sync.send_credit import Credit
from guava_nb.sync.step_in_flight import StepInFlight
from guava_nb.telemetry.run_energy import RunEnergy
from guava_nb.telemetry.waits import Feeding
from guava_nb.training.boundary_calls import BoundaryCalls
from guava_nb.training.budget_gate import BudgetGate
from guava_nb.training.byte_budget import BudgetSpent
from guava_nb.training.membership import MembershipJob
from guava_nb.training.plan import Position, Snapshot, TrainingPlan
from guava_nb.training.poison_samples import PoisonSamples
from guava_nb.training.run import Run
from guava_nb.training.sample_ledger import SampleLedger
from guava_nb.training.status_survey import note_waits, note_workers

__all__ = ["TrainingJob"]

log = logging.getLogger(__name__)

#: Loader batches held ready before they are sent, at most; bytes bound them too.
_LOADED_BATCHES = 32

Save = Callable[[Path, Position, int], None]


class Handover(Exception):  # noqa: N818 - no error: unwinds a job to where it can take the state
    """Members leave with what nobody else holds."""


class TrainingJob(MembershipJob):
    """Runs a plan to its end on its own thread; the handle is `run`.

    Args:
        save: called with (path, position, step) to write a checkpoint of the ensemble's master.

    Attributes:
        position: how far the data has been committed.
        budget_gate: asks the run's budget, if it has one.
    """

    def __init__(self, replica_set: ReplicaSet, plan: TrainingPlan, run: Run, cluster: Cluster, save: Save) -> None:
        """Prepare; `start` begins."""
        start = plan.start if plan.start.feed is not None else replace(plan.start, feed=plan.feed.position())
        snapshot = Snapshot(replica_set.step, start, replica_set.master.state())
        super().__init__(cluster, replica_set, snapshot, plan.rejoin_timeout_s)
        self.plan, self.run = plan, run
        run.goes_by(lambda: replica_set.route, lambda: replica_set.layout_text)
        run.fed_by(self.feeding, lambda: note_waits(cluster.members()))
        self.ledger = SampleLedger()
        self.position = plan.start
        self._save = save
        self._spec = replica_set.spec
        self._first_step = replica_set.step + 1
        self._at_orchestrator = self._spec.optimizer_site == "orchestrator"
        self._feed_epoch, self._feed_batches = plan.start.epoch, plan.start.batches
        self._feeder: Feeder | None = None
        self._blocking: tuple[int, ...] = ()
        self._team: tuple[int, ...] = ()
        self._told_empty = False
        self._stop_after = 0
        self._stop_deadline = 0.0
        self._due: set[str] = set()
        self._leaving: set[int] = set()  # members that want to go, or have gone
        self._held: set[int] = set()  # of these, those that wait until what they hold is here
        self._in_epoch = False  # only there a hand-over unwinds: elsewhere the state is on its way here anyway
        self._energy = RunEnergy(
            cluster.energy, replica_set.run_id, cluster.send, cluster.name,
            lambda rank: cluster.roster.members[rank].hello.device_name, cluster.worked,
        )  # fmt: skip
        run.powered_by(self._energy, replica_set.spec.precision)
        self._splitter = RowSplitter(plan.split_fn)
        self._calls = BoundaryCalls()
        self._poison_samples = PoisonSamples()
        replica_set.attach(self)
        if plan.cache_static:
            replica_set.writer.leave_unread(plan.feed)
        self._credit = Credit(plan.prefetch_bytes, plan.prefetch_steps, max(1, MOST_BATCHES // plan.accumulation_steps))
        self._walk = pass_over(self, replica_set)
        self._exchange = replica_set.exchange(self, replica_set, self._on_commit, self._on_applied, self._credit)
        self.budget_gate = BudgetGate(self, plan.budget)
        self._walk.before_batch = self.budget_gate.before_batch
        self._ending = ""
        self._thread = threading.Thread(target=self._main, name="guava-training", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def interrupt(self) -> None:
        """Ask for the end; called from any thread."""
        self.post(Interrupted())

    def is_current(self) -> bool:
        """Whether the caller is one of the run's own callbacks: it must not wait for the run."""
        return threading.current_thread() is self._thread

    def at_boundary(self, call: Callable[[], None]) -> Future[None]:
        """Have the job call something between two steps; called from any thread, but only others may wait for it."""
        future = self._calls.ask(call)
        self.post(Wake())
        if self.run.done:
            self._refuse_calls()
        return future

    # --------------------------------------------------------------------------------------------------- the whole run

    def _main(self) -> None:
        state, error = "failed", None
        try:
            with self.attached():
                state = self._execute()
        except BaseException as caught:
            error = caught
        if state != "done":
            self.replica_set.retire()
            self.ledger.withdraw_uncommitted()
        self.run.lost_samples, self.run.duplicated_samples = self.ledger.balance()
        note_workers(self.run, self.cluster.members())
        self._energy.end(self.ready)
        self.run.end(state, error, self._ending)
        self._refuse_calls()

    def _refuse_calls(self) -> None:
        self._calls.refuse(ClusterError("the run has ended meanwhile; do it again"))

    def _execute(self) -> str:
        try:
            self._start()
            self._until_done()
            return "done"
        except StopRequested:
            self._abort("stopped by the user")
            self._settle()
            return "stopped"
        except BudgetSpent:
            self._ending = self._stop_at_budget()
            return "stopped"
        except BaseException:
            self._abort("the run failed", hear_all=True)
            raise

    def _start(self) -> None:
        self.run.begin()
        self.cluster.count_anew()
        try:
            self.give_state(set(self.ready))
        except (NobodyLeft, GroupLost) as error:  # before the first step: whoever is left may be enough
            self._recover(error)

    def _until_done(self) -> None:
        while True:
            try:
                while self.position.epoch < self.plan.num_epochs:
                    self._do_epoch(self.position.epoch)
                self._boundary()
                if not self._at_orchestrator:
                    self.replica_set.fetch(self)
                return
            except (NobodyLeft, WorkerLost, GroupLost, Handover) as error:
                self._recover(error)

    def _do_epoch(self, epoch: int) -> None:
        self._in_epoch = True
        try:
            self._train_epoch(epoch)
            self._end_epoch(epoch)
        finally:
            self._in_epoch = False

    def _train_epoch(self, epoch: int) -> None:
        self.run.move("training")
        self.run.begin_epoch(epoch)
        self.budget_gate.begin()
        self.replica_set.writer.next_pass()
        self._feed_epoch, self._feed_batches = epoch, self.position.batches
        feeder = self._feeder = Feeder(
            self.plan.feed.epoch(),
            self.plan.accumulation_steps,
            max(1, _LOADED_BATCHES // self.plan.accumulation_steps),
            lambda: self.post(Wake()),
            self.plan.prefetch_bytes // 4,
        )
        try:
            while True:
                self.pump(feeder.available)
                coming = feeder.next_bytes()
                if coming is not None:
                    self._boundary()
                    self._wait_for_room(coming)
                group = feeder.take()
                if group is None:
                    break
                cost = self.budget_gate.afford_step(group)
                self._issue(epoch, group)
                self.budget_gate.issued(self._exchange.next_step - 1, cost)
        finally:
            feeder.close()

    def _end_epoch(self, epoch: int) -> None:
        self.drain()
        self._note_team(tuple(self.available()))  # who was lost after the last step was sent shows only now
        if self.plan.val_feed is not None and (self.plan.val_interval is None or "validate" in self._due):
            self._validate()
            self._due.discard("validate")
        self.position = Position(epoch + 1)
        records = [record for record in self.run.history if record["epoch"] == epoch + 1]
        samples = sum(record["samples"] for record in records)
        loss = sum(record["loss"] * record["samples"] for record in records) / samples if samples else float("nan")
        if self._spec.scheduler is not None and self._spec.scheduler_interval == "epoch":
            self._tick(self.run.validations[-1]["loss"] if self.run.validations else loss)
        self._energy.end_epoch(self.ready)
        self._call("on_epoch", {"epoch": epoch + 1, "loss": loss, "samples": self.ledger.committed_in(epoch)})
        alone = (
            len(self._team) == 1 or not self.replica_set.elastic
        )  # what one holds, or a part of it, nobody else does
        if self.plan.snapshot_every_steps is None and alone and epoch + 1 < self.plan.num_epochs:
            self._due.add("snapshot")

    # ------------------------------------------------------------------------------------------------------ boundaries

    def _boundary(self) -> None:
        """Do what is due; each of these needs a moment without a step in flight."""
        newcomers = self.newcomers()
        if not (self._due or newcomers or self._calls):
            return
        self.drain()
        if newcomers and self.budget_gate.affords_newcomers(newcomers):
            with self.budget_gate.aside():
                self.bring_in(newcomers)
        for name, action in (("validate", self._validate), ("snapshot", self._take_snapshot), ("save", self._save_now)):
            if name in self._due:
                if name == "validate":
                    action()
                elif self.budget_gate.affords_state(name):
                    with self.budget_gate.aside():
                        action()
                self._due.discard(name)
        with self.budget_gate.aside():
            self._calls.answer()

    def drain(self) -> None:
        """Wait until no step is in flight and every connected member has applied the last one."""
        self.pump(lambda: not self._exchange.in_flight)
        self._credit.pause()
        self.pump(lambda: all(self.replica_set.at[r] == self.replica_set.step for r in self.available()))

    def _validate(self) -> None:
        assert self.plan.val_feed is not None
        self.run.move("validating")
        question = self.plan.validation()
        with self.budget_gate.validation():
            self._walk.run(self.plan.val_feed, question)
        result = question.result()
        record = {"step": self.replica_set.step + 1, **result.record()}
        self.run.add_validation(record)
        self.run.move("training")
        if self._spec.scheduler is not None and self._spec.scheduler_interval == "validation":
            self._tick(result.loss)
        self._call("on_validation", record)

    def _tick(self, metric: float | None) -> None:
        self.cluster.send_all(self.current(), Tick(self.replica_set.run_id, metric))
        if self._at_orchestrator:
            self.replica_set.master.tick(metric)
        else:
            self.replica_set.master_step = min(self.replica_set.master_step, self.replica_set.step - 1)

    def _take_snapshot(self) -> None:
        self.snapshot = Snapshot(self.replica_set.step, self.where(), self.replica_set.fetch(self))

    def where(self) -> Position:
        """Return the committed position with what the loader needs to go on from it."""
        if not self.run.history:
            return self.snapshot.position
        return replace(self.position, feed=self.plan.feed.position(self._feed_epoch, self._feed_batches))

    def _save_now(self) -> None:
        assert self.plan.save_path is not None
        self.replica_set.fetch(self)
        self._save(self.plan.save_path, self.where(), self.replica_set.step)

    # ------------------------------------------------------------------------------------------------------ membership

    def check(self) -> None:
        """Unwind for an interrupt whose step is done, or when nobody holds the state any more."""
        in_flight = self._exchange.in_flight
        if self.interrupts > 1 or (
            self.interrupts == 1
            and (self.replica_set.step >= self._stop_after or not in_flight or time.monotonic() > self._stop_deadline)
        ):
            raise StopRequested
        if self._held and self._in_epoch:
            raise Handover
        super().check()

    def on_interrupt(self) -> None:
        """The first gives the step in work its time; the second ends at once."""
        if self.interrupts == 1:
            self._stop_after = self.replica_set.step + 1
            self._stop_deadline = time.monotonic() + self.plan.interrupt_grace_s
            self.run.move("stopping", f"stops after step {self._stop_after + 1}; interrupt again to stop at once")

    def on_suspected(self, rank: int) -> None:
        """Give its shards to others at once; it keeps its seat."""
        self._note_work(rank)
        self._exchange.adopt(self.available())
        self.budget_gate.on_broken(rank)

    def on_leaving(self, rank: int) -> None:
        """Let it go, unless what it holds is nowhere else: then its state is brought here first."""
        self._leaving.add(rank)
        others = set(self.available()) - self._leaving  # those that were let go are in there until they are gone
        if not self._formed or rank not in self.current() or (others and self.replica_set.elastic):
            self.cluster.release(rank)
        else:
            self._held.add(rank)

    def on_lost(self, rank: int) -> None:
        """Give its shards to others.

        Raises:
            SamplesKill: it was the third that was lost over the same samples.
        """
        self.replica_set.at.pop(rank, None)
        self._note_work(rank)
        self._exchange.adopt(self.available())
        if self.cluster.roster.members[rank].state == "lost" and (blamed := self._poison_samples.lost(rank)):
            raise blamed.error([self.cluster.members()[victim] for victim in blamed.victims])

    def on_resumed(self, rank: int) -> None:
        """It has its shards, and takes those that nobody could take meanwhile."""
        self._poison_samples.back(rank)
        self._exchange.adopt(self.available())

    def _note_work(self, rank: int) -> None:
        """Note what it was at when it vanished: the oldest shard that it owes; others only wait in its queue."""
        for in_flight in self._exchange.in_flight.values():
            task = next(iter(in_flight.machine.owed_by(rank)), None)
            if task is not None:
                if task.sample_ids:
                    self._poison_samples.hold(rank, (in_flight.epoch, task.sample_ids[0], task.sample_ids[-1]))
                return

    def on_started_over(self) -> None:
        """Go back to the snapshot with data and history, before anybody gets it: whoever does may be lost as well."""
        self.run.move("preparing", f"a worker came; the run goes on from step {self.snapshot.step + 1}")
        position = self.position = self.snapshot.position
        position.rewind(self.plan.feed)
        already = self.plan.start.samples if position.epoch == self.plan.start.epoch else 0
        self.ledger.truncate(position.epoch, position.samples - already)
        self.run.rewind(self.snapshot.step + 1 - self._first_step)
        self._due.clear()

    def _recover(self, cause: Exception) -> None:
        """Start over, and again if somebody is lost meanwhile."""
        again: Exception | None = cause
        while again is not None:
            try:
                self._start_again(again)
                again = None
            except (NobodyLeft, GroupLost, Handover) as lost:
                again = lost

    def _start_again(self, cause: Exception) -> None:
        """Those who hold the state cannot go on: wait for workers, and start over from what can be saved of it.

        Where a group broke and all of its last committed state is still there, that is taken; else the run goes back to the
        last snapshot, data and history included.
        """
        if isinstance(cause, GroupLost):
            self.cluster.notice(f"{cause}; step {self.replica_set.step + 2} is given up and a new group is formed")
            self._give_up(str(cause))
        elif isinstance(cause, Handover):
            self._take_over()
        self._let_go()
        self._exchange.give_up()
        needed = self.replica_set.least - len(self.ready - self._unfit)
        if needed > 0:
            what = "one to join" if needed == 1 else f"{needed} to join"
            self.run.move(
                "waiting",
                f"too few workers are left; waiting {self.plan.rejoin_timeout_s:g} s for {what}, and then the run goes on by "
                f"itself from step {self.snapshot.step + 1}: %guava_worker with the join code elsewhere does it. To start one "
                "here while this cell is busy, or to see the code: interrupt, then %guava_up --local 1 (--show-code), and "
                "train again",
                self.plan.rejoin_timeout_s,
            )
        self.budget_gate.afford_start_over()
        self.start_over(cause)
        self._exchange.give_up()

    def _take_over(self) -> None:
        """Take the state of the last committed step from those who leave with it.

        Raises:
            BudgetSpent: it may come here once only, so that is the end of the run.
        """
        reason = "a worker leaves with what nobody else holds"
        if not self.budget_gate.affords_handover():
            self._abort(reason, hear_all=True)
            raise BudgetSpent
        self._give_up(reason)

    def _let_go(self) -> None:
        """Release those that were held: what they had is here now, or lost."""
        self.leave_out(sorted(self._leaving))
        while self._held:
            self.cluster.release(self._held.pop())

    def _give_up(self, reason: str) -> None:
        """Give the steps in work up, hear how far everybody is, and save what is there of the state."""
        self.run.generations += 1
        self._team = ()  # counted here, whoever is in the next one
        self._formed = False
        self._abort(reason, hear_all=True)
        if self.replica_set.step > self.snapshot.step and self.replica_set.rescue(self):
            self.snapshot = Snapshot(self.replica_set.step, self.where(), self.replica_set.master.state())
        self.replica_set.disband()

    # ----------------------------------------------------------------------------------------------------------- steps

    def _wait_for_room(self, coming: int) -> None:
        """Wait until the next step may be sent, and note for whom it waited."""
        started = time.monotonic()
        self._blocking = tuple[int, ...]()
        self.pump(partial(self._has_room, coming))
        for rank in self._blocking:
            self.cluster.roster.members[rank].waits.held(time.monotonic() - started)

    def feeding(self) -> Feeding:
        """Return what is loaded and what is on its way; from any thread."""
        loaded = (0, 0) if self._feeder is None else self._feeder.held()
        ranks = [member.rank for member in self.cluster.members()]
        return Feeding(loaded, {r: (self._credit.held_shards(r), self._credit.held_bytes(r)) for r in ranks})

    def _has_room(self, coming: int) -> bool:
        """Whether a step of so many bytes may be sent now."""
        team = self.available()
        if not self.replica_set.connected(team):
            return False
        parts = self._exchange.parts(self.plan.weights(team))
        bytes_for = {rank: int(coming * part) for rank, part in zip(team, parts, strict=True)}
        away = len(team) < len(self.current())
        busy = self._credit.must_work(len(self._exchange.in_flight), bytes_for, cautious=away)
        self._blocking = busy or self._blocking
        return not busy

    def _issue(self, epoch: int, group: list[LoadedBatch]) -> None:
        team = tuple(self.available())
        # A suspect member that misses this step needs the state when it is back.
        self.behind.update(rank for rank in self.current() if rank not in team)
        self._note_team(team)
        self.ledger.draw(epoch, (i for batch in group for i in batch.sample_ids))
        in_flight = self._exchange.issue(epoch, group, team, self._weights(team), self._splitter)
        self._mark_due(in_flight.machine.step + 1 - self._first_step)

    def _note_team(self, team: tuple[int, ...]) -> None:
        self._energy.takes_part(team)
        if self._team and team != self._team:
            self.run.generations += 1
        self._team = team

    def _weights(self, team: tuple[int, ...]) -> list[float]:
        weights = self.plan.weights(team)
        for rank, weight in zip(team, weights, strict=True):
            self.cluster.roster.members[rank].share = weight / sum(weights)
        return weights

    def _mark_due(self, issued: int) -> None:
        for name, every in (
            ("validate", self.plan.val_interval if self.plan.val_feed is not None else None),
            ("snapshot", self.plan.snapshot_every_steps),
            ("save", self.plan.save_every_steps),
        ):
            if every and issued % every == 0:
                self._due.add(name)

    def _on_commit(self, in_flight: StepInFlight, commit: Commit, loss_sum: float, count: float) -> None:
        if self._at_orchestrator:
            self.replica_set.master_step = in_flight.machine.step
        for task in in_flight.machine.tasks:
            if task.sample_ids:
                self._poison_samples.done((in_flight.epoch, task.sample_ids[0], task.sample_ids[-1]))
        if count == 0:
            self._tell_empty(in_flight)
        ids = in_flight.sample_ids()
        self.ledger.commit(in_flight.epoch, ids)
        at = self.position
        self.position = Position(at.epoch, at.batches + in_flight.batches, at.samples + len(ids))
        self._feed_batches = self.position.batches
        record = {
            "step": in_flight.machine.step + 1,
            "epoch": in_flight.epoch + 1,
            "loss": loss_sum / count if count else float("nan"),
            "count": count,
            "samples": in_flight.machine.rows,
            "tokens": in_flight.machine.tokens(),
            "skipped": commit.skip,
            "learning_rate": self.replica_set.learning_rate(in_flight.machine.step),
        }
        self.run.add_step(record)
        self._call("on_step", record)

    def _tell_empty(self, in_flight: StepInFlight) -> None:
        if not self._told_empty:
            self._told_empty = True
            self.cluster.notice(
                f"step {in_flight.machine.step + 1} counted nothing: its {in_flight.machine.rows} samples have no target that "
                "is not ignored, so its loss is NaN and nothing was learned from it; further steps like it are not told"
            )

    def _on_applied(self, rank: int, message: Committed) -> None:
        difference = self.replica_set.note_commit(rank, message)
        if difference is not None:
            self.cluster.notice(f"{self.cluster.name(rank)}: {difference}; it gets the state again")
            self.behind.add(rank)
        index = message.step - self._first_step
        if message.learning_rate is not None and 0 <= index < len(self.run.history):
            self.run.history[index]["learning_rate"] = message.learning_rate

    def _call(self, hook: str, record: dict[str, Any]) -> None:
        for callback in self.plan.callbacks:
            method = getattr(callback, hook, None)
            if method is not None and method(self.run, record) and not self.interrupts:
                self.interrupts = 1
                self._stop_after = self.replica_set.step
                self.run.move("stopping", f"{type(callback).__name__}.{hook} asked to stop")

    # ------------------------------------------------------------------------------------------------------------- end

    def _stop_at_budget(self) -> str:
        """Bring the state of the last committed step here and save it; returns the sentence on it."""
        budget = self.plan.budget
        assert budget is not None
        budget.stopped = True
        self.run.move("stopping", "the budget is used up: the state comes back for a checkpoint")
        saved = None
        try:
            if self._formed and not self._at_orchestrator:
                self.replica_set.fetch(self)
        except (NobodyLeft, WorkerLost, GroupLost):  # what the last snapshot holds is left
            self.go_back()
        except StopRequested:
            return self._spent(saved)
        if self.replica_set.step >= 0:
            saved = budget.path(self.plan.save_folder, self.replica_set.run_id, self.replica_set.step + 1)
            self._save(saved, self.where(), self.replica_set.step)
        self._calls.answer()
        return self._spent(saved)

    def _fetch_in_time(self) -> None:
        """Fetch the state within the grace, since it can be asked for later; from those who leave it can not."""
        try:
            self.replica_set.fetch(self, timeout_s=self.plan.interrupt_grace_s)
        except StateLate:
            if not self._held:
                raise
            self.replica_set.fetch(self)

    def _spent(self, saved: Path | None) -> str:
        """The sentence on a budget that is used up; steps count from the very beginning, as in the checkpoint's name."""
        assert self.plan.budget is not None
        at, steps = self.position, len(self.run.history)
        ended = at.batches and at.batches == self.plan.feed.batches_per_epoch and self.plan.val_feed is not None
        lacks = f" (the validation that ends epoch {at.epoch + 1} had no room, and comes first then)" if ended else ""
        return self.plan.budget.sentence(steps, self.run.total_steps, saved, self._first_step, lacks)

    def _abort(self, reason: str, hear_all: bool = False) -> None:
        """Have everyone forget what is not committed, and hear how far they are.

        Who is heard: a lone worker, which commits by itself and may be ahead of what is known here; after a failure all,
        since others may have failed in the same way and their reports must not reach a later job.
        """
        self.cluster.roster.generation += 1
        generation = self.cluster.roster.generation
        message = Abort(self.replica_set.run_id, generation, self.replica_set.step, reason)
        self.cluster.send_all(list(self.replica_set.at), message)
        lone = {t.owner for f in self._exchange.in_flight.values() if f.machine.solo for t in f.machine.tasks}
        self._exchange.give_up(but_solo=True)  # nobody would apply one that were committed while others are heard
        self._hear(set(self.replica_set.at) if hear_all else lone, generation)
        self._exchange.give_up()

    def _hear(self, ranks: set[int], generation: int) -> None:
        deadline = time.monotonic() + self.plan.interrupt_grace_s
        while not all(self.replica_set.has_settled(rank, generation) for rank in (ranks & self.ready) - self.behind):
            if self.interrupts > 1 or time.monotonic() > deadline:
                return
            try:
                self.take_one(0.1)
            except GuavaError as error:
                log.debug("while giving up steps: %s", error)

    def _settle(self) -> None:
        """Fetch the state of the last commit, unless that takes too long: then it is fetched when it is asked for."""
        if not self._at_orchestrator:
            self.interrupts = 0
            try:
                self._fetch_in_time()
            except (StopRequested, NobodyLeft, WorkerLost) as error:
                if any(rank in self.replica_set.at for rank in self.ready | self.suspects):
                    log.info("the final state stays with the workers for now: %s", error)
                    return
                self.go_back()  # nobody has what came after the snapshot
        self._calls.answer()
