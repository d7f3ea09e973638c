"""The replicas of one run: which workers prepared it, at which step each stands, and how the state is sent and fetched.

A replica set outlives the job that made it, so that validation, checkpoints and a further run find the workers as they are.
`ReplicaSet` holds what whole replicas (`whole_replica_set`) and the parts of one model (`group_replica_set`) have in common.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from guava_nb.cluster.cluster import Cluster
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
from guava_nb.replica.state_dict import weights_digest
from guava_nb.row_cache.writer import RowWriter
from guava_nb.spec.changed_code import CodeHere
from guava_nb.spec.missing_modules import missing_advice
from guava_nb.sync.beginning import Beginning
from guava_nb.sync.exchange import StepExchange
from guava_nb.sync.parameter_hashes import check_equal
from guava_nb.sync.state_copy import COMING_BYTES, StateCopy, received_bytes
from guava_nb.sync.steps_held import StepsHeld

__all__ = ["GroupLost", "ReplicaSet", "StateLate", "preparation_text"]

#: A step that is never committed: the master does not hold the run's state yet.
NOT_HERE = -2
#: A state, or what gives it.
Given = Mapping[str, Any] | Callable[[], Mapping[str, Any]]

WAYS_ON = "Train anew with fresh=True (--fresh), or go on from a checkpoint (--resume)"


class StateLate(WorkerLost):
    """A worker has the state and did not hand it over in time."""


class GroupLost(Exception):  # noqa: N818 - not an error yet: a new group can be formed
    """A member of the group is gone; unwinds a job to where a new group can be formed."""


class ReplicaSet(StepsHeld, ABC):
    """All replicas of one run.

    Attributes:
        master: the orchestrator's replica. With optimizer_site="orchestrator" it is the authority; otherwise it is where
            fetched state lands, and what a run's model() gives.
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
        after: the run that this one goes on from at the workers, and its last step; None where it begins from the master.
        from_seed: step 0 is what every machine builds from the record: workers that prove it by a digest are sent nothing.
        beginning: the state with which the run begins.
        copy: of the state after the last step, on its way here outside of a job; None where none was asked for.
        schedule: settings of the optimizer's groups and state of the scheduler, where a run left all else with its workers.
        predecessor: the replicas of the run that this one goes on from, until they are taken over.
        gone_on_in: the run that took these over.
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
        super().__init__()
        self.run_id = run_id
        self.spec = spec
        self.cells = tuple(cells)
        self.master = master
        self.master_step = -1
        self.route = route
        self.elastic, self.least = elastic, least
        self.layout_text = ""
        self.checks: dict[bytes, Any] = {}
        self.code: CodeHere | None = None
        self.after: tuple[str, int] | None = None
        self.from_seed = False
        self.beginning = Beginning(f"the state that {run_id} began with", master)
        self.copy: StateCopy | None = None
        self.schedule: dict[str, Any] | None = None
        self.predecessor: ReplicaSet | None = None
        self.gone_on_in = ""
        self._digest: str | None = None  # of the weights of step 0
        self.kept: tuple[str, ...] = ()
        self.registered: nn.Module | None = None
        self._prepared: dict[int, Prepared] = {}
        self._loaded: dict[int, StateLoaded] = {}
        self._requests = itertools.count(1)
        self._states: dict[int, tuple[int, dict[str, Any]]] = {}
        # By rank the generation of the last order to build the run, and of the state that was sent and is waited for.
        self._building: dict[int, int] = {}
        self._loading: dict[int, int] = {}
        self._awaited: dict[int, int] = {}  # requests whose answer is waited for, and of whom

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
            if self._holds(rank):
                self.at[rank] = self.step

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

    # ----------------------------------------------------------------------------------------------------- prepare

    def prepare(self, job: Job, ranks: Iterable[int]) -> dict[int, Prepared]:
        """Have the workers build their replicas; returns the answers of those that could not.

        A worker that is lost meanwhile simply gives no answer.
        """
        asked = set(ranks)
        for rank in asked:
            self.drop(rank)
        self._take_over()
        self.writer.expect(asked)
        roster = job.cluster.roster
        roster.generation += 1  # the answer to an earlier order may still come, and is not that to this one
        self._building.update(dict.fromkeys(asked, roster.generation))
        after, wanted = self.after or ("", -1), self._proves and self.spec.parallel is None
        job.cluster.send_all(asked, Prepare(self.run_id, self.cells, self.spec, roster.generation, *after, wanted))
        if self._proves:
            self._own_digest()  # while they build
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

    def _take_over(self) -> None:
        """From here on workers may hold the state of the run before as that of this one."""
        if self.predecessor is not None:
            self.predecessor.gone_on_in = self.run_id
            self.predecessor.at.clear()
            self.predecessor = None

    def _holds(self, rank: int) -> bool:
        """Whether a worker that prepared this run holds what the run before it left."""
        answer = self._prepared.get(rank)
        return self.after is not None and answer is not None and answer.ok and answer.holds

    @property
    def _proves(self) -> bool:
        """Whether workers can prove now that they have built the state."""
        return self.from_seed and self.step == -1

    def _own_digest(self) -> str:
        if self._digest is None:
            self._digest = weights_digest(self.master.model)
        return self._digest

    def _proof(self, rank: int) -> str:
        """Return the digest of the weights that a worker has built; "" where it gave none."""
        return self._prepared[rank].digest

    def _has_proved(self, rank: int) -> bool:
        return self._proves and bool(self._own_digest()) and self._proof(rank) == self._own_digest()

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
    def give(self, job: Job, ranks: Collection[int], state: Callable[[], Mapping[str, Any]], step: int) -> None:
        """Bring workers that have just prepared the run to a state, as `load` does; those that hold it are sent nothing.

        Args:
            state: gives it, where it must be sent.
        """

    @abstractmethod
    def load(self, job: Job, ranks: Iterable[int], state: Given, step: int) -> None:
        """Bring workers to a state; those that have proved to have built its weights are sent the rest of it.

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
        self, job: Job, ranks: Collection[int], generation: int, state: Given, step: int
    ) -> Iterator[None]:
        """Send workers a state and wait in the block: an answer that comes later is of a state that the run has left."""
        for rank in ranks:
            self._loaded.pop(rank, None)
            self.at.pop(rank, None)
        self._loading = dict.fromkeys(ranks, generation)
        proved = {rank for rank in ranks if self._has_proved(rank)}
        if sent := set(ranks) - proved:
            tree, buffers = pack(dict(state() if callable(state) else state))
            job.cluster.send_all(sent, LoadState(self.run_id, generation, step, tree), buffers)
        if proved:
            tree, buffers = pack(self.master.state(model=False))
            job.cluster.send_all(proved, LoadState(self.run_id, generation, step, tree, want_hash=False), buffers)
        try:
            yield
        finally:
            self._loading = {}

    def _compare_loaded(self, job: Job, ranks: Iterable[int]) -> None:
        loaded = ((job.cluster.name(rank), self._loaded[rank]) for rank in ranks)
        check_equal((name, answer) for name, answer in loaded if answer.parameter_hash)  # the rest was proved

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
        if (state := self._come(job, timeout_s)) is not None:
            return state
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
                raise self._late(names, timeout_s)
            try:
                state = self._fetch_from(job, prompt[0], timeout_s)
            except StateLate:
                late.update(prompt[:1] if self.elastic else prompt)
                continue
            if state is not None:
                return state

    def _late(self, names: str, timeout_s: float | None) -> StateLate:
        return StateLate(
            f"{names} did not hand over the state of step {self.step + 1} within {timeout_s:g} s: a long step is still in work "
            "there. Nothing is lost: ask again when it is over"
        )

    def _come(self, job: Job, timeout_s: float | None) -> dict[str, Any] | None:
        """Wait for the copy that is on its way; None: there is none, or it cannot come any more."""
        copy = self.copy
        if copy is None or copy.step != self.step:
            return None
        here = job.ready | job.suspects
        if not pump_while_coming(job, copy.ranks, lambda: copy.is_over(lambda rank: rank not in here), timeout_s):
            raise self._late(" and ".join(map(job.cluster.name, copy.ranks)), timeout_s)
        self.copy = None
        return self._take(copy.parts()) if copy.is_whole else None

    def _take(self, parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        self.beginning.preserve()
        state = self._take_in(parts)
        self.master_step = self.step
        return state

    def leave(self, job: Job) -> bool:
        """Leave the state of the last committed step with the workers, and take only its schedule, and what else they changed.

        Returns:
            Whether they have it; if not, `fetch` says what is left.
        """
        holders = self.in_step(job)
        asked = self._holders_with(holders[0]) if holders else []
        answers = self._answers(job, asked, None, whole=False)
        if not answers or any(step != self.step for step, _ in answers):
            return False
        self.schedule = next((found for _, found in answers if found["groups"]), None)
        return True

    def holders(self, cluster: Cluster) -> list[int]:
        """Return the workers, connected or expected back, that hold the state of the last committed step between two runs."""
        return sorted(rank for rank in cluster.roster.alive() if self.at.get(rank) == self.step)

    def begin_copy(self, cluster: Cluster) -> None:
        """Have the state of the last committed step come here, whatever job is at work meanwhile."""
        holders = self.holders(cluster)
        asked = self._holders_with(holders[0]) if holders else []
        if self.copy is None and asked and set(asked) <= set(cluster.roster.ready()) & set(holders):
            self.copy = StateCopy(self.run_id, self.step, {self.next_request(): r for r in asked}, self._resolve)
            self.copy.ask(cluster)

    def is_kept(self, cluster: Cluster) -> bool:
        """Whether a further run can go on from what the workers hold."""
        return any(rank in cluster.roster.ready() for rank in self.holders(cluster))

    def successor(self, run_id: str, master: Replica) -> ReplicaSet:
        """Return replicas of a further run, of the same record, that begins with the state that workers hold of this one.

        Args:
            run_id: of that run.
            master: for it: this one's own, or a replica like it where the state is here already.
        """
        made = self._new(run_id, master)
        made.after, made.predecessor, made.master_step = (self.run_id, self.step), self, NOT_HERE
        made.schedule, made._device_kind = self.schedule, dict(self._device_kind)
        name = f"the state after step {self.step + 1} of {self.run_id}"
        if master is self.master:
            made.beginning = Beginning.at_workers(name, master, lambda: self.copy, self.join, self.fallback())
        else:  # it is here, and stays with this run
            made.beginning = Beginning(name, None, self.master.state())
            made.schedule = self.master.schedule_state()
        return made

    def fallback(self) -> Beginning:
        """Return what is left where the workers that hold the state of the last step are lost."""
        if self.master_step == NOT_HERE:
            return self.beginning
        known = (
            self.beginning.name
            if self.master_step < 0
            else f"the state after step {self.master_step + 1} of {self.run_id}"
        )
        return Beginning(known, self.master)

    def _new(self, run_id: str, master: Replica) -> ReplicaSet:
        made: ReplicaSet = type(self)(run_id, self.spec, self.cells, master)  # type: ignore[call-arg]
        return made

    def join(self, parts: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Make one state of the parts that workers hold."""
        return parts[0]

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
        return self._take(parts)

    def _holders_with(self, rank: int) -> Sequence[int]:
        """Return the workers whose parts make the whole state, this one among them."""
        return [rank]

    def _on_no_state(self, parts: Sequence[Mapping[str, Any] | None]) -> None:  # noqa: B027 - whole replicas need nothing
        """React to answers that do not make the whole state."""

    @abstractmethod
    def _take_in(self, parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Put the state into the master, and return it."""

    def _answers(
        self, job: Job, ranks: Sequence[int], timeout_s: float | None, whole: bool = True
    ) -> list[tuple[int | None, Any]]:
        """Ask members for what they hold: for each the step and the state, None where it is lost or forgot the run.

        Args:
            whole: the whole state, not its schedule alone.

        Raises:
            StateLate: one is there and gave no answer in time.
        """
        # What was asked for earlier and comes now would be kept for nothing.
        self._awaited = requests = {self.next_request(): rank for rank in ranks}
        self._states.clear()
        for request, rank in requests.items():
            job.cluster.send(rank, FetchState(request, self.run_id, whole, whole))
        about, job.about_request = job.about_request, lambda request: "" if request in requests else about(request)
        try:
            in_time = pump_while_coming(
                job,
                ranks,
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


def pump_while_coming(job: Job, ranks: Collection[int], until: Callable[[], bool], timeout_s: float | None) -> bool:
    """Handle events until the condition holds; as long as much comes from these workers, the time begins anew."""
    seen = received_bytes(job.cluster, ranks) if timeout_s is not None else 0
    while not job.pump(until, timeout_s):
        if (now := received_bytes(job.cluster, ranks)) < seen + COMING_BYTES:
            return False
        seen = now
    return True


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
