"""The `star` exchange: shards go out, buckets come in, sums and commits go out.

Carries out what the step machines decide. Knows the flights; what a commit means for the run is the job's business.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import Any

import torch

from guava_nb.cluster.job import Job
from guava_nb.data.codec import tensor_bytes, tensor_from
from guava_nb.data.loader_feed import LoadedBatch
from guava_nb.data.split import RowSplitter
from guava_nb.errors import NotFinite
from guava_nb.hub.bucket_sum import is_finite
from guava_nb.protocol.messages import (
    Commit,
    CommitStep,
    Committed,
    FlatTensor,
    GradientBucket,
    Message,
    ParameterBucket,
    Ready,
    StepInfo,
    SumBucket,
)
from guava_nb.replica.buckets import BUFFERS
from guava_nb.sync.exchange import OnApplied, OnCommit, StepExchange
from guava_nb.sync.replica_set import ReplicaSet
from guava_nb.sync.send_credit import Credit
from guava_nb.sync.step_in_flight import StepInFlight, plan_step
from guava_nb.sync.step_machine import Add, Decided, Halt, Instruction, Reissue, SendBucket, StepMachine

__all__ = ["StarExchange"]


class StarExchange(StepExchange):
    """Whole replicas: shards go out, buckets come in and are summed here. See `StepExchange`."""

    def __init__(
        self, job: Job, replica_set: ReplicaSet, on_commit: OnCommit, on_applied: OnApplied, credit: Credit
    ) -> None:
        """Handle the exchange's messages in that job."""
        super().__init__(job, replica_set, on_commit, on_applied, credit)
        self._replica_set = replica_set
        self._at_orchestrator = replica_set.spec.optimizer_site == "orchestrator"
        job.on(GradientBucket, self._on_bucket)
        job.on(Ready, self._on_ready)
        job.on(Committed, self._on_committed)

    def issue(
        self,
        epoch: int,
        group: Sequence[LoadedBatch],
        team: tuple[int, ...],
        weights: Sequence[float],
        splitter: RowSplitter,
    ) -> StepInFlight:
        """Share a group of batches among the team and send the shards."""
        replica_set, cluster = self._replica_set, self._job.cluster
        step, generation = self.next_step, cluster.roster.generation
        solo = len(team) == 1 and not self._at_orchestrator
        every = replica_set.spec.hash_every_steps
        want_hash = bool(every) and (step + 1) % every == 0
        tasks, shards = plan_step(
            replica_set.run_id, generation, step, group, team, weights, solo=solo, want_hash=want_hash, splitter=splitter,
            writer=self._writer,
        )  # fmt: skip
        buckets = () if solo else replica_set.master.layout.numbers
        machine = StepMachine(step, generation, tasks, buckets, replica_set.spec.precision == "fp16", solo)
        in_flight = self.in_flight[step] = StepInFlight(machine, epoch, team, shards, len(group))
        self.next_step += 1
        for task in tasks:
            self._send_shard(in_flight, task.index, task.owner)
        idle = set(team) - {task.owner for task in tasks}
        cluster.send_all(idle, StepInfo(replica_set.run_id, generation, step, want_hash))
        return in_flight

    def parts(self, weights: Sequence[float]) -> list[float]:
        """Return which part of a step's bytes each member of a team with these weights is sent."""
        total = sum(weights)
        return [weight / total for weight in weights]

    def adopt(self, available: Collection[int]) -> None:
        """Give the unfinished shards of members that are not available to those that are."""
        for in_flight in list(self.in_flight.values()):
            survivors = [rank for rank in available if rank in in_flight.members]
            for owner in sorted({task.owner for task in in_flight.machine.tasks} - set(available)):
                self._carry_out(in_flight, in_flight.machine.on_lost(owner, survivors))

    def give_up(self, but_solo: bool = False) -> None:
        """Forget all steps in flight; `but_solo` leaves those that a lone worker may have committed by itself."""
        self.in_flight = {n: f for n, f in self.in_flight.items() if but_solo and f.machine.solo}
        self.next_step = self._replica_set.step + 1
        self._credit.clear()

    # -------------------------------------------------------------------------------------------------------- messages

    def _in_flight(self, message: Any) -> StepInFlight | None:
        return self.in_flight.get(message.step) if message.run_id == self._replica_set.run_id else None

    def _on_bucket(self, rank: int, message: Message, payload: memoryview) -> None:
        assert isinstance(message, GradientBucket)
        in_flight = self._in_flight(message)
        if in_flight is None:
            return
        tensor = tensor_from(message.tensor.dtype, (message.tensor.numel,), payload)
        instructions = in_flight.machine.on_bucket(
            rank, message.generation, message.shard, message.bucket, is_finite(tensor)
        )
        for instruction in instructions:
            if isinstance(instruction, Halt):
                raise self._not_finite(in_flight, instruction, tensor)
            if isinstance(instruction, Add):
                if message.bucket == BUFFERS:  # averaged by rows, where gradients are summed
                    tensor.mul_(in_flight.machine.tasks[message.shard].rows / in_flight.machine.rows)
                in_flight.add(message.bucket, message.shard, tensor, message.present)
        self._carry_out(in_flight, instructions)

    def _on_ready(self, rank: int, message: Message, payload: memoryview) -> None:
        assert isinstance(message, Ready)
        message = self._sound(rank, message)
        self._note_times(rank, message)
        self._note_work(rank, message.rows, message.tokens)
        in_flight = self._in_flight(message)
        if in_flight is not None:
            self._credit.worked(message.step, message.shard)
            instructions = in_flight.machine.on_ready(rank, message)
            for instruction in instructions:
                if isinstance(instruction, Halt):
                    raise self._not_finite(in_flight, instruction, None, message.culprit)
            self._carry_out(in_flight, instructions)

    def _on_committed(self, rank: int, message: Message, payload: memoryview) -> None:
        assert isinstance(message, Committed)
        if message.run_id != self._replica_set.run_id:
            return
        if message.ready is not None:
            self._on_ready(rank, message.ready, payload)
        self._on_applied(rank, message)
        in_flight = self._in_flight(message)
        if in_flight is not None and in_flight.machine.solo:
            self._carry_out(in_flight, in_flight.machine.on_solo_commit(message.skipped))

    def _carry_out(self, in_flight: StepInFlight, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case SendBucket(bucket, commit) if not self._at_orchestrator:
                    self._send_sum(in_flight, bucket, commit)
                case Reissue(shard, rank):
                    self._send_shard(in_flight, shard, rank)
                case Decided(commit, loss_sum, count):
                    self._commit(in_flight, commit, loss_sum, count)

    def _send_sum(self, in_flight: StepInFlight, bucket: int, commit: Commit | None) -> None:
        present, total = in_flight.sums[bucket].result(self._replica_set.master.layout.bucket(bucket).present_bytes)
        self._send_flat(SumBucket, in_flight, bucket, present, total, commit)

    def _send_flat(
        self,
        record: type[SumBucket | ParameterBucket],
        in_flight: StepInFlight,
        bucket: int,
        present: bytes,
        flat: torch.Tensor,
        commit: Commit | None,
    ) -> None:
        spec = FlatTensor(str(flat.dtype).removeprefix("torch."), flat.numel())
        machine = in_flight.machine
        message = record(
            run_id=self._replica_set.run_id,
            generation=machine.generation,
            step=machine.step,
            bucket=bucket,
            present=present,
            tensor=spec,
            commit=commit,
        )
        self._job.cluster.send_all(in_flight.members, message, [tensor_bytes(flat)])

    def _commit(self, in_flight: StepInFlight, commit: Commit, loss_sum: float, count: float) -> None:
        machine = in_flight.machine
        if not machine.solo and not machine.buckets:
            message = CommitStep(self._replica_set.run_id, machine.generation, machine.step, commit)
            self._job.cluster.send_all(in_flight.members, message)
        if self._at_orchestrator:
            self._apply_here(in_flight, commit)
        del self.in_flight[machine.step]
        self._replica_set.step = machine.step
        self._credit.committed(time.monotonic())
        self._on_commit(in_flight, commit, loss_sum, count)

    def _apply_here(self, in_flight: StepInFlight, commit: Commit) -> None:
        """optimizer_site="orchestrator": the master takes the step, its new values go out."""
        master = self._replica_set.master
        sums = {b: in_flight.sums[b].result(master.layout.bucket(b).present_bytes) for b in in_flight.machine.buckets}
        buffers = sums.get(BUFFERS)
        averaged = None if buffers is None else (buffers[0], buffers[1].clone())
        master.apply(sums, commit)
        values = list(master.parameter_buckets()) + ([] if averaged is None else [(BUFFERS, *averaged)])
        for index, (bucket, present, flat) in enumerate(values):
            last = index == len(values) - 1
            self._send_flat(ParameterBucket, in_flight, bucket, present, flat, commit if last else None)

    def _not_finite(
        self, in_flight: StepInFlight, halt: Halt, tensor: torch.Tensor | None, culprit: str = ""
    ) -> NotFinite:
        task = in_flight.machine.tasks[halt.shard]
        if halt.bucket is not None and tensor is not None:
            culprit = (self._replica_set.master.layout.bucket(halt.bucket).not_finite(tensor) or [""])[0]
        buffers = self._replica_set.master.layout.buffers
        kind = "buffer" if buffers is not None and culprit in buffers.names else "the gradient of"
        where = f"{kind} {culprit}" if culprit else "the loss"
        ids = f"samples {task.sample_ids[0]} to {task.sample_ids[-1]}" if task.sample_ids else "its samples"
        return NotFinite(
            f"NaN or Inf in {where} on {self._job.cluster.name(halt.rank)} at step {in_flight.machine.step + 1} ({ids}, "
            f"{task.rows} rows). The step was not applied anywhere. Look at these samples, lower the learning rate, or clip "
            "with max_grad_norm"
        )
