"""The replicas of one run: who has been prepared, who stands at which step, and the state that goes to and fro.

Outlives the job that made it, so that validation, checkpoints and a further run find the workers as they are.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from guava_nb.cluster.cluster import Cluster
from guava_nb.cluster.group_path import Route
from guava_nb.cluster.job import Job, NobodyLeft
from guava_nb.data.codec import pack, unpack
from guava_nb.data.loader_feed import Feed
from guava_nb.errors import PreparationError, TrainingError, WorkerLost
from guava_nb.protocol.messages import (
    Cell,
    Committed,
    FetchState,
    LoadState,
    Message,
    Prepare,
    Prepared,
    RunSpec,
    State,
    StateLoaded,
)
from guava_nb.replica.replica import Replica
from guava_nb.row_cache.writer import RowWriter
from guava_nb.spec.cells import pip_name

__all__ = ["ReplicaSet", "StateLate", "fetch_between_runs", "preparation_text", "raise_for"]

WAYS_ON = "Train anew with fresh=True (--fresh), or go on from a checkpoint (--resume)"


class ReplicaSet:
    """All replicas of one run.

    Attributes:
        master: the orchestrator's replica. With optimizer_site="orchestrator" it is the authority; otherwise it is where
            fetched state lands, and what a run's model() gives.
        at: last committed step of each worker that holds a replica in step with the run.
        step: last committed step of the run, -1 before the first.
        generation_of: generation of each worker's last report of a commit.
        master_step: the step at which the master's state was taken.
        route: the way by which the replicas meet, and why.
        writer: writes batches for the workers; made by `attach`.
    """

    writer: RowWriter

    def __init__(self, run_id: str, spec: RunSpec, cells: Sequence[Cell], master: Replica) -> None:
        """Start with no worker prepared."""
        self.run_id = run_id
        self.spec = spec
        self.cells = tuple(cells)
        self.master = master
        self.master_step = -1
        self.route = Route("relay", "star", "whole replicas meet at the orchestrator")
        self.step = -1
        self.at: dict[int, int] = {}
        self.generation_of: dict[int, int] = {}
        self._prepared: dict[int, Prepared] = {}
        self._loaded: dict[int, StateLoaded] = {}
        self._requests = itertools.count(1)
        self._states: dict[int, tuple[int, dict[str, Any]]] = {}
        self._awaited: set[int] = set()  # requests whose answer is waited for
        self._learning_rates: dict[int, float] = {}
        self._hashes: dict[int, dict[str, dict[str, int]]] = {}
        self._device_kind: dict[int, str] = {}

    # ---------------------------------------------------------------------------------------------------- messages

    @property
    def layout_text(self) -> str:
        """How one model is spread over the workers, in words; "" for whole replicas."""
        return ""

    def look_at(self, feed: Feed) -> None:
        """Take what must be known of the data beforehand: nothing for whole replicas."""

    def attach(self, job: Job) -> None:
        """Handle this ensemble's messages in that job."""
        job.run_id, job.forget = self.run_id, self.drop
        for record, handler in (
            (Prepared, self._on_prepared),
            (StateLoaded, self._on_loaded),
            (State, self._on_state),
        ):
            job.on(record, handler)
        self.writer = RowWriter(self.spec, job.cluster)
        self.writer.attach(job, self.run_id)

    def _on_prepared(self, rank: int, message: Message, payload: memoryview) -> None:
        assert isinstance(message, Prepared)
        if message.run_id == self.run_id:
            self._prepared[rank] = message

    def _on_loaded(self, rank: int, message: Message, payload: memoryview) -> None:
        assert isinstance(message, StateLoaded)
        if message.run_id == self.run_id:
            self._loaded[rank] = message
            self._device_kind[rank] = message.device_kind
            self.at[rank] = message.step

    def _on_state(self, rank: int, message: Message, payload: memoryview) -> None:
        assert isinstance(message, State)
        if message.run_id == self.run_id and message.request_id in self._awaited:
            self._states[message.request_id] = (message.step, unpack(message.state, payload))

    def note_commit(self, rank: int, message: Committed) -> str | None:
        """Note that a worker applied a step; returns a worker's name-free sentence when its parameters differ."""
        self.at[rank] = message.step
        # The report of a step that was committed before an abort comes after the answer to the abort.
        self.generation_of[rank] = max(message.generation, self.generation_of.get(rank, -1))
        if message.learning_rate is not None:
            self._learning_rates[message.step] = message.learning_rate
            self._learning_rates.pop(message.step - 8, None)
        if not message.parameter_hash:
            return None
        kind = self._device_kind.get(rank, "")
        known = self._hashes.setdefault(message.step, {}).setdefault(kind, {})
        for step in [s for s in self._hashes if s < message.step - 4]:
            del self._hashes[step]
        known.setdefault(message.parameter_hash, rank)
        if len(known) == 1:
            return None
        return f"parameters differ after step {message.step} from those of other workers of the same kind ({kind})"

    def has_settled(self, rank: int, generation: int) -> bool:
        """Whether a worker has heard of a generation and applied all that was committed before; or holds the run no more."""
        return rank not in self.at or (self.generation_of.get(rank, -1) >= generation and self.at[rank] >= self.step)

    def go_back(self, step: int) -> None:
        """Steps after this one will be done again, by others: what was reported of them counts no more.

        With other shares the sums round differently, so even right parameters would have other hashes than before.
        """
        self.step = step
        self._hashes.clear()
        self._learning_rates.clear()

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
            self._prepared.pop(rank, None)
            self.at.pop(rank, None)
        self.writer.expect(asked)
        job.cluster.send_all(asked, Prepare(self.run_id, self.cells, self.spec))
        job.pump(lambda: all(r in self._prepared for r in asked & (job.ready | job.suspects)))
        answers = {r: self._prepared[r] for r in asked if r in self._prepared}
        self.writer.settle(job, [r for r, answer in answers.items() if answer.ok])
        return {r: answer for r, answer in answers.items() if not answer.ok or self._check_layout(answer)}

    def _check_layout(self, answer: Prepared) -> bool:
        return bool(answer.layout) and answer.layout != self.master.layout.digest()

    def prepared(self) -> set[int]:
        """Return the ranks that built their replicas."""
        return {r for r, answer in self._prepared.items() if answer.ok}

    def drop(self, rank: int) -> None:
        """A worker does not hold this run any more."""
        self._prepared.pop(rank, None)
        self.at.pop(rank, None)

    # ------------------------------------------------------------------------------------------- who can take part

    #: Every replica is whole, so any number of workers can go on.
    elastic = True
    #: How many workers the run needs.
    least = 1

    def pick(self, ranks: Iterable[int]) -> set[int]:
        """Choose who takes part among those that are there: all."""
        return set(ranks)

    def connected(self, available: Sequence[int]) -> bool:
        """Whether a step can be issued to those members that are connected."""
        return bool(available)

    def newcomers(self, holders: set[int], fit: set[int]) -> list[int]:
        """Return who is there and needs the state first."""
        return sorted(fit - holders)

    def check(self, job: Job) -> None:
        """Unwind a job whose members cannot go on together; replicas need each other for nothing."""

    def disband(self) -> None:
        """The members will not go on as they are."""

    def retire(self) -> None:
        """The members were told to give up: they hold the state, and whatever they did together is over."""

    def rescue(self, job: Job) -> bool:
        """Take the state of the last committed step from whoever is left; returns whether it is here."""
        try:
            self.fetch(job)
        except (NobodyLeft, WorkerLost):
            return False
        return True

    def bring_up(self, job: Job) -> None:
        """Give the run and its state to connected workers that do not hold it."""
        missing = sorted(job.ready - set(self.in_step(job)))
        if missing:
            state = self.fetch(job)
            self.require(job, missing)
            self.load(job, missing, state, self.step)

    def require(self, job: Job, ranks: Iterable[int]) -> None:
        """Have workers build the run.

        Raises:
            PreparationError: one cannot; the message says who and why.
        """
        raise_for(self.prepare(job, ranks), job)

    # ------------------------------------------------------------------------------------------------------- state

    def load(self, job: Job, ranks: Iterable[int], state: Mapping[str, Any], step: int) -> None:
        """Bring workers to a state.

        Raises:
            TrainingError: a worker's parameters differ from the master's after loading, on a like device.
        """
        asked = set(ranks)
        for rank in asked:
            self._loaded.pop(rank, None)
            self.at.pop(rank, None)
        tree, buffers = pack(dict(state))
        message = LoadState(self.run_id, job.cluster.roster.generation, step, tree)
        job.cluster.send_all(asked, message, buffers)
        job.pump(lambda: all(r in self._loaded for r in asked & (job.ready | job.suspects)))
        self._compare_hashes(job, [r for r in asked if r in self._loaded])

    def _compare_hashes(self, job: Job, ranks: Sequence[int]) -> None:
        first: dict[str, tuple[int, str]] = {}
        for rank in ranks:
            loaded = self._loaded[rank]
            reference = first.setdefault(loaded.device_kind, (rank, loaded.parameter_hash))
            if loaded.parameter_hash != reference[1]:
                raise TrainingError(
                    f"{job.cluster.name(rank)} and {job.cluster.name(reference[0])} hold different parameters after the same "
                    f"state of step {loaded.step} was sent to both (hash {loaded.parameter_hash[:12]} and "
                    f"{reference[1][:12]}); start the run again, and check the memory of {job.cluster.name(rank)}"
                )

    def in_step(self, job: Job) -> list[int]:
        """Return the connected ranks that stand at the last committed step."""
        return sorted(r for r, step in self.at.items() if step == self.step and r in job.ready)

    def next_request(self) -> int:
        """Return a number that no request of this run had before, so that a late answer is never taken for another's."""
        return next(self._requests)

    def _adopt_highest(self, job: Job) -> None:
        """The highest step that any worker applied wins: a lone worker may have committed while it was told to stop."""
        self.step = max([self.step, *(step for rank, step in self.at.items() if rank in job.ready)])

    def fetch(self, job: Job, *, optimizer: bool = True, timeout_s: float | None = None) -> dict[str, Any]:
        """Return the state as of the last committed step and keep it in the master.

        Raises:
            StateLate: whoever has it is at work on something longer than `timeout_s`; it can be asked for again.
            WorkerLost: no worker with this state is left.
        """
        if self.master_step == self.step:
            return self.master.state()
        late: set[int] = set()
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
                state = self._fetch_from(job, prompt[0], optimizer, timeout_s)
            except StateLate:
                late.update(prompt[:1] if self.elastic else prompt)
                continue
            if state is not None:
                return state

    def _may_have(self, job: Job) -> bool:
        return any(r in self.at for r in job.ready | job.suspects)

    def _fetch_from(self, job: Job, rank: int, optimizer: bool, timeout_s: float | None) -> dict[str, Any] | None:
        step, state = self._answers(job, [rank], optimizer, timeout_s)[0]
        if step is not None:
            # It may have applied steps whose report was lost with a connection between two runs: then those count.
            self.at[rank] = step
            self._adopt_highest(job)
        if state is None or step != self.step:
            return None
        self.master.load_state(state)
        if optimizer:
            self.master_step = self.step
        return dict(state)

    def _answers(
        self, job: Job, ranks: Sequence[int], optimizer: bool, timeout_s: float | None
    ) -> list[tuple[int | None, Any]]:
        """Ask members for what they hold: for each the step and the state, None where it is lost or forgot the run.

        Raises:
            StateLate: one is there and gave no answer in time.
        """
        requests = {self.next_request(): rank for rank in ranks}
        self._awaited = set(requests)  # what was asked for earlier and comes now would be kept for nothing
        self._states.clear()
        for request, rank in requests.items():
            job.cluster.send(rank, FetchState(request, self.run_id, optimizer=optimizer))

        def settled() -> bool:
            return all(
                q in self._states or rank not in job.ready or rank not in self.at for q, rank in requests.items()
            )

        in_time = job.pump(settled, timeout_s)
        self._awaited = set()
        if not in_time:
            raise StateLate("no answer in time")
        return [self._states.pop(request, (None, None)) for request in requests]


