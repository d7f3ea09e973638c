"""One optimizer step in flight, as a pure machine: events in, instructions out.

Knows shards, buckets and which worker owes what; knows no tensors, sessions or clocks. Its promises, whatever the order of events
and however many workers are lost and shards issued again:

- each shard is added to each bucket once;
- each bucket is sent once, and the last one sent carries the commit;
- a commit is decided once, and only when every shard has reported its loss.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from guava_nb.config.mesh import Mesh
from guava_nb.protocol.messages import Commit, ShardReport
from guava_nb.replica.shard import clip_factor, true_scale

__all__ = [
    "Add",
    "Decided",
    "Halt",
    "Instruction",
    "Reissue",
    "SendBucket",
    "ShardTask",
    "StepMachine",
    "has_finite_loss",
]


def has_finite_loss(ready: ShardReport) -> bool:
    """Whether loss and count are finite: a count of NaN would make the scale of the step NaN, and all weights with it."""
    return math.isfinite(ready.loss_sum) and math.isfinite(ready.count)


@dataclass(frozen=True, slots=True)
class Add:
    """Add the contribution that just came to its bucket's sum."""

    bucket: int
    shard: int


@dataclass(frozen=True, slots=True)
class SendBucket:
    """Send a complete bucket to all members of the step; with the commit if it is the last."""

    bucket: int
    commit: Commit | None = None


@dataclass(frozen=True, slots=True)
class Decided:
    """The step is committed: everything it waited for is in."""

    commit: Commit
    loss_sum: float
    count: float


@dataclass(frozen=True, slots=True)
class Reissue:
    """Give this shard to that worker: its owner is gone."""

    shard: int
    rank: int


@dataclass(frozen=True, slots=True)
class Halt:
    """NaN or Inf came from this worker: abort the step. `bucket` is None when it reported it.

    `others` are workers, of this one's group, that have it as well and may have had it first.
    """

    rank: int
    shard: int
    bucket: int | None
    others: tuple[int, ...] = ()


Instruction = Add | SendBucket | Decided | Reissue | Halt


@dataclass(slots=True)
class ShardTask:
    """One shard: how many samples, and which worker computes it now.

    `earlier` are the workers that were asked before: what they have done of it counts as well.
    """

    index: int
    rows: int
    owner: int
    sample_ids: tuple[int, ...] = ()
    earlier: set[int] = field(default_factory=set)


