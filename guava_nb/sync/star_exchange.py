"""The `star` exchange: shards go out, buckets come in, sums and commits go out.

Carries out what the step machines decide. What a commit means for the run is the job's business.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from msgspec.structs import replace

from guava_nb.cluster.job import Job
from guava_nb.data.codec import dtype_name, tensor_bytes
from guava_nb.data.loader_feed import LoadedBatch
from guava_nb.data.split import RowSplitter
from guava_nb.errors import GuavaError, TrainingError
from guava_nb.hub.bucket_sum import is_finite, square_sum
from guava_nb.protocol.messages import (
    Commit,
    FlatTensor,
    GradientBucket,
    ParameterBucket,
    RunSpec,
    ShardReport,
    SumBucket,
)
from guava_nb.replica.buckets import BUFFERS, BucketWire, message_format
from guava_nb.replica.buffer_merge import BufferMerge
from guava_nb.replica.optimizer import ApplyFailed
from guava_nb.sync.exchange import OnApplied, OnCommit, Replicas, StepExchange
from guava_nb.sync.send_credit import SendCredit
from guava_nb.sync.step_in_flight import PlannedShards, StepInFlight, plan_step
from guava_nb.sync.step_machine import Add, Decided, Halt, Instruction, Reissue, SendBucket, StepMachine
from guava_nb.wire_formats.top_k import TopK

__all__ = ["StarExchange"]

_Values = TypeVar("_Values", SumBucket, ParameterBucket)

_WIRE = (
    "{0} of several workers travel as {1}: what a message leaves out is sent with the next one. A worker that "
    "leaves or is lost takes its rest with it: {2}"
)
_ROUNDING = "at most the rounding of one {0}'s {1}"
_OVERLAP = (
    "While the pseudo-gradients of a round travel, each worker takes {0} steps of the next one with its own weights (sync_delay, "
    "--sync-delay). These stay with it: a worker that joins begins a round with the common weights"
)
_SPARSE = "with sparse messages that is what several rounds came to, and it is told how much"


class StarReplicas(Replicas, Protocol):
    """As much of replicas that meet at the hub as their exchange needs."""

    sums: BucketWire  # how sums travel, with what they left out so far


class StarExchange(StepExchange[StarReplicas]):
    """Whole replicas: shards go out, buckets come in and are summed here. See `StepExchange`."""

    def __init__(
        self, job: Job, replicas: StarReplicas, on_commit: OnCommit, on_applied: OnApplied, credit: SendCredit
    ) -> None:
        """Handle the exchange's messages in that job.

        Args:
            job, replicas, on_commit, on_applied, credit: see `StepExchange`.
        """
        super().__init__(job, replicas, on_commit, on_applied, credit)
        self._at_orchestrator = replicas.spec.optimizer_site == "orchestrator"
        self._wire = replicas.sums
        if not self._wire.is_exact:
            job.cluster.notice(_how_it_travels(replicas.spec))
        rounds = replicas.spec.rounds
        if rounds is not None and rounds.sync_delay:
            job.cluster.notice(_OVERLAP.format(rounds.sync_delay))
        self._counted: dict[str, bool] = {}
        job.on(GradientBucket, self._on_bucket)

    def _plan(
        self, batches: Sequence[LoadedBatch], team: tuple[int, ...], weights: Sequence[float], splitter: RowSplitter
    ) -> tuple[StepMachine, PlannedShards]:
        alone = len(team) == 1 and not self._at_orchestrator  # then gradients stay where they are
        head = self._head(self._job.cluster.roster.generation, alone)
        tasks, shards = plan_step(head, batches, team, weights, splitter, self._writer)
        buckets = () if alone else self._replicas.master.layout.numbers
        scaled = self._replicas.spec.precision == "fp16"
        solo = alone and not self._replicas.spec.lockstep
        num_steps = head.num_steps(len(batches))
        return StepMachine(head.step, head.generation, tasks, buckets, scaled, solo, num_steps=num_steps), shards

    def parts(self, weights: Sequence[float]) -> list[float]:
        """Return which part of a step's bytes each member of a team with these weights is sent."""
        total = sum(weights)
        return [weight / total for weight in weights]

    def adopt(self, available: Collection[int]) -> None:
        """Give the unfinished shards of members that are not available to those that are.

        A round's shard takes long: one whose worker may come back is given away when all others are through.
        """
        away = self._job.suspects - self._job.slow.keys() if self._replicas.spec.rounds is not None else set[int]()
        for in_flight in list(self.in_flight.values()):
            survivors, machine = [rank for rank in available if rank in in_flight.members], in_flight.machine
            spared = away if machine.owing().intersection(survivors) else set()
            for owner in sorted({task.owner for task in machine.tasks} - set(available) - spared):
                self._carry_out(in_flight, machine.on_away(owner, survivors))

    def _adopt_late(self) -> None:
        if self._job.suspects and self._replicas.spec.rounds is not None:
            self.adopt(sorted(self._job.ready))

    def give_up(self, but_applied_first: bool = False) -> None:
        """Forget all steps in flight, and what their sums left out; see `StepExchange.give_up`."""
        self._wire.discard()
        super().give_up(but_applied_first)

    # -------------------------------------------------------------------------------------------------------- messages

    def _on_bucket(self, rank: int, message: GradientBucket, payload: memoryview) -> None:
        in_flight = self._asked(rank, message)
        if in_flight is None or message.bucket not in in_flight.machine.buckets:
            return
        self._replicas.master.layout.bucket(message.bucket).check_form(message.tensor, message.present)
        tensor = self._wire.decode_part(message.bucket, message.tensor, payload)
        # The machine is asked before the tensor is added: it knows whether this contribution still counts.
        instructions = in_flight.machine.on_bucket(
            rank, message.generation, message.shard, message.bucket, is_finite(tensor)
        )
        for instruction in instructions:
            if isinstance(instruction, Halt):
                names = self._replicas.master.layout.bucket(message.bucket).not_finite(
                    tensor.to_dense(), message.present
                )
                raise self._not_finite(in_flight, instruction, names[0] if names else "")
            if isinstance(instruction, Add) and not self._wire.is_exact:
                in_flight.senders.setdefault(message.bucket, {})[message.shard] = rank
            if isinstance(instruction, Add) and self._wire.is_forwarded(message.bucket, len(in_flight.machine.tasks)):
                in_flight.messages.setdefault(message.bucket, {})[message.shard] = rank, message.present, payload
            elif isinstance(instruction, Add):
                if message.bucket == BUFFERS and BUFFERS not in in_flight.sums:
                    in_flight.sums[BUFFERS] = self._merge_of(in_flight)
                of_senders = self._replicas.master.layout.bucket(message.bucket).is_mean_of_senders
                in_flight.add(message.bucket, message.shard, tensor, message.present, of_senders)
        self._carry_out(in_flight, instructions)
        self._adopt_late()

    def _on_ready(self, rank: int, message: ShardReport, payload: memoryview) -> None:
        super()._on_ready(rank, message, payload)
        self._adopt_late()

    def _merge_of(self, in_flight: StepInFlight) -> BufferMerge:
        bucket = self._replicas.master.layout.bucket(BUFFERS)
        rows = [task.rows for task in in_flight.machine.tasks]
        forwards = [len(shard.part_rows) or 1 for shard, _ in in_flight.shards]
        policies = ",".join(filter(None, (self._replicas.found_policies, self._replicas.spec.buffers)))
        return BufferMerge(bucket, rows, policies, self._counted, forwards)

    def _carry_out(self, in_flight: StepInFlight, instructions: Iterable[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case SendBucket(bucket, commit) if not self._at_orchestrator:
                    self._send_sum(in_flight, bucket, commit)
                case Reissue(shard, rank):
                    self._send_shard(in_flight, shard, rank)
                case Decided(commit):
                    self._order(in_flight, commit)  # a lone worker's that waits for it; all others have the last sum
                    self._commit(in_flight, instruction)

    def _send_sum(self, in_flight: StepInFlight, bucket: int, commit: Commit | None) -> None:
        if bucket in in_flight.messages:
            self._forward(in_flight, bucket, commit)
            return
        present, flat = self._result(in_flight, bucket)
        tensor, payload = self._wire.encode_sum(bucket, flat)
        self._send_down(in_flight, self._head_of(SumBucket, in_flight, bucket, present, tensor, commit), payload)

    def _send_down(self, in_flight: StepInFlight, message: SumBucket | ParameterBucket, payload: memoryview) -> None:
        """Send it to all members, and with the commit tell each which of its own messages do not count."""
        void = {} if message.commit is None else in_flight.void()
        self._job.cluster.send_all([one for one in in_flight.members if one not in void], message, [payload])
        for member in [one for one in in_flight.members if one in void]:
            self._job.cluster.send(member, replace(message, void=void[member]), [payload])

    def _forward(self, in_flight: StepInFlight, bucket: int, commit: Commit | None) -> None:
        """Send each member the messages that are not its own; each adds all up in shard order, to the same bits."""
        messages = sorted(in_flight.messages[bucket].items())
        union = functools.reduce(operator.or_, (int.from_bytes(bits, "little") for _, (_, bits, _) in messages))
        present = union.to_bytes(self._replicas.master.layout.bucket(bucket).present_bytes, "little")
        void = {} if commit is None else in_flight.void()
        for member in in_flight.members:
            lacking = {shard: payload for shard, (sender, _, payload) in messages if sender != member}
            tensor = FlatTensor("uint8", sum(map(len, lacking.values())))
            message = self._head_of(
                SumBucket, in_flight, bucket, present, tensor, commit, shards=len(messages), forwarded=tuple(lacking),
                void=void.get(member, ()),
            )  # fmt: skip
            self._job.cluster.send(member, message, list(lacking.values()))

    def _result(self, in_flight: StepInFlight, bucket: int) -> tuple[bytes, torch.Tensor]:
        """Return presence bits and sum of a bucket, `[numel]`; tell of buffers that changed unlike, note a gradient's square."""
        total = in_flight.sums[bucket]
        result = total.result(self._replicas.master.layout.bucket(bucket).present_bytes)
        if isinstance(total, BufferMerge):
            self._tell_unlike(in_flight.machine.step, total.unlike)
        elif self._replicas.spec.rounds is None and not in_flight.machine.scaled:
            in_flight.square = (in_flight.square or 0.0) + square_sum(result[1])
        return result

    def _head_of(
        self,
        record: type[_Values],
        in_flight: StepInFlight,
        bucket: int,
        present: bytes,
        tensor: FlatTensor,
        commit: Commit | None,
        **of_sum: Any,
    ) -> _Values:
        machine = in_flight.machine
        return record(
            run_id=self._replicas.run_id, generation=machine.generation, step=machine.step, bucket=bucket,
            present=present, tensor=tensor, commit=commit, **of_sum,
        )  # fmt: skip

    def _commit(self, in_flight: StepInFlight, decided: Decided) -> None:
        # The master steps first: where it cannot, the step counts nowhere, and no worker has heard of a commit.
        failure = self._apply_here(in_flight, decided.commit) if self._at_orchestrator else None
        self._wire.commit()
        super()._commit(in_flight, decided)
        if failure is not None:
            raise _user_error(in_flight, failure, "The step counts") from failure

    def _apply_here(self, in_flight: StepInFlight, commit: Commit) -> BaseException | None:
        """optimizer_site="orchestrator": the master takes the step, its new values go out.

        Returns:
            What its schedule raised after the step.
        """
        master, failure = self._replicas.master, None
        sums = {b: self._result(in_flight, b) for b in in_flight.machine.buckets}
        changes = [(BUFFERS, sums[BUFFERS][0], sums[BUFFERS][1].clone())] if BUFFERS in sums else []
        try:
            self._replicas.note_rate(in_flight.machine.step, master.learning_rate)
            master.apply(sums, replace(commit, frozen=None), in_flight.machine.step)
        except ApplyFailed as failed:
            failure = failed.__cause__
            if not failed.applied and failure is not None:
                raise _user_error(in_flight, failure, "The step counts nowhere") from failure
        except BaseException as error:
            self._replicas.master_step = self._replicas.step - 1  # what it holds now is the state of no step
            if isinstance(error, GuavaError) or not isinstance(error, Exception | SystemExit):
                raise
            raise _user_error(in_flight, error, "The step counts nowhere") from error
        if hooked := None if commit.skip else master.buffer_changes():
            changes = [(BUFFERS, *hooked)]
        values = [*master.parameter_buckets(), *changes]
        for index, (bucket, present, flat) in enumerate(values):  # the commit rides on the last
            last = index == len(values) - 1
            tensor = FlatTensor(dtype_name(flat.dtype), flat.numel())
            message = self._head_of(ParameterBucket, in_flight, bucket, present, tensor, commit if last else None)
            self._send_down(in_flight, message, tensor_bytes(flat))
        return failure


def _how_it_travels(spec: RunSpec) -> str:
    if spec.rounds is None:
        return _WIRE.format("gradients", f"{spec.wire} (wire, --wire)", _ROUNDING.format("step", "gradient"))
    outer, wire_format = spec.rounds.outer, message_format(spec)[0]
    if isinstance(wire_format, TopK):
        return _WIRE.format("the pseudo-gradients of a round", f"{wire_format.name} (outer={outer!r})", _SPARSE)
    return _WIRE.format(
        "the pseudo-gradients of a round", f"{spec.wire} (wire, --wire)", _ROUNDING.format("round", "pseudo-gradient")
    )


def _user_error(in_flight: StepInFlight, error: BaseException, counts: str) -> TrainingError:
    """Return the error on an optimizer or a schedule that raised at the orchestrator."""
    return TrainingError(
        f"optimizer or schedule raised at step {in_flight.machine.step + 1} on the orchestrator ({type(error).__name__}: "
        f"{error}). {counts}; "
        "run.model() and the next run have the last state that is whole"
    )