class StateLate(WorkerLost):
    """The state is there, and nobody could hand it over in time."""


class _Fetching(Job):
    def on_leaving(self, rank: int) -> None:
        """It may have what is fetched; the end of this job releases it."""


def fetch_between_runs(replica_set: ReplicaSet, cluster: Cluster, timeout_s: float | None) -> dict[str, Any]:
    """Return the state of the last committed step, from a worker when it is not here; no run may be in progress.

    Raises:
        WorkerLost: the workers that hold it are gone.
        ClusterError: a run is in progress.
    """
    if replica_set.master_step == replica_set.step:
        return replica_set.master.state()
    job = _Fetching(cluster)
    replica_set.attach(job)
    try:
        with job.attached():
            return replica_set.fetch(job, timeout_s=timeout_s)
    except NobodyLeft as error:
        raise WorkerLost(
            f"the workers that hold the state of step {replica_set.step + 1} are gone; the orchestrator has that of step "
            f"{replica_set.master_step + 1}. {WAYS_ON}"
        ) from error


def preparation_text(name: str, answer: Prepared) -> str:
    """Say why a worker could not build its replica, and what to do."""
    if answer.missing_module:
        package = pip_name(answer.missing_module.split(".")[0])
        return f"{name} cannot import {answer.missing_module!r}: run  %pip install {package}  in its notebook, then start again"
    if answer.ok:
        return (
            f"{name} built a model with other parameters than the orchestrator's: use the same versions of the code and of "
            "torch on both sides"
        )
    return f"{name} cannot build the run: {answer.problem}"


def raise_for(problems: Mapping[int, Prepared], job: Job) -> None:
    """Raise PreparationError with one line per worker when there are problems."""
    if problems:
        raise PreparationError("\n".join(preparation_text(job.cluster.name(r), a) for r, a in sorted(problems.items())))
