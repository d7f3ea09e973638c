"""The replicas of one run: which workers prepared it, at which step each stands, and how the state is sent and fetched.

A replica set outlives the job that made it, so that validation, checkpoints and a further run find the workers as they are.
`ReplicaSet` holds what whole replicas (`whole_replica_set`) and the parts of one model (`group_replica_set`) have in common.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from guava_nb.cluster.group_path import Route
from guava_nb.cluster.job import Job
from guava_nb.data.codec import Resolve, pack, unpack
from guava_nb.data.loader_feed import LoaderFeed
from guava_nb.errors import PreparationError, WorkerLost
from guava_nb.protocol.messages import (
    Abort,
    Cell,
    FetchState,
    LoadState,
    Prepare,
    Prepared,
    RunSpec,
    State,
    StateLoaded,
    StepApplied,
)
from guava_nb.replica.replica import Replica
from guava_nb.row_cache.writer import RowWriter
from guava_nb.spec.changed_code import CodeHere
from guava_nb.spec.missing_modules import missing_advice
from guava_nb.sync.exchange import StepExchange
from guava_nb.sync.parameter_hashes import ParameterHashes, check_equal

__all__ = ["GroupLost", "ReplicaSet", "StateLate", "preparation_text"]

WAYS_ON = "Train anew with fresh=True (--fresh), or go on from a checkpoint (--resume)"


class StateLate(WorkerLost):
    """A worker has the state and did not hand it over in time."""


class GroupLost(Exception):  # noqa: N818 - not an error yet: a new group can be formed
    """A member of the group is gone; unwinds a job to where a new group can be formed."""


class ReplicaSet(ABC):
    """All replicas of one run.

    Attributes:
        master: the orchestrator's replica. With optimizer_site="orchestrator" it is the authority; otherwise it is where
            fetched state lands, and what a run's model() gives.
        at: last committed step of each worker that holds a replica in step with the run.
        step: last committed step of the run, -1 before the first.
        generation_of: generation of each worker's last report of a commit.
        master_step: the step at which the master's state was taken.
        route: the way by which the replicas exchange gradients, and why.
        writer: writes batches for the workers; made by `attach`.
        elastic: every replica is whole, so any number of workers can go on.
        least: how many workers the run needs.
        layout_text: how one model is spread over the workers, in words; "" for whole replicas.
        checks: findings of the one-step check by a digest of what they depend on; handed on from run to run.
        kept: what the user's code changed in this run outside of the state, as `State` tells it.
        registered: the user's own instance, whose weights are where the run begins; None where there is none.
        code: the user's code as it is here; None where workers are not compared with it.
    """

    writer: RowWriter
    #: Does the steps of these replicas; takes the job and the replica set, and what else `StepExchange` takes.
    exchange: type[StepExchange[Any]]
    #: Finds the classes that may come in a worker's state.
    _resolve: Resolve | None = None

    def __init__(
        self, run_id: str, spec: RunSpec, cells: Sequence[Cell], master: Replica, route: Route, *,
        elastic: bool = True, least: int = 1,
    ) -> None:  # fmt: skip
        """Start with no worker prepared."""
        self.run_id = run_id
        self.spec = spec
        self.cells = tuple(cells)
        self.master = master
        self.master_step = -1
        self.route = route
        self.elastic, self.least = elastic, least
        self.layout_text = ""
        self.step = -1
        self.checks: dict[bytes, Any] = {}
        self.code: CodeHere | None = None
        self.kept: tuple[str, ...] = ()
        self.registered: nn.Module | None = None
        self.at: dict[int, int] = {}
        self.generation_of: dict[int, int] = {}
        self._prepared: dict[int, Prepared] = {}
        self._loaded: dict[int, StateLoaded] = {}
        self._requests = itertools.count(1)
        self._states: dict[int, tuple[int, dict[str, Any]]] = {}
        # By rank the generation of the last order to build the run, and of the state that was sent and is waited for.
        self._building: dict[int, int] = {}
        self._loading: dict[int, int] = {}
        self._aborted: dict[int, tuple[int, int]] = {}  # generation of the last abort of each, and the step to end at
        self._lone = (-1, -1)  # a lone worker and the last step that it was sent: so far it may be ahead of the run
        self._awaited: dict[int, int] = {}  # requests whose answer is waited for, and of whom
        self._learning_rates: dict[int, float] = {}
        self._hashes = ParameterHashes()
        self._device_kind: dict[int, str] = {}

    # ---------------------------------------------------------------------------------------------------- messages

    def attach(self, job: Job) -> None:
        """Handle the messages of this run's replicas in that job."""
        job.run_id, job.forget, job.was_asked = self.run_id, self.drop, lambda rank: rank in self._building
        job.on(Prepared, self._on_prepared)
        job.on(StateLoaded, self._on_loaded)
        job.on(State, self._on_state)
        job.on(StepApplied, self._on_applied)  # a job that trains has more to do with it
        self.writer = RowWriter(self.spec, job.cluster.caches, job.cluster.notice)
        self.writer.attach(job, self.run_id)

    def _on_prepared(self, rank: int, message: Prepared, payload: memoryview) -> None:
        if message.run_id == self.run_id and self._building.get(rank) == message.generation:
            self._prepared[rank] = message

    def _on_loaded(self, rank: int, message: StateLoaded, payload: memoryview) -> None:
        if message.run_id == self.run_id and self._loading.get(rank) == message.generation:
            del self._loading[rank]
            self._loaded[rank] = message
            self._device_kind[rank] = message.device_kind
            self.at[rank] = message.step

    def _on_state(self, rank: int, message: State, payload: memoryview) -> None:
        asked = message.run_id == self.run_id and self._awaited.get(message.request_id) == rank
        if asked and self._may_hold(rank, message.step):
            self.kept = message.kept
            self._states[message.request_id] = (message.step, unpack(message.state, payload, self._resolve))

    def _on_applied(self, rank: int, message: StepApplied, payload: memoryview) -> None:
        if message.run_id == self.run_id:
            self.note_commit(rank, message)

    def note_commit(self, rank: int, message: StepApplied) -> str | None:
        """Note that a worker applied a step; one that it cannot have applied is no news.

        Returns:
            A sentence without the worker's name when its parameters differ from others', else None.
        """
        if rank not in self.at or not (self._has_undone(rank, message) or self._goes_on(rank, message.step)):
            return None
        self.at[rank] = message.step
        # The report of a step that was committed before an abort comes after the answer to the abort.
        self.generation_of[rank] = max(message.generation, self.generation_of.get(rank, -1))
        if message.learning_rate is not None:
            self._learning_rates[message.step] = message.learning_rate
            self._learning_rates.pop(message.step - 8, None)
        if not message.parameter_hash:
            return None
        kind = self.kind_of(rank)
        if not self._hashes.differs(message.step, kind, message.parameter_hash, rank):
            return None
        return f"parameters differ after step {message.step} from those of other workers of the same kind ({kind})"

    def kind_of(self, rank: int) -> str:
        """Return which kind of device a worker has, and which part of the model."""
        return self._device_kind.get(rank, "")

    def sent_alone(self, rank: int, step: int) -> None:
        """Note that a lone worker was sent a step, which it may commit by itself."""
        self._lone = rank, step

    def _may_hold(self, rank: int, step: int) -> bool:
        """Whether a worker can have applied a step: it was committed, or sent to that worker alone."""
        return step <= self.step or (rank == self._lone[0] and step <= self._lone[1])

    def _goes_on(self, rank: int, step: int) -> bool:
        return self.at[rank] <= step and self._may_hold(rank, step)

    def _has_undone(self, rank: int, message: StepApplied) -> bool:
        """Whether this is a worker's first answer to an abort, and it took back the one step that it should."""
        generation, last = self._aborted.get(rank, (-1, -1))
        is_answer = message.generation == generation > self.generation_of.get(rank, -1)
        return is_answer and message.step == last == self.at[rank] - 1

    def has_settled(self, rank: int, has_failed: bool = False) -> bool:
        """Whether a worker has answered the last abort and holds the step to end at, or does not hold the run any more.

        Args:
            has_failed: its code raised, so it may not come so far.
        """
        generation, last = self._aborted.get(rank, (-1, -1))
        if rank not in self.at:
            return True
        return self.generation_of.get(rank, -1) >= generation and (has_failed or self.at[rank] >= last)

    def take_back(self, step: int) -> None:
        """Note that the steps after this one count no more: they were undone where they were applied, or are lost there."""
        self.step = step
        self.at = {rank: at for rank, at in self.at.items() if at <= step}
        self._hashes.clear()
        self._learning_rates.clear()

    def go_back(self, step: int) -> None:
        """Forget who holds what, and what was reported of the steps after this one: they will be done again, by others."""
        self.take_back(step)
        self._lone = -1, -1
        self.at.clear()

    def learning_rate(self, step: int) -> float | None:
        """Return the learning rate that a worker reported for a step."""
        return self._learning_rates.get(step)

    # ----------------------------------------------------------------------------------------------------- prepare

    def prepare(self, job: Job, ranks: Iterable[int]) -> dict[int, Prepared]:
        """Have the workers build their replicas; returns the answers of those that could not.

        A worker that is lost meanwhile simply gives no answer.
        """
        asked = set(ranks)
        for rank in asked:
            self.drop(rank)
        self.writer.expect(asked)
        roster = job.cluster.roster
        roster.generation += 1  # the answer to an earlier order may still come, and is not that to this one
        self._building.update(dict.fromkeys(asked, roster.generation))
        job.cluster.send_all(asked, Prepare(self.run_id, self.cells, self.spec, roster.generation))
        job.pump(lambda: all(r in self._prepared for r in asked & (job.ready | job.suspects)))
        for rank in asked & self.prepared():
            if self.code is not None and (problem := self.code.problem(self._prepared[rank].facts)):
                self._prepared[rank] = Prepared(run_id=self.run_id, ok=False, problem=problem)
        answers = {r: self._prepared[r] for r in asked if r in self._prepared}
        self.writer.settle(job, [r for r, answer in answers.items() if answer.ok])
        layouts = ("", self.master.layout.digest())
        return {r: answer for r, answer in answers.items() if not answer.ok or answer.layout not in layouts}

    def require(self, job: Job, ranks: Iterable[int]) -> None:
        """Have workers build the run.

        Raises:
            PreparationError: one cannot; the message says who and why.
        """
        problems = sorted(self.prepare(job, ranks).items())
        if problems:
            raise PreparationError("\n".join(preparation_text(job.cluster.name(r), answer) for r, answer in problems))

    def prepared(self) -> set[int]:
        """Return the ranks that built their replicas."""
        return {r for r, answer in self._prepared.items() if answer.ok}

    def drop(self, rank: int) -> None:
        """Note that a worker does not hold this run any more."""
        self._prepared.pop(rank, None)
        self.at.pop(rank, None)

    # ------------------------------------------------------------------------------------------- who can take part

    def look_at(self, feed: LoaderFeed) -> None:  # noqa: B027 - whole replicas need nothing
        """Take what must be known of the data beforehand; whole replicas need nothing."""

    @abstractmethod
    def pick(self, ranks: Iterable[int]) -> set[int]:
        """Choose who takes part among those that are there.

        Raises:
            ConfigError: too few are.
        """

    @abstractmethod
    def connected(self, available: Sequence[int]) -> bool:
        """Whether a step can be issued to those members that are connected."""

    @abstractmethod
    def newcomers(self, holders: set[int], fit: set[int]) -> list[int]:
        """Return who is there, could take part, and needs the state first."""

    def check(self, job: Job) -> None:  # noqa: B027 - whole replicas need nothing
        """Unwind a job whose members cannot go on together; whole replicas do not need each other.

        Raises:
            GroupLost: a member of a group is gone.
        """

    def disband(self) -> None:  # noqa: B027 - whole replicas need nothing
        """Note that the members will not go on as they are."""

    def retire(self) -> None:  # noqa: B027 - whole replicas need nothing
        """Note that the members were told to give up: they keep the state, and their group is over."""

    def abort(self, job: Job, ranks: Collection[int], reason: str, last: int | None = None) -> None:
        """Have workers give up what is not committed; those that are blocked in a group wake up.

        Args:
            last: the step to end at: that before the last committed one where this could not be applied everywhere.
        """
        roster, last = job.cluster.roster, self.step if last is None else last
        roster.generation += 1
        self._aborted.update(dict.fromkeys(ranks, (roster.generation, last)))
        job.cluster.send_all(ranks, Abort(self.run_id, roster.generation, last, reason))

    # ------------------------------------------------------------------------------------------------------- state

    @abstractmethod
    def load(self, job: Job, ranks: Iterable[int], state: Mapping[str, Any], step: int) -> None:
        """Bring workers to a state.

        Raises:
            GroupLost: a member of the group was lost meanwhile.
            PreparationError: the model cannot be spread over the group.
            TrainingError: workers that must hold the same parameters do not.
        """

    @abstractmethod
    def bring_up(self, job: Job) -> None:
        """Have the connected workers stand at the last committed step.

        Raises:
            ConfigError: too few workers are here.
        """

    @abstractmethod
    def rescue(self, job: Job) -> bool:
        """Take the state of the last committed step from the workers that are left; returns whether it is here."""

    @contextmanager
    def _sending_state(
        self, job: Job, ranks: Collection[int], generation: int, state: Mapping[str, Any], step: int
    ) -> Iterator[None]:
        """Send workers a state and wait in the block: an answer that comes later is of a state that the run has left."""
        for rank in ranks:
            self._loaded.pop(rank, None)
            self.at.pop(rank, None)
        self._loading = dict.fromkeys(ranks, generation)
        tree, buffers = pack(dict(state))
        job.cluster.send_all(ranks, LoadState(self.run_id, generation, step, tree), buffers)
        try:
            yield
        finally:
            self._loading = {}

    def _compare_loaded(self, job: Job, ranks: Iterable[int]) -> None:
        check_equal((job.cluster.name(rank), self._loaded[rank]) for rank in ranks)

    def in_step(self, job: Job) -> list[int]:
        """Return the connected ranks that stand at the last committed step."""
        return sorted(r for r, step in self.at.items() if step == self.step and r in job.ready)

    def next_request(self) -> int:
        """Return a number that no request of this run had before, so that a late answer is never taken for another's."""
        return next(self._requests)

    def _adopt_highest(self, job: Job) -> None:
        """The highest step that any worker applied wins: a lone worker may have committed while it was told to stop."""
        self.step = max([self.step, *(step for rank, step in self.at.items() if rank in job.ready)])

    def fetch(self, job: Job, *, timeout_s: float | None = None) -> dict[str, Any]:
        """Return the state as of the last committed step and keep it in the master.

        Raises:
            StateLate: the workers that have it are at work on something longer than `timeout_s`; ask again later.
            WorkerLost: no worker with this state is left.
        """
        if self.master_step == self.step:
            return self.master.state()
        late: set[int] = set()
        if not job.trains and not self.in_step(job):  # reports that came while no job listened are lost
            self.abort(job, [rank for rank in self.at if rank in job.ready | job.suspects], "the state is asked for")
            self.retire()
        while True:
            self._adopt_highest(job)
            job.pump(lambda: bool(self.in_step(job)) or not self._may_have(job), timeout_s)
            holders = self.in_step(job)
            if not holders:
                raise WorkerLost(
                    f"no worker that holds the state of step {self.step + 1} is left or answers; the orchestrator has that of "
                    f"step {self.master_step + 1}. {WAYS_ON}"
                )
            prompt = [rank for rank in holders if rank not in late]
            if not prompt:
                names = " and ".join(job.cluster.name(rank) for rank in holders)
                raise StateLate(
                    f"{names} did not hand over the state of step {self.step + 1} within {timeout_s:g} s: a long step is still "
                    "in work there. Nothing is lost: ask again when it is over"
                )
            try:
                state = self._fetch_from(job, prompt[0], timeout_s)
            except StateLate:
                late.update(prompt[:1] if self.elastic else prompt)
                continue
            if state is not None:
                return state

    def _may_have(self, job: Job) -> bool:
        """Whether workers that are here, or expected back, may still hold the state."""
        return any(r in self.at for r in job.ready | job.suspects)

    def _fetch_from(self, job: Job, rank: int, timeout_s: float | None) -> dict[str, Any] | None:
        """Take the state from a worker, or from all that have a part of it; None: it is of another step, or lost."""
        asked = self._holders_with(rank)
        answers = self._answers(job, asked, timeout_s)
        for member, (step, _) in zip(asked, answers, strict=True):
            if step is not None:  # its report may have been lost with a connection between two runs
                self.at[member] = step
        self._adopt_highest(job)
        parts = [part for step, part in answers if part is not None and step == self.step]
        if len(parts) < len(answers):
            self._on_no_state([part for _, part in answers])
            return None
        state = self._take_in(parts)
        self.master_step = self.step
        return state

    def _holders_with(self, rank: int) -> Sequence[int]:
        """Return the workers whose parts make the whole state, this one among them."""
        return [rank]

    def _on_no_state(self, parts: Sequence[Mapping[str, Any] | None]) -> None:  # noqa: B027 - whole replicas need nothing
        """React to answers that do not make the whole state."""

    @abstractmethod
    def _take_in(self, parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Put the state into the master, and return it."""

    def _answers(self, job: Job, ranks: Sequence[int], timeout_s: float | None) -> list[tuple[int | None, Any]]:
        """Ask members for what they hold: for each the step and the state, None where it is lost or forgot the run.

        Raises:
            StateLate: one is there and gave no answer in time.
        """
        # What was asked for earlier and comes now would be kept for nothing.
        self._awaited = requests = {self.next_request(): rank for rank in ranks}
        self._states.clear()
        for request, rank in requests.items():
            job.cluster.send(rank, FetchState(request, self.run_id))
        about, job.about_request = job.about_request, lambda request: "" if request in requests else about(request)
        try:
            in_time = job.pump(
                lambda: all(
                    request in self._states or rank not in job.ready or rank not in self.at
                    for request, rank in requests.items()
                ),
                timeout_s,
            )
        finally:
            self._awaited, job.about_request = {}, about
        if not in_time:
            raise StateLate("no answer in time")
        return [self._states.pop(request, (None, None)) for request in requests]


def preparation_text(name: str, answer: Prepared) -> str:
    """Say why a worker could not build its replica, and what to do."""
    if answer.missing_module:
        return f"{name} cannot import {answer.missing_module!r}: {missing_advice(answer.missing_module)}"
    if answer.ok:
        return (
            f"{name} built a model with other parameters than the orchestrator's: use the same versions of the code and of "
            "torch on both sides"
        )
    return f"{name} cannot build the run: {answer.problem}"
