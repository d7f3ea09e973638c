"""What both exchanges have in common at the orchestrator: the steps in flight, their shards, reports and commits."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

from msgspec.structs import replace

from guava_nb.cluster.job import Job
from guava_nb.cluster.owed_answers import OwedAnswer
from guava_nb.cluster.report_checks import is_valid, without_invalid
from guava_nb.data.loader_feed import LoadedBatch
from guava_nb.data.sample_text import sample_text
from guava_nb.data.split import RowSplitter
from guava_nb.errors import NotFinite, RemoteProtocolError, TrainingError
from guava_nb.protocol.messages import (
    Commit,
    CommitStep,
    GradientBucket,
    ParameterChange,
    RunSpec,
    ShardReport,
    StepApplied,
    StepWithoutShard,
)
from guava_nb.replica.replica import Replica
from guava_nb.row_cache.writer import RowWriter
from guava_nb.sync.parameter_hashes import missed_change, trained_again, unlike_change, unlike_switches
from guava_nb.sync.send_credit import SendCredit
from guava_nb.sync.step_in_flight import PlannedShards, StepHead, StepInFlight
from guava_nb.sync.step_machine import Decided, Halt, Instruction, StepMachine, has_finite_loss

__all__ = ["OnApplied", "OnCommit", "Replicas", "StepExchange"]

OnCommit = Callable[[StepInFlight, Commit, float, float], None]
OnApplied = Callable[[int, StepApplied], None]


class Replicas(Protocol):
    """As much of a replica set as an exchange needs."""

    run_id: str
    spec: RunSpec
    master: Replica
    step: int
    master_step: int
    at: dict[int, int]
    unit: str
    writer: RowWriter
    found_policies: str

    count_ahead: Callable[[int], None]

    def nth(self, step: int) -> str:
        """Return a step of this number in words."""

    def sent(self, ranks: Collection[int], step: int, is_applied_first: bool) -> None:
        """Note that workers were sent a step; `is_applied_first`: they may apply it before it is committed here."""

    def answers_abort(self, rank: int, message: StepApplied) -> bool:
        """Whether this is a worker's first answer to the last abort, which says how far it is."""

    def note_rate(self, step: int, learning_rate: float | None) -> None:
        """Note the learning rate with which a step is taken."""

    def kind_of(self, rank: int) -> str:
        """Return which kind of device a worker has, and which part of the model."""


_Replicas = TypeVar("_Replicas", bound=Replicas)


