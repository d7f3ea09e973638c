"""The replicas of one run: which workers prepared it, and how they are brought to a state.

A replica set outlives the job that made it, so that validation, checkpoints and a further run find the workers as they are.
`ReplicaSet` holds what whole replicas (`whole_replica_set`) and the parts of one model (`group_replica_set`) have in common.
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from torch import nn

from guava_nb.cluster.cluster import Cluster
from guava_nb.cluster.group_path import Route
from guava_nb.cluster.job import Job
from guava_nb.cluster.owed_answers import OwedAnswer
from guava_nb.data.codec import pack
from guava_nb.data.loader_feed import LoaderFeed
from guava_nb.errors import PreparationError
from guava_nb.protocol.messages import (
    Abort,
    Cell,
    LoadState,
    Prepare,
    Prepared,
    RunSpec,
    SchedulerStep,
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
from guava_nb.sync.state_at_workers import NOT_HERE, StateAtWorkers
from guava_nb.sync.states_on_disk import StateOnDisk, StatesOnDisk

__all__ = ["Given", "GroupLost", "ReplicaSet", "begin_building", "preparation_text"]

#: A state, or what gives it.
Given = Mapping[str, Any] | Callable[[], Mapping[str, Any]]


class GroupLost(Exception):  # noqa: N818 - not an error yet: a new group can be formed
    """A member of the group is gone; unwinds a job to where a new group can be formed."""


class ReplicaSet(StateAtWorkers):
    """All replicas of one run.

    Attributes:
        route: the way by which the replicas exchange gradients, and why.
        writer: writes batches for the workers; made by `attach`.
        least: how many workers the run needs.
        layout_text: how one model is spread over the workers, in words; "" for whole replicas.
        checks, found_policies: the one-step check's findings by a digest of what they depend on, for all runs; of buffers.
        registered: the user's own instance, whose weights are where the run begins; None where there is none.
        code: the user's code as it is here; None where workers are not compared with it.
        after: the run that this one goes on from at the workers, and its last step; None where it begins from the master.
        goes_on: it begins with the weights of the last run.
        from_seed: every machine builds step 0 from the record: workers that prove it by a digest are sent nothing.
        is_begun: workers were told to build the run before its master was (`begin_building`), so they may have it.
        predecessor: the replicas of the run that this one goes on from, until they are taken over.
        gone_on_in: the run that took these over.
        on_disk: states that workers may read from their disks where no worker holds the run's.
    """

    writer: RowWriter
    #: Does the steps of these replicas; takes the job and the replica set, and what else `StepExchange` takes.
    exchange: type[StepExchange[Any]]

    def __init__(
        self, run_id: str, spec: RunSpec, cells: Sequence[Cell], master: Replica, route: Route, *,
        elastic: bool = True, least: int = 1,
    ) -> None:  # fmt: skip
        """Start with no worker prepared."""
        super().__init__(run_id, master, elastic)
        self.spec, self.cells, self.route, self.least = spec, tuple(cells), route, least
        self.unit = "step" if spec.rounds is None else "round"
        self.layout_text = self.gone_on_in = self.found_policies = ""
        self.checks: dict[bytes, Any] = {}
        self.code: CodeHere | None = None
        self.after: tuple[str, int] | None = None
        self.from_seed = self.goes_on = self.is_begun = False
        self.predecessor: ReplicaSet | None = None
        self.registered: nn.Module | None = None
        self._told = set[str]()
        self._prepared, self._loaded = dict[int, Prepared](), dict[int, StateLoaded]()
        # By rank the generation of the last order to build the run; generation and step of the state that is waited for.
        self._building: dict[int, int] = {}
        self._loading: dict[int, tuple[int, int]] = {}
        self._keep = ("", -1)  # run and step that workers were told to keep when they prepared last
        self.on_disk = StatesOnDisk()
        # Asked to build the run while others train on: what they hold is of an earlier step.
        self._ahead: set[int] = set()

    @property
    def is_saved(self) -> bool:
        """Whether a file has all that was trained."""
        return self.saved_step == self.step

    # ---------------------------------------------------------------------------------------------------- messages

    def attach(self, job: Job) -> None:
        """Handle the messages of this run's replicas in that job."""
        job.run_id, job.forget, job.was_asked = self.run_id, self.drop, self._was_asked
        job.spares = lambda rank: self._spares(job, rank)
        job.cluster.bounds.expect_model(self.master.model_bytes)
        job.on(Prepared, self._on_prepared)
        job.on(StateLoaded, self._on_loaded)
        job.on(State, self._on_state)
        job.on(StepApplied, self._on_applied)  # a job that trains has more to do with it
        self.writer = RowWriter(self.spec, job.cluster.caches, job.cluster.notice)
        self.writer.attach(job, self.run_id)

    def find(self, job: Job, last_step: int, timeout_s: float | None) -> bool:
        """As for `StateAtWorkers`: workers that hold nothing of the run say so, without a generation."""
        self._building.update(dict.fromkeys(job.ready, -1))
        return super().find(job, last_step, timeout_s)

    def _was_asked(self, rank: int, generation: int) -> bool:
        return self._building.get(rank) == generation

    def _on_prepared(self, rank: int, message: Prepared, payload: memoryview) -> None:
        if message.run_id == self.run_id and self._was_asked(rank, message.generation):
            self._prepared[rank] = message
            can_hold = (
                message.ok and message.holds and 0 <= message.ticks <= len(self.ticks) and rank not in self._ahead
            )
            if can_hold and (step := self._step_kept(rank, message.step)) is not None:
                self.at[rank] = step
            self.on_disk.note(rank, message)

    def _on_loaded(self, rank: int, message: StateLoaded, payload: memoryview) -> None:
        if message.run_id == self.run_id and self._loading.get(rank) == (message.generation, message.step):
            del self._loading[rank]
            self._loaded[rank] = message
            self._device_kind[rank] = message.device_kind
            self.at[rank] = self._sent[rank] = message.step

    def _on_applied(self, rank: int, message: StepApplied, payload: memoryview) -> None:
        if message.run_id == self.run_id:
            self.note_commit(rank, message)

    # ----------------------------------------------------------------------------------------------------- prepare

    def prepare(self, job: Job, ranks: Iterable[int]) -> dict[int, Prepared]:
        """Have the workers build their replicas; returns the answers of those that could not.

        A worker that is lost meanwhile, or slow where others are not, simply gives no answer.
        """
        asked = self.ask(job, ranks)
        with job.waiting_for(lambda: self._preparing(asked)):
            job.pump(lambda: not self._waited_for(job, asked) - self._prepared.keys())
        self._ahead |= asked - self._prepared.keys()
        return self.conclude(job, asked)

    def ask(self, job: Job, ranks: Iterable[int]) -> set[int]:
        """Tell workers to build their replicas, as `prepare` does, and wait for none; returns the ranks."""
        asked = set(ranks)
        for rank in asked:
            self.drop(rank)
        self._ahead -= asked
        self._take_over()
        self.writer.expect(asked)
        job.cluster.roster.generation += 1  # the answer to an earlier order may still come, and is not that to this one
        self._building.update(dict.fromkeys(asked, attempt := job.cluster.roster.generation))
        self._keep = self._to_keep()
        wanted, numbers = self._proves and self.spec.parallel is None, (self.on_disk.numbers, self.own_numbers)
        there = (self.run_id, -1) if self.is_begun and not self._keep[0] else self._keep
        self.is_begun = False  # once: from here on they train it
        order = Prepare(self.run_id, self.cells, self.spec, attempt, *there, wanted, *numbers)
        job.cluster.send_all(asked, order)
        _ = self._proves and self._own_digest  # while they build
        return asked

    def ask_ahead(self, job: Job, ranks: Iterable[int], timeout_s: float) -> set[int]:
        """Have newcomers build their replicas; those that take longer than `timeout_s` do so while the others train on.

        Returns:
            Who has answered, for `conclude`.
        """
        asked = self.ask(job, ranks)
        job.pump(lambda: not (asked & job.ready) - self._prepared.keys(), timeout_s)
        self._ahead |= asked - self._prepared.keys()
        return asked & self._prepared.keys()

    def has_answered(self, rank: int) -> bool:
        """Whether a worker that was told to build its replica has said how that went."""
        return rank in self._prepared

    def conclude(self, job: Job, asked: set[int]) -> dict[int, Prepared]:
        """Look at the answers of workers that were asked; returns those that could not build their replicas."""
        for rank in asked & self.prepared():
            if self.code is not None and (problem := self.code.problem(self._prepared[rank].facts)):
                self._prepared[rank] = Prepared(run_id=self.run_id, ok=False, problem=problem)
            elif self.code is not None and (anew := self.code.begins_otherwise(self._prepared[rank].facts)):
                self._tell_once(job, anew)
        answers = {r: self._prepared[r] for r in asked if r in self._prepared}
        for rank in filter(self.holds, answers):
            self._send_ticks(job.cluster, [rank], answers[rank].ticks)
        self.writer.settle(job, [r for r, answer in answers.items() if answer.ok])
        layouts = ("", self.master.layout.digest())
        return {r: answer for r, answer in answers.items() if not answer.ok or answer.layout not in layouts}

    def tick(self, cluster: Cluster, ranks: Iterable[int], metric: float | None) -> None:
        """Advance the schedule of workers that stand at the last committed step, and of the master where it has the optimizer.

        Args:
            metric: the figure that the schedule follows; None for one that follows none.
        """
        self.ticks.append(metric)
        self._send_ticks(cluster, ranks, len(self.ticks) - 1)
        if self.spec.optimizer_site == "orchestrator":
            self.master.tick(metric)
        else:
            self.master_step = min(self.master_step, self.step - 1)

    def _send_ticks(self, cluster: Cluster, ranks: Iterable[int], after: int) -> None:
        for number, metric in enumerate(self.ticks[after:], after + 1):
            cluster.send_all(ranks, SchedulerStep(self.run_id, metric, number))

    def _preparing(self, asked: Iterable[int]) -> Iterator[OwedAnswer]:
        for rank in asked:
            if rank not in self._prepared:
                yield OwedAnswer(rank, "preparing", self._building[rank], "it builds the run")

    def _waited_for(self, job: Job, asked: set[int]) -> set[int]:
        """Those who must answer: who is away, or slow, is waited for only where no other can go on."""
        others = job.ready & (asked | self.at.keys())
        return asked & job.ready if self.elastic and others else asked & (job.ready | job.suspects)

    def _spares(self, job: Job, rank: int) -> bool:
        """Whether the run goes on without a worker: another holds the state too; or has built it, where this one holds none."""
        able = self.at.keys() if rank in self.at else self.prepared() | self.at.keys()
        others = able & job.ready - {rank}
        return self.spec.parallel is None and bool(others)

    def _tell_once(self, job: Job, sentence: str) -> None:
        if sentence not in self._told:
            self._told.add(sentence)
            job.cluster.notice(sentence)
            warnings.warn(sentence, stacklevel=2)

    def require(self, job: Job, ranks: Iterable[int]) -> None:
        """Have workers build the run.

        Raises:
            PreparationError: one cannot; the message says who and why.
        """
        problems: dict[str, list[str]] = {}
        for rank, answer in sorted(self.prepare(job, ranks).items()):
            problems.setdefault(preparation_text("", answer), []).append(job.cluster.name(rank))
        if problems:
            raise PreparationError("\n".join(f"{', '.join(names)}{said}" for said, names in problems.items()))

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

    def _to_keep(self) -> tuple[str, int]:
        """Run and step of what a worker need not build: the run before, or this one, to which it may come back."""
        if self.step < 0:
            return self.after or ("", -1)
        return (self.run_id, self.step) if self.spec.parallel is None else ("", -1)

    def _step_kept(self, rank: int, step: int) -> int | None:
        """At which step of this run a worker stands that kept what it had; None: it needs the state."""
        if self._keep[0] != self.run_id:
            return self.step if self._keep[0] else None
        return step if step >= self.step and self._may_hold(rank, step) else None

    def holds(self, rank: int) -> bool:
        """Whether a worker that prepared this run kept the state of its last committed step."""
        answer = self._prepared.get(rank)
        return answer is not None and answer.ok and answer.holds and self.at.get(rank) == self.step

    def returned(self, job: Job) -> list[int]:
        """Count the steps that workers took before they came back; returns those that hold the last committed one."""
        self.adopt_highest(job)
        return [rank for rank in self.in_step(job) if self.holds(rank)]

    def stand_at(self, state: StateOnDisk, ranks: Iterable[int]) -> None:
        """Go back to a state that these workers have read from their disks."""
        self.go_back(state.step)
        self.at = dict.fromkeys(ranks, state.step)
        self._sent = dict(self.at)
        del self.ticks[state.ticks :]  # they will be done again, by these

    @property
    def _proves(self) -> bool:
        """Whether workers can prove now that they have built the state."""
        return self.from_seed and self.step == -1

    @cached_property
    def _own_digest(self) -> str:  # of the weights of step 0
        return weights_digest(self.master.model)

    def _proof(self, rank: int) -> str:
        """Return the digest of the weights that a worker has built; "" where it gave none."""
        return self._prepared[rank].digest

    def _has_proved(self, rank: int) -> bool:
        return self._proves and bool(self._own_digest) and self._proof(rank) == self._own_digest

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
        self._loading = dict.fromkeys(ranks, (generation, step))
        proved, ticks = {rank for rank in ranks if self._has_proved(rank)}, len(self.ticks)
        if sent := set(ranks) - proved:
            tree, buffers = pack(dict(state() if callable(state) else state))
            for rank in sent:
                message = LoadState(self.run_id, generation, step, tree, True, ticks, self._dealt.get(rank, 0))
                job.cluster.send_all([rank], message, buffers)
        if proved:
            tree, buffers = pack(self.master.state(model=False))
            job.cluster.send_all(proved, LoadState(self.run_id, generation, step, tree, False, ticks), buffers)
        try:
            yield
        finally:
            self._loading = {}

    def _compare_loaded(self, job: Job, ranks: Iterable[int]) -> None:
        loaded = ((job.cluster.name(rank), self._loaded[rank]) for rank in ranks)
        check_equal((name, answer) for name, answer in loaded if answer.parameter_hash)  # the rest was proved

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
        made.saved_step, made.files, made._places = -1 if self.is_saved else None, list(self.files), self._places
        made.schedule, made.ticks, made._device_kind = self.schedule, self.ticks, dict(self._device_kind)
        name = f"the state after {self.nth(self.step)} of {self.run_id}"
        if master is self.master:
            made.beginning = Beginning.at_workers(name, master, lambda: self.copy, self.join, self.fallback())
        else:  # it is here, and stays with this run
            made.beginning = Beginning(name, None, self.master.state())
            made.schedule = self.master.schedule_state()
        return made

    def _new(self, run_id: str, master: Replica) -> ReplicaSet:
        made: ReplicaSet = type(self)(run_id, self.spec, self.cells, master)  # type: ignore[call-arg]
        return made


def begin_building(cluster: Cluster, run_id: str, spec: RunSpec, cells: Sequence[Cell]) -> None:
    """Have workers build a run while its master is built here, and wait for none: `ReplicaSet.ask` asks them how it went.

    A worker inside a user's process waits: it may be this one, and what a model draws at random is drawn from one stream.
    """
    roster = cluster.roster
    roster.generation += 1
    spawned = [rank for rank in roster.ready() if roster.members[rank].hello.program == "spawned"]
    cluster.send_all(spawned, Prepare(run_id, tuple(cells), spec, roster.generation))


def preparation_text(name: str, answer: Prepared) -> str:
    """Say why a worker could not build its replica, and what to do."""
    if answer.missing_module:
        return f"{name} cannot import {answer.missing_module!r}: {missing_advice(answer.missing_module)}"
    if answer.ok:
        return (
            f"{name} built a model with other parameters than the orchestrator's: use the same versions of the code and of "
            "torch on both sides"
        )
    return f"{name} cannot take part in the run: {answer.problem}"