@dataclass(slots=True)
class StepMachine:
    """One optimizer step in flight: each event returns instructions. The module's text has what it promises.

    Attributes:
        step: number of the optimizer step.
        generation: membership in which this attempt began; frames of older ones are dropped.
        tasks: the shards, in summation order.
        buckets: numbers of the buckets that each shard sends.
        scaled: fp16 with a loss scaler: a non-finite gradient skips the step instead of halting the run.
        solo: a lone worker commits by itself and sends no buckets.
        voted: `group`: the ranks vote among themselves and apply a step on which all agree before their reports are here.
        mesh: `group`: of its ranks. All of them are heard before a step halts, since what is not finite on one is so on
            others after their sums.
        num_steps: optimizer steps in it: more than one in a round of local steps.
        max_grad_norm: `group`: clip to this; the ranks report their shares of the squared norm.
    """

    step: int
    generation: int
    tasks: Sequence[ShardTask]
    buckets: Sequence[int]
    scaled: bool = False
    solo: bool = False
    max_grad_norm: float | None = None
    mesh: Mesh | None = None
    num_steps: int = 1
    voted: bool = False
    decided: bool = False
    _arrived: dict[int, set[int]] = field(default_factory=dict)
    _ready: dict[int, ShardReport] = field(default_factory=dict)
    _complete: int = 0
    _held: int | None = None
    _skip: bool = False

    @property
    def is_applied_first(self) -> bool:
        """Whether its workers may apply the step before it is decided here."""
        return self.solo or self.voted

    @property
    def rows(self) -> int:
        """Samples in the whole step."""
        return sum(task.rows for task in self.tasks)

    def tokens(self) -> float | None:
        """Return the tokens of all shards that have reported; None when they are not counted."""
        known = [ready.tokens for ready in self._ready.values() if ready.tokens is not None]
        return sum(known) if known else None

    def owing(self) -> set[int]:
        """Ranks with unfinished shards."""
        return {task.owner for task in self.tasks if not self._shard_done(task.index)}

    def owed_by(self, rank: int) -> list[ShardTask]:
        """Unfinished shards of a rank, in order."""
        return [task for task in self.tasks if task.owner == rank and not self._shard_done(task.index)]

    def on_bucket(self, rank: int, generation: int, shard: int, bucket: int, finite: bool) -> list[Instruction]:
        """A shard's contribution to a bucket came; only the first counts, of a worker that was asked for it.

        Args:
            rank, generation: of the sender, and of the attempt that it is about.
            shard, bucket: which contribution.
            finite: whether all of its elements are.
        """
        if self.decided or bucket not in self.buckets or not self.was_asked(rank, shard, generation):
            return []
        shards = self._arrived.setdefault(bucket, set())
        if shard in shards:  # two workers computed it, one before and one after it was away: the first counts
            return []
        if not finite:
            if not self.scaled:
                return [Halt(rank, shard, bucket)]
            self._skip = True  # it is added all the same, so that every worker sees the same sum, and skips
        shards.add(shard)
        out: list[Instruction] = [Add(bucket, shard)]
        if len(shards) == len(self.tasks):
            self._complete += 1
            if self._complete < len(self.buckets):
                out.append(SendBucket(bucket))
            else:  # the commit rides on the last sum, so this one waits until all shards have reported
                self._held = bucket
                out += self._decide()
        return out

    def on_ready(self, rank: int, ready: ShardReport) -> list[Instruction]:
        """A shard's loss came; the first report of a shard counts."""
        if self.decided or not self.was_asked(rank, ready.shard, ready.generation):
            return []
        if not (ready.finite and has_finite_loss(ready)):
            if not self.scaled and self.mesh is None:
                return [Halt(rank, ready.shard, None)]
            # In a group the others are heard first: only all reports together say where it came to be.
            self._skip = True
        self._ready.setdefault(ready.shard, ready)
        return self._decide()

    def on_solo_commit(self, rank: int, generation: int, skipped: bool) -> list[Instruction]:
        """The lone worker has applied the step; from any other, or before its report, this is no news.

        Args:
            rank, generation: of the sender, and of the attempt that it is about.
            skipped: the step changed nothing: its gradients were not finite in fp16.
        """
        if self.decided or not self.solo or not self.was_asked(rank, 0, generation) or not self._ready:
            return []
        self._skip = skipped
        return self._finish()

    def on_away(self, rank: int, survivors: Iterable[int]) -> list[Instruction]:
        """An owner is gone: hand its unfinished shards to the survivors, those with least to do first."""
        load = dict.fromkeys(sorted(survivors), 0)
        if self.decided or not load:
            return []
        open_tasks = [task for task in self.tasks if not self._shard_done(task.index)]
        # Buckets that came of such a shard stay in their sums: who does it again gets the same numbers, and they are dropped.
        for task in open_tasks:
            if task.owner in load:
                load[task.owner] += task.rows
        out: list[Instruction] = []
        for task in open_tasks:
            if task.owner == rank:
                task.earlier.add(rank)
                task.owner = min(load, key=lambda survivor: (load[survivor], survivor))
                load[task.owner] += task.rows
                out.append(Reissue(task.index, task.owner))
        return out

    def was_asked(self, rank: int, shard: int, generation: int) -> bool:
        """Whether this worker was sent this shard in this attempt: nothing else that it says about it counts.

        Args:
            rank: of the worker.
            shard: of the step.
            generation: the attempt that it is about.
        """
        if generation != self.generation or not 0 <= shard < len(self.tasks):
            return False
        return rank == self.tasks[shard].owner or rank in self.tasks[shard].earlier

    def _shard_done(self, shard: int) -> bool:
        if shard not in self._ready:
            return False
        return self.solo or all(shard in self._arrived.get(bucket, ()) for bucket in self.buckets)

    def _decide(self) -> list[Instruction]:
        if self.solo or len(self._ready) < len(self.tasks) or self._complete < len(self.buckets):
            return []
        if self._skip and not self.scaled and self.mesh is not None:
            return [self._first_not_finite(self.mesh)]
        return self._finish()

    def report(self, shard: int) -> ShardReport:
        """Return the report on a shard, which has come."""
        return self._ready[shard]

    def _first_not_finite(self, mesh: Mesh) -> Halt:
        """Find where a value that is not finite came to be.

        A loss is its rank's own. Gradients were summed over replicas, and come from later stages to earlier ones.
        """
        reports = [self._ready[task.index] for task in self.tasks]
        found = [ready for ready in reports if not has_finite_loss(ready)]
        if not found:
            found = [ready for ready in reports if not ready.finite]
            last = max(mesh.stage_of(ready.shard) for ready in found)
            found = [ready for ready in found if mesh.stage_of(ready.shard) == last]
        first, *others = [self.tasks[ready.shard].owner for ready in found]
        return Halt(first, found[0].shard, None, tuple(others))

    def gradient_square(self) -> float | None:
        """Return the squared norm of the gradient before it is scaled, from the shares that were told; None: none was."""
        squares = [ready.gradient_square for ready in self._ready.values() if ready.gradient_square is not None]
        return sum(squares) if squares else None

    def _finish(self) -> list[Instruction]:
        self.decided = True
        # Summed in shard order, so that the reported loss is as repeatable as the weights.
        loss_sum = sum(self._ready[task.index].loss_sum for task in self.tasks)
        count = sum(self._ready[task.index].count for task in self.tasks)
        scale = true_scale(self.rows, count)
        clip = 1.0 if self._skip else clip_factor(self.max_grad_norm, self.gradient_square(), scale)
        told = [ready.frozen for ready in self._ready.values() if ready.frozen is not None]
        frozen = tuple(sorted(set().union(*told))) if told else None
        commit = Commit(scale, self._skip, clip, self.num_steps, frozen)
        out: list[Instruction] = [] if self._held is None else [SendBucket(self._held, commit)]
        return [*out, Decided(commit, loss_sum, count)]
