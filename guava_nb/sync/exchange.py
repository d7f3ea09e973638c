"""What both exchanges have in common at the orchestrator: the steps in flight, and their shards on the way out."""

from __future__ import annotations

import time
from collections.abc import Callable

from guava_nb.cluster.job import Job
from guava_nb.cluster.report_checks import without_invalid
from guava_nb.protocol.messages import Commit, Committed, Ready
from guava_nb.sync.replica_set import ReplicaSet
from guava_nb.sync.send_credit import Credit
from guava_nb.sync.step_in_flight import StepInFlight

__all__ = ["StepExchange", "OnApplied", "OnCommit"]

OnCommit = Callable[[StepInFlight, Commit, float, float], None]
OnApplied = Callable[[int, Committed], None]


class StepExchange:
    """All steps in flight of one run.

    Args:
        on_commit: called when a step is committed, with (flight, commit, loss_sum, count).
        on_applied: called when a worker reports that it applied a step.
        credit: is told what is sent and what is worked on.

    Attributes:
        in_flight: issued and not committed, by step.
        next_step: number of the next step to issue.
    """

    def __init__(
        self, job: Job, replica_set: ReplicaSet, on_commit: OnCommit, on_applied: OnApplied, credit: Credit
    ) -> None:
        """No step is in flight."""
        self.in_flight: dict[int, StepInFlight] = {}
        self.next_step = replica_set.step + 1
        self._job = job
        self._on_commit, self._on_applied, self._credit = on_commit, on_applied, credit
        self._writer = replica_set.writer
        self._writer.on_shard_wanted = self._send_again

    def _send_shard(self, in_flight: StepInFlight, shard: int, rank: int) -> None:
        message, outgoing = in_flight.shards[shard]
        self._credit.sent(message.step, shard, rank, outgoing.nbytes)
        self._job.cluster.send(rank, *self._writer.write(rank, message, outgoing))

    def _send_again(self, rank: int, step: int, shard: int) -> None:
        """A worker lacks rows of its shard that it was thought to hold."""
        in_flight = self.in_flight.get(step)
        if in_flight is not None and shard < len(in_flight.shards) and in_flight.machine.tasks[shard].owner == rank:
            self._send_shard(in_flight, shard, rank)

    def _sound(self, rank: int, message: Ready) -> Ready:
        """The report without figures that cannot be; they are told once."""
        message, odd = without_invalid(message)
        if odd:
            self._job.cluster.tell_invalid(rank, "step", odd)
        return message

    def _note_work(self, rank: int, samples: int, tokens: float | None) -> None:
        member = self._job.cluster.roster.members[rank]
        member.samples += samples
        if tokens is not None:
            member.tokens = (member.tokens or 0.0) + tokens

    def _note_times(self, rank: int, message: Ready) -> None:
        member = self._job.cluster.roster.members[rank]
        member.step_s, member.wait_s = message.forward_s + message.backward_s, message.wait_s
        member.waits.reported(time.monotonic(), message.wait_s)
