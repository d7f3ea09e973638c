"""The training job: issues steps ahead of need, carries out what the step machines decide, meets the boundaries.

Data-parallel through the hub (the `star` exchange). A boundary is a moment with no step in flight: newcomers get the
state, losses re-form the team, validation and snapshots happen, an interrupt ends the run.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from guava_nb.data.tree import tensor_bytes, tensor_from
from guava_nb.engine.ensemble import Ensemble, preparation_text, raise_for
from guava_nb.engine.evaluation import Evaluation
from guava_nb.engine.events import Interrupted, Wake
from guava_nb.engine.feeder import Feeder
from guava_nb.engine.flight import Flight, plan_step
from guava_nb.engine.job import Job, NobodyLeft, StopRequested
from guava_nb.engine.ledger import SampleLedger
from guava_nb.engine.plan import Position, Snapshot, TrainingPlan
from guava_nb.engine.run import Run
from guava_nb.engine.step import Add, Decided, Halt, Instruction, Reissue, SendBucket, StepMachine
from guava_nb.errors import NotFinite, WorkerLost
from guava_nb.hub.reduction import is_finite
from guava_nb.protocol.messages import (
    Abort,
    Commit,
    CommitStep,
    Committed,
    FlatTensor,
    GradientBucket,
    MeanBucket,
    Message,
    Ready,
    StepInfo,
    Tick,
)

__all__ = ["TrainingJob"]

log = logging.getLogger(__name__)


class TrainingJob(Job):
    """Runs a plan to its end on its own thread; the handle is `run`."""

    def __init__(self, ensemble: Ensemble, plan: TrainingPlan, run: Run, cluster: Any, save: Callable[..., None]) -> None:
        """Prepare; `start` begins. `save(path, position, step)` writes a checkpoint of the ensemble's master."""
        super().__init__(cluster)
        self.ensemble, self.plan, self.run = ensemble, plan, run
        self.ledger = SampleLedger()
        self.position = plan.start
        self.flights: dict[int, Flight] = {}
        self._save = save
        self._spec = ensemble.spec
        self._first_step = ensemble.step + 1
        self._next_step = ensemble.step + 1
        self._at_orchestrator = self._spec.optimizer_site == "orchestrator"
        self._snapshot = Snapshot(ensemble.step, plan.start, ensemble.master.state())
        self._behind: set[int] = set()  # members that missed a step and need the state again
        self._unfit: set[int] = set()  # members that could not build this run
        self._team: tuple[int, ...] = ()
        self._training = False
        self._stop_after = 0
        self._stop_deadline = 0.0
        self._due: set[str] = set()
        ensemble.attach(self)
        self._evaluation = Evaluation(self, ensemble)
        self.on(GradientBucket, self._on_bucket)
        self.on(Ready, self._on_ready)
        self.on(Committed, self._on_committed)
        self._thread = threading.Thread(target=self._main, name="guava-training", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def interrupt(self) -> None:
        """Ask for the end; called from any thread."""
        self.post(Interrupted())

    def join(self, timeout_s: float) -> None:
        """Wait for the thread."""
        self._thread.join(timeout_s)

    # ------------------------------------------------------------------------------------------------ the whole run

    def _main(self) -> None:
        state, error = "failed", None
        try:
            with self.attached():
                state = self._execute()
        except BaseException as caught:
            error = caught
        self.ledger.withdraw_uncommitted() if state != "done" else None
        self.run.lost_samples, self.run.duplicated_samples = self.ledger.balance()
        self._note_workers()
        self.run.end(state, error)

    def _execute(self) -> str:
        try:
            self._start()
            self._until_done()
            return "done"
        except StopRequested:
            self._abort("stopped by the user")
            self._settle()
            return "stopped"
        except BaseException:
            self._abort("the run failed")
            raise

    def _start(self) -> None:
        self.run.move("preparing")
        ranks = set(self.ready)
        raise_for(self.ensemble.prepare(self, ranks), self)
        self.ensemble.load(self, ranks & self.ensemble.prepared(), self._snapshot.state, self._snapshot.step)
        self._training = True

    def _until_done(self) -> None:
        while True:
            try:
                self._train()
                if not self._at_orchestrator:
                    self.ensemble.fetch(self)
                return
            except (NobodyLeft, WorkerLost) as error:
                self._recover(error)

    def _train(self) -> None:
        while self.position.epoch < self.plan.num_epochs:
            self._train_epoch(self.position.epoch)

    def _train_epoch(self, epoch: int) -> None:
        self.run.move("training")
        self.run.begin_epoch(epoch)
        if self.position.feed is None:
            self.position = Position(epoch, 0, 0, self.plan.feed.position())
        feeder = Feeder(
            self.plan.feed.epoch(skip_batches=self.position.batches),
            self.plan.accumulation_steps,
            self.plan.prefetch_steps + 1,
            lambda: self.post(Wake()),
        )
        try:
            while True:
                self._boundary()
                self.pump(feeder.available)
                group = feeder.take()
                if group is None:
                    break
                self.pump(self._has_room)
                self._issue(epoch, group)
        finally:
            feeder.close()
        self._end_epoch(epoch)

    def _end_epoch(self, epoch: int) -> None:
        self.drain()
        self.position = Position(epoch + 1)
        records = [r for r in self.run.history if r["epoch"] == epoch + 1]
        count = sum(r["count"] for r in records)
        loss = sum(r["loss"] * r["count"] for r in records) / count if count else float("nan")
        if self.plan.val_feed is not None and (self.plan.val_interval is None or "validate" in self._due):
            self._due.discard("validate")
            self._validate()
        if self._spec.scheduler is not None and self._spec.scheduler_interval == "epoch":
            self._tick(self.run.validations[-1]["loss"] if self.run.validations else loss)
        self._call("on_epoch", {"epoch": epoch + 1, "loss": loss, "samples": self.ledger.committed_in(epoch)})
        if self.plan.snapshot_every_steps is None and len(self._team) == 1 and epoch + 1 < self.plan.num_epochs:
            self._due.add("snapshot")

    # -------------------------------------------------------------------------------------------------- boundaries

    def _boundary(self) -> None:
        """Do what is due; each of these needs a moment without a step in flight."""
        newcomers = self._newcomers()
        if not self._due and not newcomers:
            return
        self.drain()
        if newcomers:
            self._bring_in(newcomers)
        for name, action in (("validate", self._validate), ("snapshot", self._take_snapshot), ("save", self._save_now)):
            if name in self._due:
                self._due.discard(name)
                action()

    def drain(self) -> None:
        """Wait until no step is in flight and every connected member has applied the last one."""
        self.pump(lambda: not self.flights)
        self.pump(lambda: all(self.ensemble.at[r] == self.ensemble.step for r in self._current() if r in self.ready))

    def _validate(self) -> None:
        assert self.plan.val_feed is not None
        self.run.move("validating")
        result = self._evaluation.run(self.plan.val_feed)
        record = {"step": len(self.run.history), **result.record()}
        self.run.add_validation(record)
        self.run.move("training")
        if self._spec.scheduler is not None and self._spec.scheduler_interval == "validation":
            self._tick(result.loss)
        self._call("on_validation", record)

    def _tick(self, metric: float | None) -> None:
        self.cluster.send_all(self._current(), Tick(self.ensemble.run_id, metric))
        if self._at_orchestrator:
            self.ensemble.master.tick(metric)
        else:
            self.ensemble.master_step = min(self.ensemble.master_step, self.ensemble.step - 1)

    def _take_snapshot(self) -> None:
        self._snapshot = Snapshot(self.ensemble.step, self.position, self.ensemble.fetch(self))

    def _save_now(self) -> None:
        self.ensemble.fetch(self)
        self._save(self.plan.save_path, self.position, self.ensemble.step)

    # -------------------------------------------------------------------------------------------------- membership

    def _current(self) -> list[int]:
        """Members that take part in every step so far: connected or expected back, and not behind."""
        return [r for r in sorted(self.ensemble.at) if r in self.ready | self.suspects and r not in self._behind]

    def _available(self) -> list[int]:
        return [r for r in self._current() if r in self.ready]

    def _newcomers(self) -> list[int]:
        holders = set(self._current())
        return [r for r in sorted(self.ready) if r not in holders and r not in self._unfit]

    def _bring_in(self, ranks: list[int]) -> None:
        """Give newcomers the run and the state of the last committed step."""
        unprepared = [r for r in ranks if r not in self.ensemble.prepared()]
        for rank, answer in self.ensemble.prepare(self, unprepared).items():
            self._unfit.add(rank)
            log.warning("%s", preparation_text(self.cluster.name(rank), answer))
        fit = [r for r in ranks if r in self.ensemble.prepared() and r not in self._unfit]
        self._behind.difference_update(fit)
        if fit:
            state = self.ensemble.fetch(self)
            self.ensemble.load(self, fit, state, self.ensemble.step)

    def check(self) -> None:
        """Unwind for an interrupt whose step is done, or when nobody holds the state any more."""
        if self.interrupts > 1 or (
            self.interrupts == 1
            and (self.ensemble.step >= self._stop_after or not self.flights or time.monotonic() > self._stop_deadline)
        ):
            raise StopRequested
        if not (self._current() if self._training else self.ready | self.suspects):
            raise NobodyLeft

    def on_interrupt(self) -> None:
        """The first gives the step in work its time; the second ends at once."""
        if self.interrupts == 1:
            self._stop_after = self.ensemble.step + 1
            self._stop_deadline = time.monotonic() + self.plan.interrupt_grace_s
            self.run.move("stopping", f"stops after step {self._stop_after + 1}; interrupt again to stop at once")

    def on_suspected(self, rank: int) -> None:
        """Give its shards to others at once; it keeps its seat."""
        self._adopt()

    def on_lost(self, rank: int) -> None:
        """Give its shards to others."""
        self.ensemble.at.pop(rank, None)
        self._adopt()

    def on_resumed(self, rank: int) -> None:
        """It has its shards; and takes those that nobody could take meanwhile."""
        self._adopt()

    def _adopt(self) -> None:
        for flight in self.flights.values():
            survivors = [r for r in self._available() if r in flight.members]
            gone = {t.owner for t in flight.machine.tasks} - self.ready
            for owner in sorted(gone):
                self._carry_out(flight, flight.machine.on_lost(owner, survivors))

    def _recover(self, cause: Exception) -> None:
        """Nobody holds the state: wait for a worker, go back to the last snapshot."""
        self._training = False
        self.flights.clear()
        self.run.move("waiting", f"no worker is left; waiting {self.plan.rejoin_timeout_s:g} s for one to join")
        deadline = time.monotonic() + self.plan.rejoin_timeout_s
        while not (self.ready - self._unfit):
            try:
                self.pump(lambda: bool(self.ready - self._unfit), 0.25)
            except NobodyLeft:
                if time.monotonic() > deadline:
                    raise self._all_lost() from cause
                self._wait_for_event(0.25)
        snapshot = self._snapshot
        self.ensemble.step = snapshot.step
        self._next_step = snapshot.step + 1
        self.position = snapshot.position
        if snapshot.position.feed is not None:
            self.plan.feed.restore(snapshot.position.feed)
        self.ledger.truncate(snapshot.position.epoch, snapshot.position.samples - self.plan.start.samples)
        self.run.rewind(snapshot.step + 1 - self._first_step)
        self._behind.clear()
        ranks = self.ready - self._unfit
        raise_for(self.ensemble.prepare(self, ranks), self)
        self.ensemble.load(self, ranks & self.ensemble.prepared(), snapshot.state, snapshot.step)
        self._training = True

    def _all_lost(self) -> WorkerLost:
        gone = "; ".join(f"{m.name}: {m.detail}" for m in self.cluster.members() if not m.alive)
        return WorkerLost(
            f"all workers are gone and none joined within {self.plan.rejoin_timeout_s:g} s ({gone}). The state of step "
            f"{self._snapshot.step + 1} is here: run %guava_worker with the join code on a machine and train again"
        )

    # -------------------------------------------------------------------------------------------------------- steps

    def _has_room(self) -> bool:
        return len(self.flights) <= self.plan.prefetch_steps and bool(self._available())

    def _issue(self, epoch: int, group: list[Any]) -> None:
        team = tuple(self._available())
        # A suspect member that misses this step needs the state when it is back.
        self._behind.update(r for r in self._current() if r not in team)
        if team != self._team and self._team:
            self.run.generations += 1
        self._team = team
        step, generation = self._next_step, self.cluster.roster.generation
        solo = len(team) == 1 and not self._at_orchestrator
        every = self._spec.hash_every_steps
        want_hash = bool(every) and (step + 1) % every == 0
        tasks, shards = plan_step(
            self.ensemble.run_id, generation, step, group, team, self._weights(team),
            solo=solo, want_hash=want_hash, split_fn=self.plan.split_fn,
        )  # fmt: skip
        buckets = () if solo else self.ensemble.master.bucket_ids()
        machine = StepMachine(step, generation, tasks, buckets, self._spec.precision == "fp16", solo)
        self.flights[step] = Flight(machine, epoch, team, shards, len(group))
        self._next_step += 1
        self.ledger.draw(epoch, (i for batch in group for i in batch.sample_ids))
        for task in tasks:
            self.cluster.send(task.owner, *shards[task.index])
        idle = set(team) - {t.owner for t in tasks}
        self.cluster.send_all(idle, StepInfo(self.ensemble.run_id, generation, step, len(tasks), want_hash))
        self._mark_due(step + 1 - self._first_step)

    def _weights(self, team: tuple[int, ...]) -> list[float]:
        shares = self.plan.shares
        weights = [1.0 if shares is None else float(shares[r % len(shares)]) for r in team]
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

    def _on_bucket(self, rank: int, message: Message, payload: memoryview) -> None:
        assert isinstance(message, GradientBucket)
        flight = self._flight(message)
        if flight is None:
            return
        tensor = tensor_from(message.tensor.dtype, (message.tensor.numel,), payload)
        instructions = flight.machine.on_bucket(
            rank, message.generation, message.shard, message.bucket, is_finite(tensor)
        )
        for instruction in instructions:
            if isinstance(instruction, Halt):
                raise self._not_finite(flight, instruction, tensor)
            if isinstance(instruction, Add):
                flight.add(message.bucket, message.shard, tensor, message.present)
        self._carry_out(flight, instructions)

    def _on_ready(self, rank: int, message: Message, payload: memoryview) -> None:
        assert isinstance(message, Ready)
        member = self.cluster.roster.members[rank]
        member.step_s, member.wait_s = message.forward_s + message.backward_s, message.wait_s
        member.samples += message.rows
        flight = self._flight(message)
        if flight is not None:
            self._carry_out(flight, flight.machine.on_ready(rank, message))

    def _on_committed(self, rank: int, message: Message, payload: memoryview) -> None:
        assert isinstance(message, Committed)
        if message.run_id != self.ensemble.run_id:
            return
        difference = self.ensemble.note_commit(rank, message)
        if difference is not None:
            log.warning("%s: %s; it gets the state again", self.cluster.name(rank), difference)
            self._behind.add(rank)
        flight = self._flight(message)
        if flight is not None and flight.machine.solo:
            self._carry_out(flight, flight.machine.on_solo_commit(message.skipped))
        self._fill_learning_rate(message)

    def _flight(self, message: Any) -> Flight | None:
        return self.flights.get(message.step) if message.run_id == self.ensemble.run_id else None

    def _fill_learning_rate(self, message: Committed) -> None:
        index = message.step - self._first_step
        if message.learning_rate is not None and 0 <= index < len(self.run.history):
            self.run.history[index]["learning_rate"] = message.learning_rate

    def _carry_out(self, flight: Flight, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case SendBucket(bucket, commit) if not self._at_orchestrator:
                    self._send_sum(flight, bucket, commit)
                case Reissue(shard, rank):
                    self.cluster.send(rank, *flight.shards[shard])
                case Halt():
                    raise self._not_finite(flight, instruction, None)
                case Decided(commit, loss_sum, count):
                    self._commit(flight, commit, loss_sum, count)

    def _send_sum(self, flight: Flight, bucket: int, commit: Commit | None) -> None:
        present, total = flight.sums[bucket].result(self.ensemble.master.present_bytes(bucket))
        self._send_flat(flight, bucket, present, total, commit)

    def _send_flat(self, flight: Flight, bucket: int, present: bytes, flat: Any, commit: Commit | None) -> None:
        spec = FlatTensor(str(flat.dtype).removeprefix("torch."), flat.numel())
        machine = flight.machine
        message = MeanBucket(self.ensemble.run_id, machine.generation, machine.step, bucket, present, spec, commit)
        self.cluster.send_all(flight.members, message, [tensor_bytes(flat)])

    def _commit(self, flight: Flight, commit: Commit, loss_sum: float, count: float) -> None:
        machine = flight.machine
        if not machine.solo and not machine.buckets:
            self.cluster.send_all(
                flight.members, CommitStep(self.ensemble.run_id, machine.generation, machine.step, commit)
            )
        if self._at_orchestrator:
            self._apply_here(flight, commit)
        del self.flights[machine.step]
        self.ensemble.step = machine.step
        ids = flight.sample_ids()
        self.ledger.commit(flight.epoch, ids)
        at = self.position
        self.position = Position(at.epoch, at.batches + flight.batches, at.samples + len(ids), at.feed)
        record = {
            "step": machine.step + 1,
            "epoch": flight.epoch + 1,
            "loss": loss_sum / count if count else float("nan"),
            "count": count,
            "samples": machine.rows,
            "skipped": commit.skip,
            "learning_rate": self.ensemble.learning_rate(machine.step),
        }
        self.run.add_step(record)
        self._call("on_step", record)

    def _apply_here(self, flight: Flight, commit: Commit) -> None:
        """optimizer_site="orchestrator": the master takes the step, its new values go out."""
        master = self.ensemble.master
        sums = {b: flight.sums[b].result(master.present_bytes(b)) for b in flight.machine.buckets}
        master.apply(sums, commit)
        self.ensemble.master_step = flight.machine.step
        values = [(bucket, master.bucket_values(bucket)) for bucket in flight.machine.buckets]
        for index, (bucket, flat) in enumerate(values):
            last = index == len(values) - 1
            self._send_flat(flight, bucket, b"", flat, commit if last else None)

    def _call(self, hook: str, record: dict[str, Any]) -> None:
        for callback in self.plan.callbacks:
            method = getattr(callback, hook, None)
            if method is not None and method(self.run, record):
                self.post(Interrupted()) if not self.interrupts else None

    def _not_finite(self, flight: Flight, halt: Halt, tensor: Any) -> NotFinite:
        task = flight.machine.tasks[halt.shard]
        where = "the loss" if halt.bucket is None else self.ensemble.master.locate_not_finite(halt.bucket, tensor)
        ids = f"samples {task.sample_ids[0]} to {task.sample_ids[-1]}" if task.sample_ids else "its samples"
        return NotFinite(
            f"NaN or Inf in {where} from {self.cluster.name(halt.rank)} at step {flight.machine.step + 1} ({ids}, {task.rows} "
            "rows). The step was not applied anywhere. Look at these samples, lower the learning rate, or clip with "
            "max_grad_norm"
        )

    # ---------------------------------------------------------------------------------------------------------- end

    def _abort(self, reason: str) -> None:
        """Have everyone forget what is not committed."""
        self.flights.clear()
        roster = self.cluster.roster
        roster.generation += 1
        self._next_step = self.ensemble.step + 1
        self.cluster.send_all(
            list(self.ensemble.at), Abort(self.ensemble.run_id, roster.generation, self.ensemble.step, reason)
        )

    def _settle(self) -> None:
        """Fetch the state of the last commit, unless that takes too long: then it is fetched when it is asked for."""
        if self._at_orchestrator or not self._training:
            return
        self.interrupts = 0
        try:
            self.ensemble.fetch(self, timeout_s=self.plan.interrupt_grace_s)
        except (StopRequested, NobodyLeft, WorkerLost) as error:
            log.info("the final state stays with the workers for now: %s", error)

    def _note_workers(self) -> None:
        for member in self.cluster.members():
            hello = member.hello
            self.run.workers.append(
                {"worker": member.name, "device": hello.device_name, "state": member.state, "samples": member.samples}
            )
            self.run.energy.append(
                {"worker": member.name, "device": hello.device_name, "joules": None, "method": "not measured"}
            )

    def _wait_for_event(self, timeout_s: float) -> None:
        import queue

        try:
            self.handle(self._mailbox.get(timeout=timeout_s))
        except queue.Empty:
            return
