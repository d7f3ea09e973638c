"""What a worker knows of steps that it has not applied yet, and of its schedule's ticks, as pure machines.

Messages of one step come on several connections in any order: its shards, the sums, the commit. Knows no model and no
session; a payload is an opaque value here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from guava_nb.protocol.messages import BatchShard, Commit, FetchState, SchedulerStep, ShardReport

__all__ = ["LocalStep", "PendingSteps", "ScheduleTicks"]

T = TypeVar("T")


@dataclass(slots=True)
class LocalStep(Generic[T]):
    """One step.

    `todo` are shards with what gives their parts, `done` those computed here, `buckets` the sums that came, by number
    (`has_parameters`: they are new parameter values), `ready` is a report not sent yet.
    """

    generation: int
    want_hash: bool = False
    announced: bool = False
    todo: list[tuple[BatchShard, Callable[[], Any]]] = field(default_factory=list)
    done: set[int] = field(default_factory=set)
    buckets: dict[int, T] = field(default_factory=dict)
    has_parameters: bool = False
    commit: Commit | None = None
    ready: ShardReport | None = None


class PendingSteps(Generic[T]):
    """All steps after the last committed one.

    Attributes:
        committed: the last step applied here, -1 before the first.
    """

    def __init__(self) -> None:
        """Start before the first step."""
        self.committed = -1
        self._spared, self._floor = -1, -1  # of the steps after the first, what is older than the second is stale
        self._steps: dict[int, LocalStep[T]] = {}
        self.abandoned = False

    def reset(self, committed: int, generation: int = -1) -> None:
        """A state was loaded in this generation: steps up to it are over, and so are older attempts of those after it."""
        self.committed = committed
        for number in [n for n in self._steps if n <= committed]:
            del self._steps[number]
        self.abort(committed, generation)
        self.abandoned = False  # the state that was loaded has nothing of it

    def current(self) -> LocalStep[T] | None:
        """Return the step to work on, if anything of it has come."""
        return self._steps.get(self.committed + 1)

    def next_one(self) -> LocalStep[T] | None:
        """Return the step after the current one, if anything of it has come."""
        return self._steps.get(self.committed + 2)

    def following(self) -> tuple[BatchShard, Callable[[], Any]] | None:
        """Return the shard to be worked on first of those that have come, of this step or the next, and what gives it."""
        for number in (self.committed + 1, self.committed + 2):
            step = self._steps.get(number)
            if step is not None and step.todo:
                return step.todo[0]
        return None

    def find(self, number: int, generation: int) -> LocalStep[T] | None:
        """Return a step's record; None when the message belongs to the past or to an attempt that was given up.

        A newer generation of the same step replaces the older attempt; `take_abandoned` then tells that work was dropped.
        """
        if number <= self.committed or (number > self._spared and generation < self._floor):
            return None
        step = self._steps.get(number)
        if step is None or step.generation < generation:
            self.abandoned |= step is not None and bool(step.done)
            step = self._steps[number] = LocalStep(generation)
        return step if step.generation == generation else None

    def announce(self, number: int, generation: int, want_hash: bool) -> LocalStep[T] | None:
        """The orchestrator has issued this step. Only then may it be applied: what must come before it has come."""
        step = self.find(number, generation)
        if step is not None:
            step.announced, step.want_hash = True, want_hash
        return step

    def abort(self, last_committed: int, generation: int) -> None:
        """Give up all attempts after `last_committed` that are older than `generation`, and what still comes of them."""
        if generation < self._floor:
            return
        self._spared, self._floor = last_committed, generation
        for number in [n for n, s in self._steps.items() if n > last_committed and s.generation < generation]:
            self.abandoned |= bool(self._steps.pop(number).done)

    def take_abandoned(self) -> bool:
        """Whether work of the current step was dropped since the last call: the replica must forget it."""
        abandoned, self.abandoned = self.abandoned, False
        return abandoned

    def take_back(self, step: LocalStep[T]) -> None:
        """The step that was applied last, as `advance` returned it, turned out not to be applied."""
        self._steps[self.committed] = step
        self.committed -= 1

    def advance(self) -> LocalStep[T]:
        """The current step has been applied; returns its record."""
        self.committed += 1
        return self._steps.pop(self.committed)


class ScheduleTicks:
    """Counts the ticks that a replica's schedule has had. Pure.

    Ticks travel in order with the shards, questions and states do not: a question may come before a tick that it asks for, and a
    tick after a state that has it already.

    Attributes:
        done: how many it has had, in its run and those that this goes on from.
    """

    def __init__(self, done: int = 0) -> None:
        """A replica was built, or has become a state that has so many."""
        self.done = done
        self._waiting: list[FetchState] = []

    def begins(self, tick: SchedulerStep) -> bool:
        """Whether a tick is to be done now: the state does not have it yet. It counts from here on."""
        is_new = tick.number > self.done
        self.done = max(self.done, tick.number)
        return is_new

    def waits(self, question: FetchState) -> bool:
        """Whether a question asks for a state with ticks that have not come; it is kept for `due`."""
        if question.ticks > self.done:
            self._waiting.append(question)
            return True
        return False

    def due(self) -> list[FetchState]:
        """Return the questions that waited, and wait no more."""
        due = [question for question in self._waiting if question.ticks <= self.done]
        self._waiting = [question for question in self._waiting if question.ticks > self.done]
        return due
