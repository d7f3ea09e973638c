"""The state of a run that lies at its workers: who has it, how it is fetched, left there, and copied in the background."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from guava_nb.cluster.cluster import Cluster
from guava_nb.cluster.job import Job
from guava_nb.cluster.owed_answers import OwedAnswer
from guava_nb.data.codec import Resolve
from guava_nb.errors import TrainingError, WorkerLost
from guava_nb.protocol.messages import FetchState, SavedState, SaveState, State
from guava_nb.replica.one_step_check.python_state import changed_since, digests
from guava_nb.replica.replica import Replica
from guava_nb.sync.beginning import Beginning
from guava_nb.sync.own_state import OwnParts
from guava_nb.sync.state_copy import COMING_BYTES, StateCopy, received_bytes, state_in
from guava_nb.sync.steps_held import StepsHeld

__all__ = ["NOT_HERE", "StateAtWorkers", "StateLate"]

#: A step that is never committed: the master does not hold the run's state yet.
NOT_HERE = -2
_ANEW = "train anew with fresh=True (--fresh)"


class StateLate(WorkerLost):
    """A worker has the state and did not hand it over in time."""


class StateAtWorkers(StepsHeld, ABC):
    """What the workers of one run hold, and what of it is here.

    Attributes:
        run_id: of the run.
        master: the orchestrator's replica. With optimizer_site="orchestrator" it is the authority; otherwise it is where
            fetched state lands, and what a run's model() gives.
        master_step: the step at which the master's state was taken.
        elastic: every replica is whole, so any number of workers can go on.
        kept, kept_first: what user code changed outside of the state, as `State` tells it; digests of what is here at first.
        beginning: the state with which the run begins.
        ahead: a copy of a step's state, on its way here while the job trains on; None where none was asked for.
        copy: of the state after the last step, on its way here outside of a job; None where none was asked for.
        count_ahead: called before the run's step rises to one that a worker reached alone; counts the steps up to it.
        unit: what a step of these replicas is: "step", or "round" of local steps.
        schedule: settings of the optimizer's groups and state of the scheduler, where a run left all else with its workers.
        own: what workers keep on their disks for a checkpoint of this run, or for the one that it goes on from; None: nothing.
        ticks: the metric of each tick of a schedule of epochs or validations, in this run and those that it goes on from.
        saved_step: the step after which its state was saved to a file; None: what it begins with was trained and not saved.
        files: those that states of this run were written to, and of those that it goes on from; the newest is the last one.
    """

    #: Finds the classes that may come in a worker's state.
    _resolve: Resolve | None = None
    unit = "step"

    def __init__(self, run_id: str, master: Replica, elastic: bool) -> None:
        """No worker holds anything."""
        super().__init__()
        self.run_id, self.master, self.elastic = run_id, master, elastic
        self.master_step, self.kept_first = -1, _kept_here(master)
        self.kept: tuple[str, ...] = ()
        self._name_of_beginning = f"the state that {run_id} began with"
        self.beginning = Beginning(self._name_of_beginning, master)
        self.copy: StateCopy | None = None
        self.ahead: StateCopy | None = None
        self.count_ahead: Callable[[int], None] = lambda step: None
        self.schedule: dict[str, Any] | None = None
        self.own: OwnParts | None = None
        self._dealt: dict[int, int] = {}  # by rank the number of the own part that it is to read
        self._places: dict[int, int] = {}
        self.ticks: list[float | None] = []
        self.saved_step: int | None = -1  # before the first one nothing was trained
        self.files: list[Path] = []
        self._requests = itertools.count(1)
        self._awaited: dict[int, int] = {}  # requests whose answer is waited for, and of whom
        self._states: dict[int, tuple[int, dict[str, Any] | SavedState]] = {}

    def nth(self, step: int) -> str:
        """Return a step of this number, from 0, in words."""
        return f"{self.unit} {step + 1}"

    @abstractmethod
    def abort(self, job: Job, ranks: Collection[int], reason: str, last: int | None = None) -> None:
        """Have workers give up what is not committed, and say how far they are.

        Args:
            job: of the run.
            ranks: of the workers.
            reason: for people.
            last: the step to end at; None: the last committed one.
        """

    def retire(self) -> None:  # noqa: B027 - whole replicas need nothing
        """Note that the members were told to give up: they keep the state, and their group is over."""

    def _on_state(self, rank: int, message: State, payload: memoryview) -> None:
        if self.ahead is not None and self.ahead.take(rank, message, payload):
            self.kept = message.kept
            return
        asked = message.run_id == self.run_id and self._awaited.get(message.request_id) == rank
        if asked and self._may_hold(rank, message.step):
            if message.saved is not None:
                self._states[message.request_id] = (message.step, message.saved)
                return
            state = state_in(message, payload, self._resolve)
            self.kept = message.kept
            self._states[message.request_id] = (message.step, state)

    def in_step(self, job: Job) -> list[int]:
        """Return the connected ranks that stand at the last committed step."""
        return sorted(r for r, step in self.at.items() if step == self.step and r in job.ready)

    def place(self, rank: int) -> tuple[int, int]:
        """Return what a team is ordered by: the place of the own part that a worker read, then the rank."""
        return (0, self._places[rank]) if rank in self._places else (1, rank)

    def keep_own(self, job: Job) -> None:
        """Have each worker keep on its disk what only it has after the last committed step, for a checkpoint of that step.

        There is something of the kind in rounds of local steps with several workers.
        """

    def go_on_with(self, own: OwnParts) -> None:
        """Begin with what workers kept for a checkpoint of the state that the run begins with."""
        self.own = own

    def own_of(self, step: int) -> OwnParts | None:
        """Return what workers keep for a checkpoint of the state after this step."""
        return self.own if self.own is not None and self.own.step == step else None

    @property
    def own_numbers(self) -> tuple[int, ...]:
        """Those of what workers keep for a checkpoint of where the run stands."""
        return () if (own := self.own_of(self.step)) is None else tuple(own.numbers)

    def givers(self, job: Job) -> list[int]:
        """Return connected ranks: one, with those that hold the rest of it, can give the last committed step's state."""
        return self.in_step(job)

    def next_request(self) -> int:
        """Return a number that no request of this run had before, so that a late answer is never taken for another's."""
        return next(self._requests)

    def adopt_highest(self, job: Job) -> None:
        """The highest step that any worker applied wins: one that applies by itself may have while it was told to stop."""
        highest = max([self.step, *(step for rank, step in self.at.items() if rank in job.ready)])
        if highest > self.step:
            self.count_ahead(highest)
        self.step = highest

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
        if not job.trains and not self.givers(job):  # reports that came while no job listened are lost
            self.abort(job, [rank for rank in self.at if rank in job.ready | job.suspects], "the state is asked for")
            self.retire()
        while True:
            job.pump(partial(self._is_known_who_has_it, job), timeout_s)
            holders = self.givers(job)
            if not holders:
                raise WorkerLost(
                    f"no worker that holds the state of {self.nth(self.step)} is left or answers; {self.rest()}. {self.ways_on()}"
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

    def find(self, job: Job, last_step: int, timeout_s: float | None) -> bool:
        """Ask the connected workers at which step of this run they stand, which began in a process that is gone.

        Args:
            job: through which messages are sent and answers awaited.
            last_step: the last one that was issued there.
            timeout_s: for the answers; None waits as long as the workers live.

        Returns:
            Whether one holds a state of it; the run's step is that of the newest then.
        """
        ranks = sorted(job.ready)
        self.step, self._sent = last_step, dict.fromkeys(ranks, last_step)
        self.at = dict.fromkeys(ranks, -1)
        answers = self._answers(job, ranks, timeout_s, whole=False)
        self.at = {rank: step for rank, (step, _) in zip(ranks, answers, strict=True) if step is not None}
        self.step = max(self.at.values(), default=-1)
        return self.step >= 0

    def _is_known_who_has_it(self, job: Job) -> bool:
        self.adopt_highest(job)
        return bool(self.givers(job)) or not self._may_have(job)

    def _late(self, names: str, timeout_s: float | None) -> StateLate:
        return StateLate(
            f"{names} did not hand over the state of {self.nth(self.step)} within {timeout_s:g} s: a long step is still in work "
            "there. Nothing is lost: ask again when it is over"
        )

    def _come(self, job: Job, timeout_s: float | None) -> dict[str, Any] | None:
        """Wait for the copy that is on its way; None: there is none, or it cannot come any more."""
        copy = self.copy
        if copy is None or copy.step != self.step:
            return None

        def is_over() -> bool:
            return copy.is_over(lambda rank: rank not in job.ready | job.suspects)

        if not pump_while_coming(job, copy.ranks, is_over, timeout_s):
            raise self._late(" and ".join(map(job.cluster.name, copy.ranks)), timeout_s)
        self.copy = None
        return self._take(copy.parts(), job, copy.ranks) if copy.is_whole else None

    def _take(self, parts: Sequence[Mapping[str, Any]], job: Job, ranks: Collection[int]) -> dict[str, Any]:
        self.beginning.preserve()
        try:
            state = self._take_in(parts)
        except Exception as error:  # what came has the form of a state, and is none of this model
            who = " and ".join(map(job.cluster.name, ranks))
            raise TrainingError(
                f"the state of {self.nth(self.step)} from {who} cannot be taken ({type(error).__name__}: {error}). "
                f"{self.ways_on()}"
            ) from error
        self.master_step = self.step
        return state

    def begin_with_what_is_here(self) -> None:
        """Note that the run begins with the state that the master holds now."""
        self.beginning = Beginning(self._name_of_beginning, self.master)

    def leave(self, job: Job) -> bool:
        """Leave the state of the last committed step with the workers, and take only its schedule, and what else they changed.

        Returns:
            Whether they have it; if not, `fetch` says what is left.
        """
        holders = self.givers(job)
        asked = self._holders_with(holders[0]) if holders else []
        answers = self._answers(job, asked, None, whole=False)
        if not answers or any(step != self.step or "groups" not in found for step, found in answers):
            return False
        self.schedule = next((found for _, found in answers if found["groups"]), None)
        return True

    def holders(self, cluster: Cluster) -> list[int]:
        """Return the workers, connected or expected back, that hold the state of the last committed step between two runs."""
        return sorted(rank for rank in cluster.roster.alive() if self.at.get(rank) == self.step)

    def left_text(self, cluster: Cluster) -> str:
        """Say where the state stays after a run; "" where it is here."""
        names = " and ".join(map(cluster.name, self.holders(cluster)))
        if self.master_step == self.step or not names:
            return ""
        return (
            f"the state after {self.nth(self.step)} is with {names} and comes here in the background; run.model() and "
            "save_checkpoint (%guava_save) bring it at once"
        )

    def begin_copy(self, cluster: Cluster) -> None:
        """Have the state of the last committed step come here, whatever job is at work meanwhile; not where it is here."""
        if self.master_step == self.step:  # it was asked for since the run ended
            return
        holders = self.holders(cluster)
        asked = self._holders_with(holders[0]) if holders else []
        if self.copy is None and asked and set(asked) <= set(cluster.roster.ready()) & set(holders):
            self.copy = StateCopy(
                self.run_id, self.step, {self.next_request(): r for r in asked}, self._resolve, len(self.ticks)
            )
            self.copy.ask(cluster)

    def ask_for_copy(self, job: Job, save: SaveState | None = None, whole: bool = True) -> StateCopy | None:
        """Have the state of the last committed step come while the job goes on; None: no worker that is here has it.

        No step may be in flight. A worker that has gone on when it is asked answers with another step's, and the copy fails.

        Args:
            job: through which messages are sent and answers come.
            save: what shall be done with it at the worker.
            whole: it comes here, too.
        """
        job.pump(partial(self._is_known_who_has_it, job))
        holders = self.givers(job)
        asked = self._holders_with(holders[0]) if holders else []
        if not asked or not set(asked) <= job.ready:
            return None
        requests = {self.next_request(): rank for rank in asked}
        self.ahead = StateCopy(self.run_id, self.step, requests, self._resolve, len(self.ticks), save, whole)
        for question, rank in self.ahead.questions():
            job.cluster.send(rank, question)
        return self.ahead

    def fall_back(self) -> str:
        """The workers that held the state are lost: be what is left; returns which state that is."""
        left = self.fallback()
        name, state = left.name, left.state()
        self.go_back(max(self.master_step, -1))
        self.master.load_state(state)
        self.master_step = self.step
        return name

    def note_saved(self, path: Path, step: int) -> None:
        """Note that a file has the state after a step."""
        self.saved_step = step
        self.files.append(path)

    def newest_file(self) -> Path | None:
        """Return the file with the newest state of this run that is still there; None where there is none."""
        return next((file for file in reversed(self.files) if file.is_file()), None)

    def ways_on(self) -> str:
        """Say how to train on where the workers that hold the state are gone."""
        if (file := self.newest_file()) is None:
            return f"{_ANEW[0].upper()}{_ANEW[1:]}, or go on from a checkpoint (--resume)"
        return f"Go on from its newest checkpoint with resume={str(file)!r} (--resume {file}), or {_ANEW}"

    def rest(self) -> str:
        """Say which state the orchestrator has."""
        if self.master_step == NOT_HERE:
            return f"the orchestrator has {self.beginning.name}"
        return f"the orchestrator has that of {self.nth(self.master_step)}"

    def fallback(self) -> Beginning:
        """Return what is left where the workers that hold the state of the last step are lost."""
        if self.master_step == NOT_HERE:
            return self.beginning
        if self.master_step < 0:
            return Beginning(self.beginning.name, self.master)
        return Beginning(f"the state after {self.nth(self.master_step)} of {self.run_id}", self.master)

    def join(self, parts: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Make one state of the parts that workers hold."""
        return parts[0]

    def _may_have(self, job: Job) -> bool:
        """Whether workers that are here, or expected back, may still hold the state."""
        here = (job.ready | job.suspects) & self.at.keys()
        return any(r not in job.leaving or self.at[r] == self.step for r in here)

    def _fetch_from(self, job: Job, rank: int, timeout_s: float | None) -> dict[str, Any] | None:
        """Take the state from a worker, or from all that have a part of it; None: it is of another step, or lost."""
        asked = self._holders_with(rank)
        answers = self._answers(job, asked, timeout_s)
        for member, (step, _) in zip(asked, answers, strict=True):
            if step is not None:  # its report may have been lost with a connection between two runs
                self.at[member] = step
        self.adopt_highest(job)
        parts = [part for step, part in answers if part is not None and step == self.step]
        if len(parts) < len(answers):
            self._on_no_state([part for _, part in answers])
            return None
        return self._take(parts, job, asked)

    def _holders_with(self, rank: int) -> Sequence[int]:
        """Return the workers whose parts make the whole state, this one among them."""
        return [rank]

    def _on_no_state(self, parts: Sequence[Mapping[str, Any] | None]) -> None:  # noqa: B027 - whole replicas need nothing
        """React to answers that do not make the whole state."""

    @abstractmethod
    def _take_in(self, parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Put the state into the master, and return it."""

    def _answers(
        self, job: Job, ranks: Sequence[int], timeout_s: float | None, whole: bool = True,
        orders: Mapping[int, SaveState] = MappingProxyType({}),
    ) -> list[tuple[int | None, Any]]:  # fmt: skip
        """Ask members for what they hold: for each the step and the state, None where it is lost or forgot the run.

        Args:
            whole: the whole state, not its schedule alone.
            orders: what a worker shall do with its state instead; for it a `SavedState` is returned in its place.

        Raises:
            StateLate: one is there and gave no answer in time.
        """
        # What was asked for earlier and comes now would be kept for nothing.
        self._awaited = requests = {self.next_request(): rank for rank in ranks}
        self._states.clear()
        for request, rank in requests.items():
            job.cluster.send(rank, FetchState(request, self.run_id, whole, whole, len(self.ticks), orders.get(rank)))
        about, job.about_request = job.about_request, lambda request: "" if request in requests else about(request)

        def owed() -> Iterator[OwedAnswer]:
            for request, rank in requests.items():
                if request not in self._states and rank in self.at and self._is_waited_for(job, rank):
                    yield OwedAnswer(rank, "state", request, "it sends the state")

        try:
            with job.waiting_for(owed):
                in_time = pump_while_coming(job, ranks, lambda: not list(owed()), timeout_s)
        finally:
            self._awaited, job.about_request = {}, about
        if not in_time:
            raise StateLate("no answer in time")
        return [self._states.pop(request, (None, None)) for request in requests]

    def _is_waited_for(self, job: Job, rank: int) -> bool:
        """Whether its answer may come: one whose connection broke goes on with it, and asking anew would begin it anew."""
        others = self.elastic and set(self.in_step(job)) - {rank}
        return rank in job.ready or (rank in job.suspects and not others)


def pump_while_coming(job: Job, ranks: Collection[int], until: Callable[[], bool], timeout_s: float | None) -> bool:
    """Handle events until the condition holds; as long as much comes from these workers, the time begins anew.

    Args:
        job: whose events are handled.
        ranks: of those from whom something is awaited.
        until: whether it has come.
        timeout_s: without much coming; None: without an end.
    """
    seen = received_bytes(job.cluster, ranks) if timeout_s is not None else 0
    while not job.pump(until, timeout_s):
        if (now := received_bytes(job.cluster, ranks)) < seen + COMING_BYTES:
            return False
        seen = now
    return True


def changed_in_python(replicas: StateAtWorkers) -> tuple[str, ...]:
    """What the user's code changed in a run outside of the state, at the workers and in the optimizer that is here."""
    return tuple(dict.fromkeys((*replicas.kept, *changed_since(replicas.kept_first, _kept_here(replicas.master)))))


def _kept_here(master: Replica) -> dict[str, bytes]:
    """Digests of what an optimizer at the orchestrator keeps beside its state, on itself and on parameters."""
    at_workers = master.optimizer is None or master.optimizer_site == "workers"
    return {} if at_workers else digests(master.model, {}, master.optimizer)