class StepExchange(ABC, Generic[_Replicas]):
    """All steps in flight of one run.

    Args:
        job: gets the workers' messages.
        replicas: that are kept in step.
        on_commit: called when a step is committed, with (step in flight, commit, loss_sum, count).
        on_applied: called when a worker reports that it applied a step.
        credit: is told what is sent and what is worked on.

    Attributes:
        in_flight: issued and not committed, by step.
        next_step: number of the next step to issue.
        deals: local batches of a round go to workers in proportion to their weights, see `deal_batches`.
    """

    def __init__(
        self, job: Job, replicas: _Replicas, on_commit: OnCommit, on_applied: OnApplied, credit: SendCredit
    ) -> None:
        """Handle the exchange's messages in that job; no step is in flight."""
        self.in_flight: dict[int, StepInFlight] = {}
        self.next_step = replicas.step + 1
        self.deals = False
        self._job, self._replicas, self._credit = job, replicas, credit
        self._on_commit, self._on_applied = on_commit, on_applied
        self._unlike: set[str] = set()  # buffers of which a person was told
        self._computed: set[int] = set()  # who has worked on a shard
        self._switches: dict[str, tuple[int, frozenset[str]]] = {}  # by stage: generation, parameters without gradients
        self._writer = replicas.writer
        self._writer.on_shard_wanted = self._send_again
        replicas.count_ahead = self._count_ahead
        job.on(ShardReport, self._on_ready)
        job.on(StepApplied, self._on_committed)
        job.watch(self._owed)

    # ------------------------------------------------------------------------------------------------------- steps out

    def issue(
        self,
        epoch: int,
        batches: Sequence[LoadedBatch],
        team: tuple[int, ...],
        weights: Sequence[float],
        splitter: RowSplitter,
    ) -> StepInFlight:
        """Share the batches of an optimizer step among the team, by these weights, and send the shards.

        Args:
            epoch: they belong to.
            batches: of the loader: one, or as many as are accumulated or as a round has.
            team: ranks that take part.
            weights: of each of the team: in proportion to these it gets samples.
            splitter: cuts the batches.
        """
        machine, shards = self._plan(batches, team, weights, splitter)
        in_flight = self.in_flight[machine.step] = StepInFlight(machine, epoch, team, shards, len(batches))
        self._replicas.sent(team, machine.step, machine.is_applied_first)
        self.next_step += 1
        for task in machine.tasks:
            self._send_shard(in_flight, task.index, task.owner)
        first, idle = shards[0][0], set(team) - {task.owner for task in machine.tasks}
        info = StepWithoutShard(first.run_id, machine.generation, machine.step, first.want_hash)
        self._job.cluster.send_all(idle, info)
        return in_flight

    @abstractmethod
    def _plan(
        self, batches: Sequence[LoadedBatch], team: tuple[int, ...], weights: Sequence[float], splitter: RowSplitter
    ) -> tuple[StepMachine, PlannedShards]:
        """Return the next step's machine and shards."""

    @abstractmethod
    def parts(self, weights: Sequence[float]) -> list[float]:
        """Return which part of a step's bytes each member of a team with these weights is sent."""

    def adopt(self, available: Collection[int]) -> None:  # noqa: B027 - in a group no other can do them
        """Give the unfinished shards of members that are not available to those that are."""

    def give_up(self, but_applied_first: bool = False) -> None:
        """Forget all steps in flight; `but_applied_first` leaves those that workers may have applied already."""
        self.in_flight = {n: f for n, f in self.in_flight.items() if but_applied_first and f.machine.is_applied_first}
        self.next_step = self._replicas.step + 1
        self._credit.clear()

    def _head(self, generation: int, solo: bool = False) -> StepHead:
        spec = self._replicas.spec
        every, per_step = spec.hash_every_steps, 0
        if spec.rounds is not None:  # weights are compared after each round
            every, per_step = min(every, 1), spec.rounds.batches_per_step
        # After the first step too: a forward that changes weights by the rows it sees leaves them unlike. A lone worker has
        # none to be compared with.
        want_hash = bool(every) and not solo and (self.next_step == 0 or (self.next_step + 1) % every == 0)
        deals = self.deals and bool(per_step)
        return StepHead(self._replicas.run_id, generation, self.next_step, want_hash, solo, per_step, deals)

    def _send_shard(self, in_flight: StepInFlight, shard: int, rank: int) -> None:
        message, outgoing = in_flight.shards[shard]
        self._credit.sent(message.step, shard, rank, outgoing.nbytes)
        self._job.cluster.send(rank, *self._writer.write(rank, message, outgoing))

    def _send_again(self, rank: int, step: int, shard: int) -> None:
        """Send a shard again to a worker that lacks rows that it was thought to hold."""
        in_flight = self.in_flight.get(step)
        if in_flight is None or not 0 <= shard < len(in_flight.shards):
            return
        if in_flight.machine.tasks[shard].owner == rank:
            self._send_shard(in_flight, shard, rank)

    # ------------------------------------------------------------------------------------------------------ reports in

    def _asked(self, rank: int, message: ShardReport | GradientBucket) -> StepInFlight | None:
        """Return the step that a report is about, where its sender was sent that shard of it.

        Raises:
            RemoteProtocolError: the step before it is not committed, so it cannot have been done. Where ranks vote, one may
                report before another's report on the step before is here.
        """
        in_flight = self.in_flight.get(message.step) if message.run_id == self._replicas.run_id else None
        if in_flight is None or not in_flight.machine.was_asked(rank, message.shard, message.generation):
            return None
        if message.step != self._replicas.step + 1 and not in_flight.machine.voted:
            raise RemoteProtocolError(
                f"it is of step {message.step + 1}, and step {self._replicas.step + 2} is not committed"
            )
        return in_flight

    def _owed(self) -> Iterator[OwedAnswer]:
        """What is missing of the next step to be committed: the steps after it wait for it anyway."""
        in_flight = self.in_flight.get(self._replicas.step + 1)
        if in_flight is not None:
            machine = in_flight.machine
            for rank in sorted(machine.owing()):
                yield OwedAnswer(rank, "step", machine.step, f"{self._replicas.nth(machine.step)} is in work there")

    def _on_ready(self, rank: int, message: ShardReport, payload: memoryview) -> None:
        in_flight = self._asked(rank, message)
        if in_flight is None:
            return  # of a step that is over, or of a shard that it was not sent
        message = self._sound(rank, message)
        member = self._job.cluster.roster.members[rank]
        member.step_s, member.wait_s = message.forward_s + message.backward_s, message.wait_s
        member.waits.reported(time.monotonic(), message.wait_s)
        member.samples += self._rows_of(in_flight, message.shard)
        member.note_pace(in_flight.machine.tasks[message.shard].rows, member.step_s)
        if message.tokens is not None:
            member.tokens = (member.tokens or 0.0) + message.tokens
        member.owed = message.owed if is_valid(message.owed) else None
        if message.unlike:
            self._tell_unlike(message.step, message.unlike)
        self._compare_changes(in_flight, rank, message.changed)
        if message.frozen is not None or in_flight.machine.solo:  # a lone worker tells of some only
            self._compare_switches(in_flight, rank, frozenset(message.frozen or ()))
        self._credit.worked(message.step, message.shard)
        instructions = in_flight.machine.on_ready(rank, message)
        for instruction in instructions:
            if isinstance(instruction, Halt):
                report = in_flight.machine.report(instruction.shard) if instruction.shard != message.shard else message
                raise self._not_finite(in_flight, instruction, report.nonfinite if has_finite_loss(report) else "")
        self._carry_out(in_flight, instructions)

    def _tell_unlike(self, step: int, names: Sequence[str]) -> None:
        """Tell a person, once for each buffer, that workers changed it differently and no rule says what is right."""
        buffers = self._replicas.master.layout.buffers
        known = () if buffers is None else buffers.names  # a worker's words are not shown to a person
        new = [name for name in names if name in known and name not in self._unlike]
        self._unlike.update(new)
        if new:
            shown, more = ", ".join(new[:3]), f" and {len(new) - 3} more" if len(new) > 3 else ""
            self._job.cluster.notice(
                f"the workers changed {shown}{more} by different amounts in {self._replicas.nth(step)}, or what had counted "
                "samples went back: each saw its own samples, and one process would have seen them all. Changes that differ are "
                "averaged by samples, those of whole numbers added up. If that is not right: buffers='sum' (--buffers sum) adds "
                "up, 'first' takes those of the first samples; a whole batch on one worker is always right: shares=[1, 0, ...] "
                "(--shares 1,0)"
            )

    def _compare_changes(self, in_flight: StepInFlight, rank: int, change: ParameterChange | None) -> None:
        """Compare what workers' own code changed of the parameters in a step: whole copies stay equal only if all change alike.

        Raises:
            TrainingError: two changed them otherwise, or one has neither a sample of the step nor an earlier one to do it with.
        """
        machine, name = in_flight.machine, self._job.cluster.name
        if machine.solo:
            return
        self._computed.add(rank)
        other = in_flight.changes.other_than(rank, self._replicas.kind_of(rank), change)
        if other is not None:
            raise TrainingError(
                unlike_change(self._parameter(change or other.change), machine.step, name(rank), name(other.rank))
            )
        idle = set(in_flight.members) - {task.owner for task in machine.tasks} - self._computed
        if change is not None and idle:
            raise TrainingError(missed_change(self._parameter(change), machine.step, name(min(idle))))

    def _compare_switches(self, in_flight: StepInFlight, rank: int, frozen: frozenset[str]) -> None:
        """Compare which parameters take no gradient any more at workers that have samples of a step.

        Raises:
            TrainingError: one takes some at one worker of a stage and none at another.
        """
        stage = self._replicas.kind_of(rank).partition(", stage ")[2].partition(",")[0]
        other, theirs = in_flight.frozen.setdefault(stage, (rank, frozen))
        if differing := sorted(frozen ^ theirs):
            name, one, two = self._job.cluster.name, *((rank, other) if differing[0] in frozen else (other, rank))
            raise TrainingError(unlike_switches(differing[0], in_flight.machine.step, name(one), name(two)))
        before, generation = self._switches.get(stage), in_flight.machine.generation
        if before is not None and before[0] != generation and (again := sorted(before[1] - frozen)):
            self._job.cluster.notice(trained_again(again, in_flight.machine.step))
        self._switches[stage] = generation, frozen

    def _parameter(self, change: ParameterChange | None) -> str:
        known = {name for bucket in self._replicas.master.layout.buckets for name in bucket.names}
        return f"parameter {change.name!r}" if change is not None and change.name in known else "a parameter"

    def _sound(self, rank: int, message: ShardReport) -> ShardReport:
        """Return the report without invalid figures; a person is told of them once.

        Raises:
            RemoteProtocolError: its share of the squared norm of the gradient is invalid: no step could be made of it.
        """
        if not is_valid(message.gradient_square) and message.finite:
            raise RemoteProtocolError(f"gradient_square is {message.gradient_square:g}")
        message, odd = without_invalid(message)
        if message.frozen:  # a worker's words go to the others, and to a person
            known = {name for bucket in self._replicas.master.layout.buckets for name in bucket.names}
            message = replace(message, frozen=tuple(name for name in message.frozen if name in known))
        if odd:
            self._job.cluster.tell_invalid(rank, "step", odd)
        return message

    def _rows_of(self, in_flight: StepInFlight, shard: int) -> int:
        """Return how many samples a shard accounts to its worker."""
        return in_flight.machine.tasks[shard].rows

    def _on_committed(self, rank: int, message: StepApplied, payload: memoryview) -> None:
        if message.run_id != self._replicas.run_id or message.generation > self._job.cluster.roster.generation:
            return
        in_flight = self.in_flight.get(message.step)
        has_voted = in_flight is not None and in_flight.machine.voted
        is_asked = message.ready is not None and self._asked(rank, message.ready) is in_flight
        if has_voted and not is_asked and not self._replicas.answers_abort(rank, message):
            return
        if in_flight is None or has_voted:
            self._on_applied(rank, message)  # before the last report commits it: the history wants its learning rate
        if message.ready is not None:
            self._on_ready(rank, message.ready, payload)
        if in_flight is None or has_voted:
            return
        if instructions := in_flight.machine.on_solo_commit(rank, message.generation, message.skipped):
            self._on_applied(rank, message)  # the history wants its learning rate
            self._carry_out(in_flight, instructions)

    def _carry_out(self, in_flight: StepInFlight, instructions: Iterable[Instruction]) -> None:
        """Do what the step's machine decided."""
        for instruction in instructions:
            if isinstance(instruction, Decided):
                self._order(in_flight, instruction.commit)
                self._commit(in_flight, instruction)

    def _order(self, in_flight: StepInFlight, commit: Commit) -> None:
        """Have those apply the step that wait for it and got no sum, which would have carried the commit."""
        machine = in_flight.machine
        if not machine.solo and not machine.buckets:
            waiting = [rank for rank in in_flight.members if self._replicas.at.get(rank, -1) < machine.step]
            order = CommitStep(self._replicas.run_id, machine.generation, machine.step, commit)
            self._job.cluster.send_all(waiting, order)

    def _commit(self, in_flight: StepInFlight, decided: Decided) -> None:
        machine = in_flight.machine
        del self.in_flight[machine.step]
        for task in machine.tasks:  # of a shard that two workers had, only one report came in time
            self._credit.worked(machine.step, task.index)
        self._replicas.step = machine.step
        self._credit.committed(time.monotonic())
        self._on_commit(in_flight, decided.commit, decided.loss_sum, decided.count)

    def _count_ahead(self, step: int) -> None:
        """Count the steps up to this one that workers applied by themselves and whose reports are lost: no loss is known."""
        for number in sorted(n for n, f in self.in_flight.items() if n <= step and f.machine.is_applied_first):
            in_flight = self.in_flight[number]
            # No order to apply it: who has not is in no state to, and its figures are not known.
            self._commit(in_flight, Decided(Commit(1.0, False), math.nan, in_flight.machine.rows))

    def _not_finite(self, in_flight: StepInFlight, halt: Halt, nonfinite: str) -> NotFinite:
        """Return the error on a NaN or Inf from a worker; `nonfinite` is a parameter or a buffer, "" for the loss."""
        ids, rows = self._samples_of(in_flight, halt.shard)
        buffers = self._replicas.master.layout.buffers
        kind = "buffer" if buffers is not None and nonfinite in buffers.names else "the gradient of"
        where = f"{kind} {nonfinite}" if nonfinite else "the loss"
        return NotFinite(
            f"NaN or Inf in {where} {self._origin(in_flight, halt)} at {self._replicas.nth(in_flight.machine.step)} "
            f"({sample_text(ids)}, {rows} rows). The {self._replicas.unit} "
            "was not applied anywhere. Look at these samples, lower the learning rate, or clip (max_grad_norm=, --clip); where "
            "it comes again at once, the step before it spoilt the weights: begin with new ones (fresh=True, --fresh)"
        )

    def _origin(self, in_flight: StepInFlight, halt: Halt) -> str:
        """Say on which worker a NaN or Inf began, or on which ones it may have begun."""
        return f"on {self._job.cluster.name(halt.rank)}"

    def _samples_of(self, in_flight: StepInFlight, shard: int) -> tuple[Sequence[int], int]:
        """Return the ids and the number of the samples that went into a shard's gradients."""
        task = in_flight.machine.tasks[shard]
        return task.sample_ids, task.rows
